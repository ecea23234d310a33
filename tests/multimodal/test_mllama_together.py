"""Llama 3.2 Vision with several workers, with guesses, with rows that requests bring, and with adapters on Triton's
kernels: answers are those of one worker that computes token after token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, RequestError
from octavo.execution import executor
from octavo.execution.executor import MultiprocExecutor
from octavo.lora.request import LoRARequest
from octavo.multimodal.tower import Tower
from octavo.ops import cuda
from tests.execution.late_device import LateDevice
from tests.execution.late_worker_group import late_followers
from tests.multimodal.test_llava import generate, tower
from tests.multimodal.test_mllama import MARK, ROWS, TALL, WIDE, asked, engine, folder, write_adapter
from tests.ops.triton.conftest import DEVICE
from tests.untimed import without_time

__all__ = ["folder"]
PARAMS = SamplingParams(temperature=0, max_tokens=50, logprobs=3, ignore_eos=True)
NAMES = ["two, each before its text", "together and alone", "none", "one tile"]


def answers(llm: LLM, *prompts: dict[str, Any], params: SamplingParams = PARAMS, **more: Any) -> list[Any]:
    """Of prompts together: log-probabilities by token."""
    given = list(prompts or map(asked, NAMES))
    found = llm.generate(given, params, use_tqdm=False, **more)
    return [[{token: one.logprob for token, one in of.items()} for of in one.outputs[0].logprobs] for one in found]


def near(found: list[Any]) -> list[Any]:
    return [[{token: pytest.approx(value, abs=1e-4) for token, value in of.items()} for of in one] for one in found]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    llm = engine(folder)
    found = answers(llm)
    llm.close()
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "pipeline_layer_partition": "1,3"},  # the first has no layer that sees a picture
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2, "speculative_config": {"method": "ngram"}}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.long
def test_several_workers_see(folder: Path, expected: list[Any], sizes: dict[str, Any]) -> None:
    """The first has the tower, and sends its rows; preempted sequences get theirs again."""
    llm = engine(folder, **sizes)
    assert answers(llm) == expected
    alone = [answers(llm, asked(name))[0] for name in NAMES]
    assert alone == answers(llm)
    llm.close()
    crowded = engine(folder, num_gpu_blocks_override=17, limit_mm_per_prompt={"image": 5}, **sizes)
    without_time(crowded.core)  # type: ignore[arg-type]
    generate(crowded, *map(asked, NAMES))  # so that no tower has to be waited for
    outputs = crowded.generate([*map(asked, NAMES)] * 2, PARAMS, use_tqdm=False)
    crowded.close()
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    found = [[{token: one.logprob for token, one in of.items()} for of in o.outputs[0].logprobs] for o in outputs]
    assert found == alone * 2


@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long)], ids=str
)
@pytest.mark.long
def test_several_devices_see(
    monkeypatch: pytest.MonkeyPatch, folder: Path, expected: list[Any], sizes: dict[str, Any]
) -> None:
    """One step ahead of the tokens where layers are shared, a step a stage where they are shared out."""
    late_followers(monkeypatch)
    init = Tower.__init__
    monkeypatch.setattr(Tower, "__init__", lambda self, *args, **more: init(self, *args[:3], "cpu", *args[4:], **more))
    llm = engine(folder, device="cuda", **sizes)
    found = answers(llm)
    llm.close()
    assert [[*map(set, one)] for one in found] == [[*map(set, one)] for one in expected]
    assert found == [[{t: pytest.approx(x, abs=2e-3) for t, x in of.items()} for of in one] for one in expected]


@pytest.mark.long
def test_rows_of_a_request_that_has_ended_are_there_for_the_last_stage(folder: Path) -> None:
    """Which computes a step when its result is wanted: by then others' rows may have taken the place of its own."""
    llm = engine(folder, pipeline_parallel_size=2, media_cache_tokens=1)
    worker_group, submit = llm.core.executor, MultiprocExecutor.submit
    assert isinstance(worker_group, MultiprocExecutor)
    generate(llm, asked("one tile"))
    [first] = tower(llm)._entries

    def late(plan: Any) -> Any:
        pending = submit(worker_group, plan)
        if any(item.content_hash == first for admission in plan.admissions for item in admission.media):
            tower(llm)._entries.pop(first)
        return pending

    worker_group.submit = late  # type: ignore[method-assign]
    again = answers(llm, asked("one tile"))
    assert first not in tower(llm)._entries
    worker_group.submit = lambda plan: submit(worker_group, plan)  # type: ignore[method-assign]
    assert answers(llm, asked("one tile")) == again
    llm.close()


@pytest.mark.parametrize("method", ["ngram", "suffix", "a draft model", "prediction"])
@pytest.mark.long
def test_guesses_change_no_answer(
    monkeypatch: pytest.MonkeyPatch, folder: Path, draft_model: Path, expected: list[Any], method: str
) -> None:
    settings: dict[str, Any] = {
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1},
        "suffix": {"method": "suffix", "num_speculative_tokens": 3},
        "a draft model": {"model": str(draft_model), "num_speculative_tokens": 3},
    }  # fmt: skip
    llm = engine(folder, **({"speculative_config": settings[method]} if method in settings else {}))
    guessing = llm.core.scheduler._speculation
    assert guessing is not None
    guessing.cost = None  # however few of them are right
    counts, count = [0, 0], guessing.count

    def counted(seq: Any, draft_tokens: Any, num_right: int, stats: Any) -> None:
        counts[0] += len(draft_tokens)
        counts[1] += num_right
        count(seq, draft_tokens, num_right, stats)

    monkeypatch.setattr(guessing, "count", counted)
    if method == "prediction":
        add = llm.core.add
        said = [next(iter(of)) for of in expected[0]]

        def add_with_prediction(request: Any) -> Any:
            request.prediction = said
            return add(request)

        monkeypatch.setattr(llm.core, "add", add_with_prediction)
    assert answers(llm) == expected
    assert answers(llm) == expected  # which suffixes of the first time are guesses of
    assert counts[0] > 10 and (counts[1] > 5 or method == "a draft model")
    llm.close()


def test_a_head_does_not_guess(folder: Path, draft_model: Path) -> None:
    with pytest.raises(ConfigError, match="pictures are not built yet with a draft head"):
        engine(folder, speculative_config={"method": "eagle", "model": str(draft_model)})


def test_what_the_tower_makes_may_be_brought(folder: Path) -> None:
    llm = engine(folder, enable_mm_embeds=True)
    prompt = asked("two, each before its text")
    found = answers(llm, prompt)
    rows = [torch.tensor(future.result()[0]) for _, future in tower(llm)._entries.values()]
    assert [len(one) % ROWS for one in rows] == [0, 0]
    runs = tower(llm).num_runs
    for image in (rows, [WIDE, rows[1]], [rows[0].numpy(), TALL]):
        assert answers(llm, {**prompt, "multi_modal_data": {"image": image}}) == found
    assert answers(llm, {**prompt, "multi_modal_data": {"image": rows[::-1]}}) != found
    assert tower(llm).num_runs == runs + 2  # which are what bring them
    for wrong in (rows[0][:-1], torch.zeros(5 * ROWS, 64)):
        with pytest.raises(RequestError, match="must be those of 1 to 4 tiles of 5 rows"):
            answers(llm, {"prompt": MARK, "multi_modal_data": {"image": wrong}})
    llm.close()


@pytest.mark.long
@pytest.mark.timeout(900)  # in the interpreter, beside others
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device that is late has the host's memory")
def test_adapters_on_tritons_kernels_are_the_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    path, _ = write_adapter(folder, tmp_path / "adapter")
    request, prompt = LoRARequest("a", 1, str(path)), asked("text before and after")
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=3, ignore_eos=True)

    def told(**more: Any) -> list[Any]:
        llm = engine(
            folder, enable_lora=True, max_model_len=64, max_num_batched_tokens=32, reproducible_parallel=False, **more
        )
        found = answers(llm, prompt, prompt, params=params, lora_request=[request, None])
        llm.close()
        return found

    expected = told()
    assert expected[0] != expected[1]
    monkeypatch.setattr(executor, "_open_device", lambda config, worker_group: (LateDevice(0), cuda))
    assert told() == near(expected)
