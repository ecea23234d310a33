"""Drives an `LLM` step by step, so that requests can arrive while others run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine.output_processor import OutputProcessor
from octavo.stats import EngineStats
from tests.untimed import without_time


@dataclass
class Run:
    """Outputs in the order of the requests, and what the engine said of each step."""

    outputs: list[RequestOutput] = field(default_factory=list)
    stats: list[EngineStats] = field(default_factory=list)

    @property
    def num_preemptions(self) -> int:
        return sum(stats.num_preemptions for stats in self.stats)

    @property
    def token_ids(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]


def run_arriving(llm: LLM, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams], seed: int) -> Run:
    """Run requests that arrive in random order at random steps."""
    without_time(llm.core)
    rng = random.Random(seed)
    order = rng.sample(range(len(prompts)), len(prompts))
    outputs = OutputProcessor(llm.tokenizer)
    run, finished = Run(), {}
    while order or llm.core.has_work:
        while order and (rng.random() < 0.3 or not llm.core.has_work):
            i = order.pop()
            prompt = prompts[i]
            asked = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
            request = llm.inputs.process(asked, params[i])
            outputs.add(request, f"request-{i}")
            llm.core.add(request)
        step = llm.core.step()
        run.stats.append(step.stats)
        results, aborts = outputs.process(step.outputs)
        for abort in aborts:
            llm.core.abort(abort.request_id, abort.index)
        for result in results:
            assert isinstance(result, RequestOutput), f"{result.request_id} failed"
            finished[result.request_id] = result
    run.outputs = [finished[f"request-{i}"] for i in range(len(prompts))]
    return run
