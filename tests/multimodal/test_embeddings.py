"""Rows that requests bring in the place of pictures and sounds."""

from __future__ import annotations

import base64
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save

from octavo import LLM
from octavo.errors import ConfigError, RequestError
from octavo.loading.torch_archive import read_torch_tensor
from octavo.multimodal.embeddings import Embeddings, EmbeddingsReader, FrameTimes
from tests.multimodal.conftest import picture
from tests.multimodal.test_connector import CONFIG
from tests.multimodal.test_llava import GREEDY, engine, generate, tower

A = picture(0)
ROWS = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def saved(tensor: Any, **options: Any) -> str:
    out = io.BytesIO()
    torch.save(tensor, out, **options)
    return base64.b64encode(out.getvalue()).decode()


def safetensors(**tensors: torch.Tensor) -> str:
    return base64.b64encode(save(tensors)).decode()


def archive(pickled: bytes, data: bytes = bytes(64), compression: int = zipfile.ZIP_STORED) -> str:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", data)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize("times", [{"fps": 1e-300}, {"fps": 2000}, {"second_per_grid_ts": 1e-300}], ids=str)
def test_times_that_make_no_finite_positions_are_refused(times: dict[str, float]) -> None:
    config = replace(CONFIG, kind="video", takes_embeddings=True, has_grids=True, hidden_size=4, cache_tokens=100)
    given = {"video_embeds": np.zeros((4, 4), np.float32), "video_grid_thw": [1, 4, 4]}
    assert EmbeddingsReader(config).read({**given, "fps": 0.5}).times == FrameTimes(0.5)
    [name] = times
    with pytest.raises(RequestError, match=f"{name} must be a number from 0.001 to 1000"):
        EmbeddingsReader(config).read(given | times)


@pytest.fixture(scope="module")
def llm(llava: Path) -> Iterator[LLM]:
    llm = engine(llava, enable_mm_embeds=True)
    yield llm
    llm.close()


def say(llm: LLM, part: dict[str, Any]) -> Any:
    return llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)[0].outputs[0].logprobs


def as_part(given: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": given, **more}


def test_what_the_tower_makes_may_be_brought(llm: LLM) -> None:
    prompt = {"prompt": "<image> it is", "multi_modal_data": {"image": A}}
    alone = generate(llm, prompt)[0].outputs[0].logprobs
    runs = tower(llm).num_runs
    [(_, made)] = tower(llm)._entries.values()
    rows = torch.tensor(made.result()[0])
    for given in (rows, rows.numpy(), rows[None], [rows]):
        found = generate(llm, {**prompt, "multi_modal_data": {"image": given}})[0].outputs[0].logprobs
        assert found == alone
    both = {"prompt": "<image><image> it is", "multi_modal_data": {"image": [A, rows]}}
    stacked = {**both, "multi_modal_data": {"image": torch.stack([rows, rows])}}
    assert generate(llm, both)[0].outputs[0].logprobs == generate(llm, stacked)[0].outputs[0].logprobs
    assert tower(llm).num_runs == runs + 1  # which is what brings them


def test_they_come_in_base64_of_files(llm: LLM) -> None:
    alone = say(llm, as_part(saved(ROWS)))
    for given in (
        safetensors(x=ROWS),
        saved(ROWS.T.contiguous().T),
        saved(torch.nn.Parameter(ROWS)),
        saved(ROWS[None]),
    ):
        assert say(llm, as_part(given)) == alone
    assert say(llm, as_part({"image_embeds": saved(ROWS)})) == alone
    half = say(llm, as_part(saved(ROWS.bfloat16())))
    assert half == say(llm, as_part(saved(ROWS.bfloat16().float()))) != alone
    assert say(llm, as_part(saved(ROWS), uuid="rows")) == say(llm, {"type": "image_embeds", "uuid": "rows"}) == alone
    longer = say(llm, as_part(saved(torch.cat([ROWS, ROWS]))))  # as many tokens as there are rows
    assert longer != alone


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no base64": (lambda: "%%%", "not base64 of one tensor"),
    "nothing": (lambda: "", "not base64 of one tensor"),
    "noise": (lambda: base64.b64encode(b"PK" + bytes(range(256))).decode(), "not base64 of one tensor"),
    "a program": (lambda: archive(pickle.dumps(Evil(), 2)), "not base64 of one tensor"),
    "a memo without end": (lambda: archive(b"\x80\x02K\x01r\xff\xff\xff\x7f."), "not base64 of one tensor"),
    "a long pickle": (lambda: archive(pickle.dumps("x" * 5000, 2)), "not base64 of one tensor"),
    "a bomb": (lambda: archive(b"", bytes(10**7), zipfile.ZIP_DEFLATED), "not base64 of one tensor"),
    "a dictionary": (lambda: saved({"x": ROWS}), "not base64 of one tensor"),
    "the older form": (lambda: saved(ROWS, _use_new_zipfile_serialization=False), "not base64 of one tensor"),
    "one number, expanded": (lambda: saved(torch.ones(1, 1).expand(4, 64)), "not base64 of one tensor"),
    "two tensors": (lambda: safetensors(x=ROWS, y=ROWS + 1), "not base64 of one tensor"),
    "none": (lambda: saved(ROWS[:0]), r"have the shape \[0, 64\]; this model takes 1 to 16384 rows of 64"),
    "too many": (lambda: saved(torch.zeros(16385, 64)), r"have the shape \[16385, 64\]"),
    "other sizes": (lambda: saved(ROWS[:, :32].clone()), r"have the shape \[4, 32\]"),
    "one dimension": (lambda: saved(ROWS[0].clone()), r"have the shape \[64\]"),
    "whole numbers": (lambda: saved(torch.ones(4, 64, dtype=torch.int64)), "are of int64"),
    "complex numbers": (lambda: saved(torch.ones(4, 64, dtype=torch.complex64)), "not base64 of one tensor"),
    "no number": (lambda: saved(ROWS * float("nan")), "not finite numbers"),
    "too large a number": (lambda: saved(ROWS.double() * 1e300), "not finite numbers"),
    "a large file": (lambda: "A" * 14_000_000, "more than 10000000 bytes"),
    "another's grid": (lambda: {"image_embeds": saved(ROWS), "image_grid_thw": [1, 2, 2]}, "of models that have grids"),
    "another key": (lambda: {"image_embeds": saved(ROWS), "x": 1}, "an object with image_embeds, image_grid_thw"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_tower_s_is_refused(llm: LLM, name: str) -> None:
    given, reason = WRONG[name]
    with pytest.raises(RequestError, match=reason) as refused:
        say(llm, as_part(given()))
    assert refused.value.status == 400 and refused.value.code == "invalid_image"


def test_they_are_asked_for_by_a_flag(llava: Path) -> None:
    llm = engine(llava)
    for given in (as_part(saved(ROWS)), as_part("x")):
        with pytest.raises(RequestError, match="with --enable-mm-embeds only"):
            say(llm, given)
    with pytest.raises(RequestError, match="with --enable-mm-embeds only"):
        generate(llm, {"prompt": "<image>", "multi_modal_data": {"image": ROWS}})
    llm.close()
    with pytest.raises(ConfigError, match="--enable-mm-embeds is for models that see or hear"):
        LLM(enable_mm_embeds=True)


def test_rows_are_known_by_what_they_stand_for_too() -> None:
    """The same ones as a picture, as a sound and as a video are three."""
    rows = Embeddings(np.zeros((1, 4, 64), np.float32), (1, 4, 4))
    others = [
        rows.content_hash("image", "salt"), replace(rows, grid=(4, 2, 2)).content_hash("image", None),
        replace(rows, times=FrameTimes(2.0)).content_hash("image", None),
    ]  # fmt: skip
    assert len({*(rows.content_hash(kind, None) for kind in ("image", "audio", "video", "prompt")), *others}) == 7


def test_files_of_every_type_are_read() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64):
        found = read_torch_tensor(base64.b64decode(saved(torch.arange(6).reshape(2, 3).to(dtype))))
        assert found.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.dtype == np.int64
    assert ml_dtypes.bfloat16 == read_torch_tensor(base64.b64decode(saved(ROWS.bfloat16()))).dtype
