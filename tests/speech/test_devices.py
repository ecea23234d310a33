"""Whisper on a device with memory of its own: the CPU's answers and what its tokens attend to, and Triton's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from octavo import SamplingParams
from octavo.execution import executor
from octavo.ops import cuda
from tests.execution.late_device import LateDevice
from tests.ops import torch_ref
from tests.ops.triton.conftest import DEVICE
from tests.speech.conftest import marks, save_whisper, sound
from tests.speech.test_whisper import asked, engine, generate

ALIGNED = SamplingParams(temperature=0, max_tokens=1, logprobs=3, ignore_eos=True, alignment_heads=[(0, 1), (1, 0)])


def answers(folder: Path, **args: Any) -> tuple[list[Any], list[Any]]:
    """Of sounds together, and of each alone; of these also what their tokens attend to."""
    start = marks(folder, "startoftranscript", "de", "transcribe", "notimestamps")
    prompts = [asked(start[: 2 + seed], sound(seed)) for seed in range(4)]
    llm = engine(folder, **args)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
    together = generate(llm, *prompts, params=params)
    alone = [generate(llm, prompt, params=params)[0] for prompt in prompts]
    aligned = [generate(llm, prompt, params=ALIGNED)[0].alignment for prompt in prompts]
    llm.close()
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    return together, [np.frombuffer(one, np.float32) for one in aligned]


def check(found: tuple[list[Any], list[Any]], expected: tuple[list[Any], list[Any]]) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        for mine, theirs in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert {t: pytest.approx(x.logprob, abs=1e-4) for t, x in mine.items()} == {
                t: x.logprob for t, x in theirs.items()
            }
    for mine, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"num_gpu_blocks_override": 3 * 94 + 7}, {"enforce_eager": True}])
def test_answers_are_the_cpus_on_a_device_that_is_late(
    monkeypatch: pytest.MonkeyPatch, whisper: Path, more: dict[str, Any]
) -> None:
    expected, device = answers(whisper, **more), LateDevice(1)
    monkeypatch.setattr(executor, "_open_device", lambda config, worker_group: (device, torch_ref))
    check(answers(whisper, **more), expected)
    assert (device.num_replays > 0) == (not more.get("enforce_eager"))


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"num_gpu_blocks_override": 3 * 94 + 7, "max_num_batched_tokens": 5}, marks=pytest.mark.long),
        pytest.param({"enforce_eager": True, "dtype": "bfloat16"}, marks=pytest.mark.long),
    ],
)
def test_two_workers_have_the_bits_of_one(whisper: Path, more: dict[str, Any]) -> None:
    """The first one hears; each has its heads of what is heard, and tells what their tokens attend to."""
    expected = answers(whisper, **more)
    found = answers(whisper, **more, tensor_parallel_size=2, reproducible_parallel=True)
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert np.array_equal(mine, theirs)


def test_a_step_without_memory_loses_nothing_of_what_tokens_attend_to(
    monkeypatch: pytest.MonkeyPatch, whisper: Path
) -> None:
    """But for the newest request, which it ends."""
    device = LateDevice(0)
    monkeypatch.setattr(executor, "_open_device", lambda config, worker_group: (device, torch_ref))
    llm = engine(whisper)
    start = marks(whisper, "startoftranscript", "de", "transcribe", "notimestamps")
    prompts = [asked(start, sound(seed)) for seed in range(2)]
    expected, _ = generate(llm, *prompts, params=ALIGNED)  # whose sounds are heard from now on
    for prompt in prompts:
        llm.core.add(llm.inputs.process(prompt, ALIGNED))
    found, errors = list[bytes | None](), list[int]()
    device.memory_failures = 1.0
    while llm.core.has_work:
        for output in llm.core.step().outputs:
            device.memory_failures = 0.0
            if output.error is None:
                found.append(output.alignment)
            else:
                errors.append(output.error_status)
    llm.close()
    [alignment] = found
    assert errors == [503] and alignment is not None
    np.testing.assert_allclose(*(np.frombuffer(one, np.float32) for one in (alignment, expected.alignment)), atol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(900)  # in the interpreter, beside others
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device that is late has the host's memory")
def test_answers_of_tritons_kernels_are_the_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    whisper = tmp_path  # which hears one second: the interpreter writes keys one by one
    save_whisper(whisper, tiny_tokenizer, max_source_positions=50)
    WhisperFeatureExtractor(feature_size=80, chunk_length=1).save_pretrained(whisper)
    prompts = [asked(marks(whisper, "startoftranscript", name), sound(i, 1.0)) for i, name in enumerate(("de", "en"))]
    plain = SamplingParams(temperature=0, max_tokens=2, logprobs=3, ignore_eos=True)

    def told() -> tuple[list[Any], list[Any]]:
        llm = engine(whisper, max_num_batched_tokens=4, max_num_seqs=2, reproducible_parallel=False)  # GPUs cut no sums
        [alone] = generate(llm, prompts[0], params=ALIGNED)
        together = generate(llm, *prompts, params=plain)
        llm.close()
        assert alone.outputs[0].logprobs == together[0].outputs[0].logprobs[:1]
        return together, [np.frombuffer(alone.alignment, np.float32)]

    expected = told()
    monkeypatch.setattr(executor, "_open_device", lambda config, worker_group: (LateDevice(0), cuda))
    check(told(), expected)
