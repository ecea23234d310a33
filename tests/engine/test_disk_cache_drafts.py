"""`--kv-cache-disk` with draft models and heads: a block on disk has their part too."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.engine import core
from octavo.engine.core import EngineCore
from octavo.request import EngineRequest, Prompt
from octavo.speculative.proposer import ToBeDrafted
from octavo.speculative.speculation import Speculation
from octavo.step_plan import PlannedRow, StepPlan
from tests.engine.test_disk_cache import DOCUMENT, PROMPTS, answers, blocks, clear_cache, num_found, reads_are_worth_it
from tests.execution.test_draft_heads import DEEPSEEK_MODULE, SHAPE, heads
from tests.execution.test_draft_heads import model as deep_model
from tests.execution.test_draft_model import run_with_right_guesses, sometimes
from tests.execution.test_runner import config_of, model

__all__ = ["deep_model", "heads", "model", "reads_are_worth_it"]

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "pipeline_layer_partition": "1,5"}
Start = Callable[..., LLM]


@pytest.fixture
def start(
    deep_model: Path, heads: dict[str, Path], tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Make engines with a method of drafting, which share the folder `disk`. They draft in every step."""
    made = list[LLM]()
    monkeypatch.setattr(core, "make_speculation", lambda *_: Speculation(ToBeDrafted(96), 3))

    def make(method: str, **settings: Any) -> LLM:
        folder, speculative = deep_model, {"method": method}
        if method != "none":
            speculative["num_speculative_tokens"] = 3
        if method == "mtp":
            folder = tmp_path / "mtp"
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(SHAPE | DEEPSEEK_MODULE))
        elif method != "none":
            speculative["model"] = str(heads.get(method, deep_model))
        made.append(
            LLM(
                str(folder), tokenizer=str(tiny_tokenizer), load_format="dummy", seed=3, dtype="float32",
                max_model_len=96, block_size=8, num_gpu_blocks_override=80, check_invariants=True,
                kv_cache_disk=str(tmp_path / "disk"), speculative_config=speculative, **settings,
            )
        )  # fmt: skip
        clear_cache(made[-1])
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("draft_model", {}),
        ("eagle", {}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("eagle3", {}),
                ("mtp", {}),
                ("medusa", {}),
                ("draft_model", {"tensor_parallel_size": 2}),
                ("eagle", {"tensor_parallel_size": 2}),
                ("draft_model", STAGES),
                ("eagle", STAGES),
                ("eagle3", STAGES),
                ("mtp", {"pipeline_parallel_size": 2}),
                ("medusa", STAGES),
            ]
        ),
    ],
    ids=str,
)
def test_a_block_has_the_part_of_the_draft(method: str, settings: dict[str, Any], start: Start) -> None:
    first = start(method, **settings)
    expected, computed = answers(first, PROMPTS), blocks(first)
    first.close()
    second = start(method, **settings)
    assert num_found(second) == 64
    read = blocks(second)
    assert len(read) == 8 and all(read[name] == computed[name] for name in read)
    assert answers(second, PROMPTS) == expected
    assert second.llm_engine.metrics.totals["num_draft_tokens"] > 0
    second.close()
    if not settings:
        found = num_found(start("none"))
        assert found == (64 if method == "medusa" else 0), "Medusa's heads keep nothing in blocks"


@pytest.mark.parametrize(
    ("settings", "num_answered", "num_known"),
    [({}, 1, 64), pytest.param(STAGES, 1, 64, marks=pytest.mark.long), ({}, 14, 80)],
    ids=["a prompt", "a prompt, with stages", "accepted draft tokens"],
)
def test_a_draft_computes_nothing_that_is_on_disk(
    settings: dict[str, Any], num_answered: int, num_known: int, start: Start
) -> None:
    """The model drafts for itself, so all its draft tokens are accepted."""
    params = SamplingParams(temperature=0, max_tokens=num_answered, ignore_eos=True)
    first = start("draft_model", **settings)
    [[(answer, _)]] = answers(first, [DOCUMENT], params)
    counts = first.llm_engine.metrics.totals
    assert counts["num_accepted_tokens"] == counts["num_draft_tokens"]
    first.close()
    second = start("draft_model", **settings)
    runner: Any = second.core.executor.worker._draft.runner
    submit_rows, submitted = runner.submit_rows, list[PlannedRow]()

    def watched(plan: StepPlan) -> Any:
        submitted.extend(plan.rows)
        return submit_rows(plan)

    runner.submit_rows = watched
    prompt = [*DOCUMENT, *answer]
    answers(second, [prompt], SamplingParams(max_tokens=1))
    assert [(row.num_computed, row.num_tokens) for row in submitted] == [(num_known, len(prompt) - num_known)]


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_draft_reads_from_disk_what_it_computed_at_times(
    preemption_mode: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model drafts for itself: where its keys were lost, draft tokens would be wrong."""
    config = config_of(
        model, speculative_config={"model": str(model), "num_speculative_tokens": 3}, num_gpu_blocks_override=13,
        preemption_mode=preemption_mode, kv_cache_disk=str(tmp_path / "disk"),
    )  # fmt: skip
    for seed in range(2):
        rng = random.Random(seed)
        engine = EngineCore(config, None, sometimes(rng))
        read = Mock(wraps=engine.executor.write_blocks)
        monkeypatch.setattr(engine.executor, "write_blocks", read)
        _, num_drafted = run_with_right_guesses(engine, rng)
        assert engine.disk is not None and num_drafted > 50
        engine.disk.close()
    assert read.called


def test_a_block_of_a_step_that_is_drafted_but_not_computed_is_not_overwritten(start: Start) -> None:
    llm = start("draft_model", **STAGES, max_num_batched_tokens=16)
    llm.core.add(EngineRequest("r", Prompt(DOCUMENT), SamplingParams(max_tokens=1), [0], 1, 0.0))
    llm.core.step()
    llm.core.step()
    executor: Any = llm.core.executor
    [seq] = llm.core.scheduler.queues.running
    own, free = list(seq.block_tables[0]), [60, 61]
    contents = np.full((2, executor.block_bytes[0]), 1, np.uint8)
    before = executor.read_blocks(0, own[:2])
    assert not executor.write_blocks(0, own[:2], contents) and executor.write_blocks(0, free, contents)
    assert not executor._last_steps[-1].is_done, "nobody has waited for it"
    assert (executor.read_blocks(0, own[:2]) == before).all() and (executor.read_blocks(0, free) == contents).all()
    while llm.core.has_work:
        llm.core.step()
    assert executor.write_blocks(0, own[:2], contents)
