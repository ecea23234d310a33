"""A small Whisper in the engine, beside the same model in `transformers`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo import LLM, SamplingParams
from octavo.entrypoints.audio.transcriber import Transcriber, TranscriptionOptions
from octavo.errors import ConfigError, RequestError
from octavo.execution.executor import LocalExecutor
from tests.speech.conftest import features, marks, sound
from tests.untimed import without_time

SIZES: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 400, "max_num_seqs": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)


def engine(folder: Path, **args: Any) -> LLM:
    return LLM(str(folder), **{"check_invariants": True} | SIZES | args)


def asked(start: list[int], samples: NDArray[np.float32]) -> dict[str, Any]:
    return {"prompt_token_ids": start, "multi_modal_data": {"audio": samples}}


def generate(llm: LLM, *prompts: dict[str, Any], params: SamplingParams = GREEDY) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:  # `LLM` refuses alignment_heads, which only the transcriber sets
        patch.setattr(SamplingParams, "checked", copy.copy)
        return llm.generate(list(prompts), params, use_tqdm=False)


@pytest.fixture(scope="module")
def start(whisper: Path) -> list[int]:
    return marks(whisper, "startoftranscript", "de", "transcribe", "notimestamps")


@pytest.fixture(scope="module")
def llm(whisper: Path) -> Iterator[LLM]:
    llm = engine(whisper)
    yield llm
    llm.close()


def test_the_decoder_is_that_of_transformers(whisper: Path, llm: LLM, theirs: Any, start: list[int]) -> None:
    sounds = [sound(seed, 1 + seed) for seed in range(4)]  # more than run at once
    for samples, output in zip(sounds, generate(llm, *(asked(start, one) for one in sounds)), strict=True):
        [answer] = output.outputs
        with torch.no_grad():
            logits = theirs(
                input_features=features(whisper, samples), decoder_input_ids=torch.tensor([start + answer.token_ids])
            ).logits[0, len(start) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()
        logprobs = torch.log_softmax(logits, -1)
        for position, found in enumerate(answer.logprobs):
            for token, logprob in found.items():
                assert logprob.logprob == pytest.approx(logprobs[position, token].item(), abs=1e-4)


def test_in_any_company_it_has_the_bits_that_it_has_alone(llm: LLM, start: list[int]) -> None:
    prompts = [asked(start[: 1 + seed], sound(seed)) for seed in range(4)]
    alone = [generate(llm, prompt)[0].outputs[0].logprobs for prompt in prompts]
    assert [output.outputs[0].logprobs for output in generate(llm, *prompts)] == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("swap", "float32"),
        *(pytest.param("recompute", dtype, marks=pytest.mark.long) for dtype in ("float32", "bfloat16")),
    ],
)
def test_preempted_it_hears_the_same_again(whisper: Path, start: list[int], mode: str, dtype: str) -> None:
    long = SamplingParams(temperature=0, max_tokens=30, logprobs=1, ignore_eos=True)
    prompts = [asked(start, sound(seed)) for seed in range(3)]
    crowded = engine(
        whisper, num_gpu_blocks_override=3 * 94 + 7, preemption_mode=mode, swap_space=0.01, dtype=dtype, block_size=16
    )
    without_time(crowded.core)  # type: ignore[arg-type]
    alone = [generate(crowded, prompt, params=long)[0] for prompt in prompts]
    together = generate(crowded, *prompts, params=long)
    assert sum(output.metrics.num_preemptions for output in together) > 0
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    executor = crowded.core.executor
    assert isinstance(executor, LocalExecutor) and executor.worker.tower_cache is not None
    assert executor.worker.tower_cache.num_runs == 3  # of the encoder
    crowded.close()


def test_a_transcript_of_which_a_part_is_aborted_fails(llm: LLM) -> None:
    """It would lack words, or the language."""
    given = []

    async def cut_off(request: Any, name: str) -> AsyncIterator[Any]:
        given.append(request.deadline)
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="abort", stop_reason="timeout", token_ids=[])])

    assert llm.inputs.listener is not None
    spectrum = llm.inputs.listener.hear(sound(0))
    asked_of: Any = SimpleNamespace(
        tokenizer=llm.get_tokenizer(), inputs=llm.inputs, config=llm.config, generate_from=cut_off
    )
    scribe = Transcriber(asked_of, deadline=7.0)

    async def whole() -> None:
        async for _ in scribe.transcribe(spectrum, TranscriptionOptions("transcribe"), "en", "name"):
            pass

    for work in (lambda: scribe.detect(spectrum, "name"), whole):
        with pytest.raises(RequestError, match="before its timeout") as refused:
            asyncio.run(work())
        assert (refused.value.status, refused.value.code) == (408, "timeout")
    assert given == [7.0, 7.0]


def test_forks_share_what_is_heard(llm: LLM, start: list[int]) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    [output] = generate(llm, asked(start, sound(0)), params=params)
    for seed, answer in enumerate(output.outputs):
        single = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
        [again] = generate(llm, asked(start + answer.token_ids[:7], sound(0)), params=single)
        assert len(answer.token_ids) == 8 and again.outputs[0].logprobs, seed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multi_modal_data": None}, "/v1/audio/transcriptions"),
        ({"multi_modal_data": {"image": 1}}, "dictionary with audio"),
        ({"multi_modal_data": {"audio": "x"}}, "array of samples"),
        ({"multi_modal_data": {"audio": np.zeros((2, 3, 4))}}, "shape"),
        ({"multi_modal_data": {"audio": []}}, "no samples"),
        ({"multi_modal_data": {"audio": [float("nan")]}}, "not finite"),
        ({"multi_modal_data": {"audio": np.zeros(16_000 * 31)}}, "longer than 30 s"),
        ({"multi_modal_data": {"audio": (np.zeros(9), 2**31)}}, "rate must be"),
    ],
)
def test_what_cannot_be_heard_is_refused(llm: LLM, start: list[int], change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(llm, asked(start, sound(0)) | change)


def test_other_rates_and_channels_are_heard(llm: LLM, start: list[int]) -> None:
    one = np.sin(np.arange(8_000) * 0.05).astype(np.float32)
    [mono, stereo] = generate(llm, asked(start, (one, 8_000)), asked(start, (np.stack([one, one], 1), 8_000)))  # type: ignore[arg-type]
    assert mono.outputs[0].logprobs == stereo.outputs[0].logprobs


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_model": "[ngram]", "num_speculative_tokens": 2}, "speculation"),
    ],
)
def test_what_is_not_built_is_refused(whisper: Path, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(whisper, **args)
