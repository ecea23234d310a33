"""Media on a device with memory of its own: the CPU's answers, one step ahead and in captured steps; and on Triton's
kernels, with the same bits in any company."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from octavo import LLM, SamplingParams
from octavo.config import EngineArgs
from octavo.execution import executor
from octavo.execution.device import Device
from octavo.models.multimodal_models import MEDIA_FAMILIES
from octavo.multimodal.model_processor import MediaProcessor
from octavo.multimodal.tower import Tower
from octavo.ops import cuda
from octavo.request import MediaInput
from tests.execution.late_device import LateDevice
from tests.multimodal.conftest import picture
from tests.multimodal.small_media import CASES, kind_of, save_case
from tests.multimodal.small_processors import MORE_TOKENS, TOKENS
from tests.multimodal.test_llava import generate, tower
from tests.ops import torch_ref
from tests.ops.triton.conftest import DEVICE
from tests.speech.conftest import sound
from tests.untimed import without_time


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> Any:
    found = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer, extra_special_tokens=TOKENS)
    found.add_special_tokens({"additional_special_tokens": MORE_TOKENS})
    return found


@contextmanager
def engine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, device: Device | None, ops: Any, **more: Any
) -> Iterator[LLM]:
    """On the CPU where there is no `device`."""
    sizes: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 8,
        "num_gpu_blocks_override": 70, "check_invariants": True, "max_image_pixels": 20_000, "max_audio_seconds": 2.0,
    }  # fmt: skip
    with monkeypatch.context() as patch:
        if device is not None:
            patch.setattr(executor, "_open_device", lambda config, worker_group: (device, ops))
        llm = LLM(str(folder), **(sizes | more))
    yield llm
    llm.close()


def prompts_of(name: str) -> list[dict[str, Any]]:
    kind = kind_of(name)
    first, second = (sound(0, 0.5), sound(1, 1.1)) if kind == "audio" else (picture(0), picture(1, 90, 33))
    mark = CASES[name].mark if kind == "image" else CASES[name].token
    asked = [(f"What is it? {mark} Say it.", [first]), (f"{mark}\nbeside {mark}.", [first, second]), ("Nothing.", [])]
    return [{"prompt": text} | ({"multi_modal_data": {kind: media}} if media else {}) for text, media in asked]


def told(outputs: list[Any]) -> list[Any]:
    """The prompts' tokens, and of each answer its tokens and their log-probabilities."""
    return [
        (one.prompt_token_ids, answer.token_ids, [x.logprob for of in answer.logprobs for x in of.values()])
        for one in outputs for answer in one.outputs
    ]  # fmt: skip


GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)


@pytest.mark.long
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3VLForConditionalGeneration",  # positions of three axes, rows for early layers
        # Pictures that see all of themselves.
        "Gemma3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        # An adapter of its own.
        "GraniteSpeechForConditionalGeneration",
    ],
)
def test_answers_are_the_cpus_on_a_device_that_is_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any, name: str, eager: bool
) -> None:
    save_case(tmp_path, name, tokenizer)
    prompts, more = prompts_of(name), {"enforce_eager": eager}
    forked = SamplingParams(temperature=1, seed=3, n=2, max_tokens=70, logprobs=0, ignore_eos=True)

    def answers(llm: LLM) -> list[Any]:
        without_time(llm.core)  # type: ignore[arg-type]
        found = told(generate(llm, *prompts, params=GREEDY))
        last = generate(llm, *prompts, params=forked)
        preempted.append(sum(output.metrics.num_preemptions for output in last))
        return found + told(last)

    preempted: list[int] = []
    with engine(monkeypatch, tmp_path, None, None, **more) as llm:
        expected = [(*ids, pytest.approx(logprobs, abs=1e-3)) for *ids, logprobs in answers(llm)]
    device = LateDevice(1)
    with engine(monkeypatch, tmp_path, device, torch_ref, **more) as llm:
        captured = llm.core.executor.worker.runner.submitter.captured_steps  # type: ignore[attr-defined]
        assert any(one.layout.shape.media for one in captured) == (not eager)
        assert answers(llm) == expected
    assert (device.num_replays > 0) == (not eager)
    crowded = {"num_gpu_blocks_override": 27, "enable_prefix_caching": False}
    with engine(monkeypatch, tmp_path, LateDevice(2), torch_ref, **more, **crowded) as llm:
        assert answers(llm) == expected
    assert preempted[-1] > 0


@pytest.mark.parametrize(
    ("name", "least"), [("Qwen3VLForConditionalGeneration", 50), ("Qwen2AudioForConditionalGeneration", 40)]
)
@pytest.mark.long
def test_memory_of_the_largest_medium_that_fits_is_left_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any, name: str, least: int
) -> None:
    save_case(tmp_path, name, tokenizer)
    processor = json.loads((tmp_path / "processor_config.json").read_text())
    if "image_processor" in processor:  # larger pictures than prompts
        processor["image_processor"]["size"]["longest_edge"] = 500 * 500
        (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    made: list[MediaInput] = []
    rows = Tower.rows
    monkeypatch.setattr(Tower, "rows", lambda self, given: made.append(given) or rows(self, given))  # type: ignore[func-returns-value]
    device, offered = LateDevice(0), []
    cache_bytes = device.cache_bytes
    device.cache_bytes = lambda *args: offered.append(args[2]) or cache_bytes(*args)  # type: ignore[method-assign,assignment,func-returns-value]
    with engine(monkeypatch, tmp_path, device, torch_ref, max_image_pixels=200_000) as llm:
        assert least <= max(one.num_tokens for one in made) <= 128
        of_graphs = llm.core.executor.worker.runner.capture_memory_bytes  # type: ignore[attr-defined]
        assert offered == [of_graphs + (1 << 20)]  # what the device says that a tower takes


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_towers_compute_in_the_type_of_the_decoder_too(tmp_path: Path, tokenizer: Any, name: str) -> None:
    pytest.importorskip(CASES[name].needs)
    save_case(tmp_path, name, tokenizer)
    limits: dict[str, Any] = {
        "max_image_pixels": 4000,
        "max_audio_seconds": 1.0,
        "max_model_len": CASES[name].num_tokens,
    }
    media = EngineArgs(model=str(tmp_path), device="cpu", **limits).create_engine_config().media
    assert media is not None
    largest = MediaProcessor(media).largest(CASES[name].num_tokens)[0]
    exact, rounded = (
        Tower(media.folder, media.kind, 1.0, "cpu", dtype).rows(largest) for dtype in ("float32", "bfloat16")
    )
    assert rounded.dtype == exact.dtype == np.float32
    assert np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.long
@pytest.mark.timeout(900)  # in the interpreter, beside others
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device that is late has the host's memory")
@pytest.mark.parametrize(
    "name",
    [
        "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
        "Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
    ],
)  # fmt: skip
def test_answers_of_tritons_kernels_are_the_cpus_and_the_same_in_company(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any, name: str
) -> None:
    save_case(tmp_path, name, tokenizer)
    prompts = prompts_of(name)
    more: dict[str, Any] = {"max_model_len": 64, "enable_prefix_caching": False, "reproducible_parallel": False}
    if MEDIA_FAMILIES[name].sees_ahead == "prompt":
        more["max_num_batched_tokens"], prompts = 64, prompts[:2]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=3, ignore_eos=True)
    with engine(monkeypatch, tmp_path, None, None, **more) as llm:
        expected = generate(llm, *prompts, params=params)
    with engine(monkeypatch, tmp_path, LateDevice(0), cuda, **more) as llm:
        alone = [generate(llm, prompt, params=params)[0] for prompt in prompts]
        runs = tower(llm).num_runs
        together = generate(llm, *prompts, params=params)
        assert tower(llm).num_runs == runs
    for one, other, of_cpu in zip(alone, together, expected, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        for mine, theirs in zip(one.outputs[0].logprobs, of_cpu.outputs[0].logprobs, strict=True):
            assert {t: pytest.approx(x.logprob, abs=1e-4) for t, x in mine.items()} == {
                t: x.logprob for t, x in theirs.items()
            }
