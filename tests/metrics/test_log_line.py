"""The log line: what it says, when it is silent, and that it sets the throughput gauges."""

from __future__ import annotations

import asyncio

import pytest

from octavo.metrics.log_line import LogLine
from octavo.metrics.prometheus import EngineMetrics
from octavo.stats import EngineStats
from tests.waiting import Clock, virtual_sleep


def test_the_line_has_the_rates_of_its_interval_and_the_state_at_its_end() -> None:
    metrics = EngineMetrics("m", 100)
    metrics.record_step(EngineStats(num_prompt_tokens=1000))  # before the first interval
    line = LogLine(metrics, now=0.0)
    metrics.record_step(EngineStats(num_prompt_tokens=150, num_prefix_queries=200, num_prefix_hits=50))
    metrics.record_step(
        EngineStats(
            num_running=3,
            num_waiting=2,
            num_swapped=1,
            num_blocks=200,
            num_blocks_used=25,
            num_slots_allocated=400,
            num_slots_filled=390,
            num_generation_tokens=20,
        )
    )
    assert line.sample(10.0) == (
        "prompt 15.0 tok/s, generation 2.0 tok/s, running 3, waiting 2, swapped 1, KV usage 12.5%, KV waste 2.5%, "
        "prefix hit rate 25.0%"
    )
    assert (metrics.prompt_tokens_per_s, metrics.generation_tokens_per_s) == (15.0, 2.0)


def test_the_line_tells_of_guesses_where_there_were_some() -> None:
    metrics = EngineMetrics("m", 100)
    line = LogLine(metrics, now=0.0)
    metrics.record_step(EngineStats(num_running=1, num_drafts=2, num_draft_tokens=40, num_accepted_tokens=30))
    said = line.sample(10.0)
    assert said is not None
    assert said.endswith("prefix hit rate 0.0%, drafted 4.0 tok/s, accepted 75.0%")


def test_the_line_is_silent_when_nothing_runs_but_says_once_that_it_came_to_rest() -> None:
    metrics = EngineMetrics("m", 100)
    line = LogLine(metrics, now=0.0)
    assert line.sample(10.0) is None
    metrics.record_step(EngineStats(num_running=1, num_generation_tokens=1))
    assert line.sample(20.0) is not None
    assert line.sample(30.0) is not None, "a request still runs, even if no step ended"
    metrics.record_step(EngineStats())
    assert line.sample(40.0) is not None
    at_rest = line.sample(50.0)
    assert at_rest is not None
    assert at_rest.startswith("prompt 0.0 tok/s, generation 0.0 tok/s, running 0")
    assert line.sample(60.0) is None


@pytest.mark.parametrize("log", [True, False])
def test_the_gauges_are_set_whether_or_not_the_line_is_logged(
    log: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="octavo.stats")
    metrics, clock = EngineMetrics("m", 100), Clock(monkeypatch)

    async def run() -> float:
        task = asyncio.create_task(LogLine(metrics, clock.now()).run(log=log, interval_s=1000))
        metrics.record_step(EngineStats(num_generation_tokens=5000))
        await virtual_sleep(1500)
        task.cancel()
        return metrics.generation_tokens_per_s

    assert clock.run(run()) == pytest.approx(5, rel=0.01)
    assert ("generation" in caplog.text) is log
