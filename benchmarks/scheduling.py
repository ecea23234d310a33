"""Policies of scheduling, compared in simulation: the real scheduler and cache, and a formula in the place of a model.

Time is what the formula says, so that runs are exact, quick and the same everywhere. The defaults come from here;
`benchmarks/smooth_streams.py` measures the same loads over HTTP.

    python benchmarks/scheduling.py                     # the loads of the table in docs/performance.md
    python benchmarks/scheduling.py --rate 3 --long 0.1 # with prompts of 8,000 tokens among them
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from octavo.bench.serve import arrival_times
from octavo.config import SchedulerConfig
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.scheduling.scheduler import Scheduler
from octavo.step_cost import StepCostModel
from octavo.step_plan import StepResult

# Seconds for each of `StepWork.features`: SmolLM2-135M on two cores, from the figures of docs/performance.md.
DEFAULT_MODEL = (3.3e-3, 0.25e-3, 0.45e-3, 0.48e-3, 0.12e-3, 0.5e-3, 0.8e-6, 0.05e-6)
LONG_PROMPT = 8000


@dataclass(frozen=True)
class Policy:
    name: str
    scheduling: str = "fcfs"
    num_tokens: int = 2048
    target_ms: float | None = None


POLICIES = [
    Policy("2048 tokens", num_tokens=2048, target_ms=0),
    Policy("256 tokens", num_tokens=256, target_ms=0),
    Policy("128 tokens", num_tokens=128, target_ms=0),
    Policy("100 ms", target_ms=100),
    Policy("150 ms", target_ms=150),
    Policy("190 ms", target_ms=190),
    Policy("auto"),
    Policy("auto, deadline", scheduling="deadline"),
]


@dataclass
class Served:
    arrival: float
    num_prompt: int
    times: list[float]


def simulate(
    policy: Policy, lengths: list[int], arrivals: list[float], num_output: int, noise: float
) -> tuple[list[Served], float]:
    """Serve prompts that arrive at `arrivals` -> when each token came, and the whole duration."""
    truth, fitted = StepCostModel(DEFAULT_MODEL), StepCostModel.derived(96 << 20, 23040, 10e9, 300e9)
    rng = np.random.default_rng(0)
    groups = group_layers([LayerCacheSpec("full", num_kv_heads=1, key_size=1, value_size=1)])
    cache = KVCacheManager(groups, [40_000], 16, [0], True)
    target_s = None if policy.target_ms is None else policy.target_ms / 1e3
    config = SchedulerConfig(256, policy.num_tokens, True, policy.scheduling, "recompute", target_step_s=target_s)
    scheduler = Scheduler(config, cache, cost=fitted)
    params = SamplingParams(max_tokens=num_output, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    served = {str(i): Served(at, length, []) for i, (at, length) in enumerate(zip(arrivals, lengths, strict=True))}
    left = sorted(served.items(), key=lambda item: item[1].arrival)
    now = 0.0
    while left or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, left[0][1].arrival)
        while left and left[0][1].arrival <= now:
            name, one = left.pop(0)
            prompt = Prompt(rng.integers(1, 40_000, one.num_prompt).tolist())
            scheduler.add(EngineRequest(name, prompt, params, [0], num_output, one.arrival))
        plan = scheduler.schedule()
        seconds = truth.seconds(plan.work) * rng.lognormal(0, noise)
        fitted.observe(plan.work, seconds)
        now += seconds + 0.4e-3  # what the core does between two steps
        outputs = scheduler.apply_result(plan, StepResult([7] * sum(row.num_samples for row in plan.rows)))
        for output in outputs:
            served[output.request_id].times.append(now)
    return list(served.values()), now


def figures(served: list[Served], duration_s: float) -> str:
    ttft = np.array([one.times[0] - one.arrival for one in served])
    tpot = np.array([(one.times[-1] - one.times[0]) / (len(one.times) - 1) for one in served])
    gaps = np.concatenate([np.diff(one.times) for one in served])
    num_output = sum(len(one.times) for one in served)
    slowdown = ttft / np.array([one.num_prompt * DEFAULT_MODEL[3] for one in served])
    ms = [ttft.mean(), np.percentile(ttft, 99), tpot.mean(), np.percentile(gaps, 99), gaps.max()]
    shown = [f"{num_output / duration_s:6.0f}", *(f"{1e3 * value:7.0f}" for value in ms), f"{slowdown.mean():6.1f}"]
    return " |".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, nargs="+", default=[2, 4], help="Requests a second.")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--mixed", action="store_true", help="Prompts of 64 to --input * 4 tokens, most of them short.")
    parser.add_argument("--long", type=float, default=0.0, help=f"Share of prompts of {LONG_PROMPT} tokens.")
    parser.add_argument("--noise", type=float, default=0.1, help="Standard deviation of a step's logarithm.")
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    lengths = np.full(args.requests, args.input)
    if args.mixed:
        lengths = np.clip(rng.lognormal(np.log(args.input) - 0.5, 1.0, args.requests), 64, 4 * args.input).astype(int)
    lengths[rng.random(args.requests) < args.long] = LONG_PROMPT
    for rate in args.rate:
        arrivals = arrival_times(args.requests, rate, 1.0, 0)
        print(f"\n{rate:g} requests/s\n\n| policy | tok/s | TTFT mean | p99 | TPOT | ITL p99 | max | slowdown |")
        print("|---|---|---|---|---|---|---|---|")
        for policy in POLICIES:
            served, duration_s = simulate(policy, lengths.tolist(), arrivals, args.output, args.noise)
            print(f"| {policy.name:15} |{figures(served, duration_s)} |")


if __name__ == "__main__":
    main()
