"""What needs torchvision, which the tests' environment lacks: its wheels are for one build of torch, and where it does
not fit the torch that is there, transformers cannot be imported. So it is put beside, for one process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.installing import why_not

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is here: the tests have run"),
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed"),
]

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/multimodal/test_{name}.py" for name in ("videos", "families", "video_server")]
# For a torchvision whose compiled operators are for another build of torch: processors of models use none of them. Of
# their names two are asked for as it is imported.
OPERATORS = """import torch

_OPERATORS = torch.library.Library("torchvision", "DEF")
_OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def test_videos_and_processors_of_torchvision(tmp_path: Path) -> None:
    minor = int(torch.__version__.split(".")[1])
    wanted = f"torchvision==0.{minor + 15}.*"  # 0.28 goes with torch 2.13
    installing = ["uv", "pip", "install", "--no-deps", "--python", sys.executable, "--target", str(tmp_path), wanted]
    if reason := why_not(installing):
        pytest.skip(f"{wanted} cannot be installed here: {reason}")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path}
    if subprocess.run([sys.executable, "-c", "import torchvision"], env=env, capture_output=True).returncode:
        first = tmp_path / "torchvision" / "__init__.py"
        whole = OPERATORS + first.read_text()
        first.unlink()  # it may be a link to a file that others read
        first.write_text(whole)
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", "0", *TESTS, "-rs",
        "-k", "transformers_sees or chats_have or rows_of_a_video or flags_of or Pixtral or Mistral3 or Llama4 "
        "or Qwen2VL or video_server or LightOnOcr or Cohere2Vision or Lfm2Vl or Kimi or Phi4",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "SKIPPED" not in done.stdout, done.stdout[-2000:]
