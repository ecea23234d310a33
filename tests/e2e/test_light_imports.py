"""Serving on a CPU asks for neither torch nor transformers: server, core, `LLM` and `bench` run where importing them
fails, and what serving has no use for is not imported either."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.server import MODEL, running_server

OFFLINE = """
import sys
from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.sampling_params import BeamSearchParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], device="cpu", max_model_len=256, num_gpu_blocks_override=64, seed=0, **eval(sys.argv[2]))
    choice = StructuredOutputsParams(choice=["red", "green"])
    plain = SamplingParams(max_tokens=4, temperature=0)
    sampled = SamplingParams(max_tokens=4, temperature=1, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1)
    chosen = SamplingParams(max_tokens=8, structured_outputs=choice, presence_penalty=0.5, logit_bias={1: 2.0})
    measured = SamplingParams(max_tokens=4, logprobs=5, prompt_logprobs=2, ignore_eos=True)
    prompts = ["A", {"prompt_token_ids": [5, 6]}, "The colour is", "A"]
    outputs = llm.generate(prompts, [plain, sampled, chosen, measured], use_tqdm=False)
    assert outputs[2].outputs[0].text in ("red", "green")
    assert len(outputs[3].outputs[0].logprobs) == 4
    llm.chat([{"role": "user", "content": "Hi"}], plain, use_tqdm=False)
    assert len(llm.beam_search([{"prompt": "A"}], BeamSearchParams(beam_width=2, max_tokens=3))[0].sequences) == 2
    assert not {"torch", "transformers", "fastapi"} & set(sys.modules)
"""


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each time that a process from here on tries to import torch or transformers. It fails."""
    folder, log = tmp_path / "without", tmp_path / "attempts"
    folder.mkdir()
    for name in ("torch", "transformers"):
        (folder / f"{name}.py").write_text(
            f"import traceback\nprint(*traceback.format_stack(), file=open({str(log)!r}, 'a'))\n"
            f"raise ImportError('no {name} here')\n"
        )
    here = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), here, os.environ.get("PYTHONPATH", "")]))
    return log


def tried(attempts: Path) -> str:
    return attempts.read_text() if attempts.exists() else ""


def test_a_server_answers_chats_and_completions(attempts: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, "--device", "cpu", "--max-model-len", "1024", "--max-num-seqs", "4") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.5}):
            chat = client.chat.completions.create(model=MODEL, messages=question, max_tokens=8, **sampling)
            assert chat.choices[0].message.content
            choice = {"structured_outputs": {"choice": ["red", "green"]}}
            done = client.completions.create(
                model=MODEL, prompt="The colour is", max_tokens=8, extra_body=choice, **sampling
            )
            assert done.choices[0].text in ("red", "green")
        four: dict[str, Any] = {"model": MODEL, "prompt": "One two", "max_tokens": 4, "temperature": 0}
        chunks = client.completions.create(**four, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == client.completions.create(**four).choices[0].text
        measured = client.chat.completions.create(
            model=MODEL, messages=question, max_tokens=4, logprobs=True, top_logprobs=3
        )
        assert [len(token.top_logprobs) for token in measured.choices[0].logprobs.content] == [3] * 4
        assert tried(attempts) == ""


@pytest.mark.long
@pytest.mark.parametrize("form", ["gguf", "folder"])
def test_a_script_answers(form: str, attempts: Path, tmp_path: Path, tiny_tokenizer: Path) -> None:
    model, options = "", "{}"
    if form == "folder":
        shutil.copytree(tiny_tokenizer, tmp_path / "m")
        (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0].content }}")
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 259, "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 256, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (tmp_path / "m" / "config.json").write_text(json.dumps(config))
        model, options = str(tmp_path / "m"), "{'load_format': 'dummy'}"
    (tmp_path / "script.py").write_text(OFFLINE)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), model, options], capture_output=True, text=True, timeout=120
    )
    assert tried(attempts) == ""
    assert done.returncode == 0, done.stderr
