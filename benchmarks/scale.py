"""Prints what a large deployment would do: replicas of stages of GPUs, by the real scheduler and router and a model of
the device.

    python benchmarks/scale.py [--model 70b] [--gpu h100] [--tp 8] [--pp 2] [--dp 8] [--rate 40] [--requests 1500]

No GPU is needed, and none was: a step's time is `octavo plan`'s, of bytes, operations, launches and sums over links,
shared out among the stages, with a hop to the next one behind it. Each replica is an engine core whose executor
computes nothing and keeps a clock for every stage. Requests arrive at random times, with prompts and answers of random
lengths.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from dataclasses import dataclass
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.data_parallel_routing import Router, block_hashes
from octavo.kv_cache.groups import group_layers
from octavo.models.description import ModelDescription
from octavo.models.registry import describe
from octavo.ops.triton.schedule import MACHINES
from octavo.planning.step_limits import GPUS, GpuSteps, StepLimits, model_work
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.step_cost import StepWork
from octavo.step_plan import StepPlan, StepResult

BLOCK_SIZE = 16
# Of a hop to the next stage, another host's: 400 Gbit/s a GPU, and what a message takes to be on its way.
HOP_BYTES_PER_S, HOP_S = 50e9, 10e-6
_LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128,
          "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


@dataclass(frozen=True)
class Deployment:
    """A model in bfloat16 on `tp` x `pp` GPUs a replica."""

    description: ModelDescription
    steps: GpuSteps
    pp: int
    num_blocks: int  # of the cache of a replica

    def stage_s(self, work: StepWork) -> float:
        """Of each stage, which has an equal part of the layers; the last one's output matrix counts as everybody's."""
        hop_s = HOP_S + work.num_tokens * self.description.hidden_size * 2 / HOP_BYTES_PER_S if self.pp > 1 else 0.0
        return self.steps.seconds(work) / self.pp + hop_s


def deploy(model: str, gpu: str, tp: int, pp: int) -> Deployment:
    description = describe(_LLAMA | MODELS[model])
    work = model_work(description)
    token_bytes = sum(2 * 2 * spec.num_kv_heads * spec.key_size for spec in description.layer_caches)
    limits = StepLimits(work, description.layer_caches, 2 * work.num_parameters, (token_bytes, token_bytes))
    room = 0.9 * GPUS[gpu].memory_bytes * tp * pp - 2 * work.num_parameters
    if room <= 0:
        raise SystemExit(f"{model} in bfloat16 takes {2 * work.num_parameters / 2**30:.0f} GiB: more GPUs are needed")
    num_blocks = int(room / (token_bytes * BLOCK_SIZE))
    return Deployment(description, GpuSteps(MACHINES[gpu], limits, tp), pp, num_blocks)


class Stages:
    """An executor that computes nothing, and knows when each stage would be done."""

    runs_ahead = False
    weight_bytes = cache_bytes = 1 << 20

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.num_stages = deployment, deployment.pp
        self.cache_groups = group_layers(deployment.description.layer_caches[:1])
        self.num_blocks, self.num_host_blocks = [deployment.num_blocks], [0]
        self.now = self.busy_s = 0.0  # seconds: the core's clock, and what one stage has computed for
        self._free_at = [0.0] * deployment.pp
        self.num_steps = 0

    def submit(self, plan: StepPlan) -> Any:
        stage_s, done = self.deployment.stage_s(plan.work), self.now
        for stage, free_at in enumerate(self._free_at):
            self._free_at[stage] = done = max(done, free_at) + stage_s
        self.busy_s += stage_s
        self.num_steps += 1
        tokens = [7] * sum(row.num_samples for row in plan.rows)

        def result() -> StepResult:
            self.now = max(self.now, done)
            return StepResult(tokens)

        return SimpleNamespace(result=result)


def make_core(deployment: Deployment, max_num_seqs: int, num_tokens: int) -> EngineCore:
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens, enable_chunked_prefill=True, policy="fcfs",
        preemption_mode="recompute", check_invariants=False, target_step_s=0.0,
    )  # fmt: skip
    config = SimpleNamespace(
        scheduler=scheduler,
        cache=SimpleNamespace(block_size=BLOCK_SIZE, enable_prefix_caching=True, disk=None, host_bytes=0, events=None),
        model=SimpleNamespace(seed=0), device="cuda", speculative=None, draft=None, lora=None, media=None, sound=None,
        prompt_embeds=None,
    )  # fmt: skip
    return EngineCore(cast(Any, config), cast(Any, Stages(deployment)))


@dataclass
class Served:
    arrived: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True)
class Figures:
    served: list[Served]
    tokens_per_s: float  # while requests came, without the first third of that time
    busy: float  # share of the time that a stage computes
    core_s: float  # of this machine's processor, for each step of a replica


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def simulate(
    deployment: Deployment, dp: int, rate: float, num_requests: int, max_num_seqs: int = 256, num_tokens: int = 2048,
    seed: int = 0,
) -> Figures:  # fmt: skip
    """Prompts have 1,000 tokens on average and answers 250; `rate` requests come in a second, to all replicas."""
    rng = random.Random(seed)
    cores = [make_core(deployment, max_num_seqs, num_tokens) for _ in range(dp)]
    router = Router(dp, BLOCK_SIZE, deployment.num_blocks)
    served: dict[str, Served] = {}
    made: list[tuple[float, int]] = []  # when, how many tokens
    arrival, spent_s = 0.0, 0.0
    events: list[tuple[float, int, int]] = []  # time, order, and a replica, or -1: a request
    for i in range(num_requests):
        arrival += rng.expovariate(rate)
        events.append((arrival, i, -1))
    heapq.heapify(events)
    order, is_stepping = num_requests, [False] * dp
    while events:
        now, number, replica = heapq.heappop(events)
        if replica < 0:
            lengths = [max(1, min(int(rng.lognormvariate(0, 0.8) * median), 8 * median)) for median in (720, 180)]
            prompt = Prompt([rng.randrange(100_000) for _ in range(lengths[0])])
            params = SamplingParams(max_tokens=lengths[1], ignore_eos=True)
            request = EngineRequest(str(number), prompt, params, [], lengths[1], now)
            served[request.request_id] = Served(now)
            replica = router.route(request, block_hashes(request, BLOCK_SIZE), range(dp))
            cores[replica].add(request)
            if is_stepping[replica]:
                continue
            is_stepping[replica] = True
            stages = cast(Stages, cores[replica].executor)
            stages.now = max(stages.now, now)
        core = cores[replica]
        stages = cast(Stages, core.executor)
        begin = time.perf_counter()
        outputs = core.step().outputs
        spent_s += time.perf_counter() - begin
        for output in outputs:
            one = served[output.request_id]
            one.first = one.first or stages.now
            one.last, one.num_tokens = stages.now, one.num_tokens + len(output.token_ids)
            made.append((stages.now, len(output.token_ids)))
            if output.finish_reason is not None:
                router.end(output.request_id, [])
        is_stepping[replica] = core.has_work
        if core.has_work:
            heapq.heappush(events, (stages.now, order := order + 1, replica))
    executors = [cast(Stages, core.executor) for core in cores]
    seconds = max(executor.now for executor in executors)
    num_drafted = sum(count for when, count in made if arrival / 3 < when <= arrival)
    return Figures(
        list(served.values()), num_drafted / (arrival * 2 / 3),
        mean(executor.busy_s for executor in executors) / seconds,
        spent_s / sum(executor.num_steps for executor in executors),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="70b")
    parser.add_argument("--gpu", choices=GPUS.keys() & MACHINES.keys(), default="h100")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--rate", type=float, nargs="+", default=[40.0])
    parser.add_argument("--requests", type=int, default=1500)
    args = parser.parse_args()
    deployment = deploy(args.model, args.gpu, args.tp, args.pp)
    num_slots = deployment.num_blocks * BLOCK_SIZE
    print(f"{args.model} on {args.tp} x {args.pp} x {args.dp} {args.gpu}: a cache of {num_slots} tokens a replica")
    for batch in (1, 16, 64, 256):
        work = StepWork()
        for _ in range(max(1, batch // args.pp)):
            work.add(1250, 1, 1)
        stage_s, limit = deployment.stage_s(work), deployment.steps.limit(work)
        print(f"decode, {batch} at once behind 1,250 tokens: {1e3 * stage_s * args.pp:.1f} ms a token, "
              f"{max(1, batch // args.pp) / stage_s if batch >= args.pp else 1 / stage_s / args.pp:.0f} tokens/s, "
              f"limit {limit.name}")  # fmt: skip
    prompt = StepWork()
    prompt.add(0, 2048, 1)
    print(f"prompt, 2,048 tokens at a time: {2048 / deployment.stage_s(prompt):.0f} tokens/s a replica, limit "
          f"{deployment.steps.limit(prompt).name}")  # fmt: skip
    for rate in args.rate:
        found = simulate(deployment, args.dp, rate, args.requests)
        ttft = [one.first - one.arrived for one in found.served]
        tpot = [(one.last - one.first) / (one.num_tokens - 1) for one in found.served if one.num_tokens > 1]
        print(
            f"{rate:g} requests/s: {found.tokens_per_s:.0f} tokens/s, first token {1e3 * percentile(ttft, 0.5):.0f} / "
            f"{1e3 * percentile(ttft, 0.99):.0f} ms, each other {1e3 * percentile(tpot, 0.5):.1f} / "
            f"{1e3 * percentile(tpot, 0.99):.1f} ms (median / 99th percentile), stages busy {found.busy:.0%}, "
            f"scheduler {1e3 * found.core_s:.2f} ms a step here"
        )


if __name__ == "__main__":
    main()
