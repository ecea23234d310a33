"""Prints how well a router over replicas does beside one large cache: hits, and how even the replicas' work is.

    python benchmarks/routing.py [--router engines|gateway|round-robin|two-choices] [--replicas 4,64]
        [--patterns chat,agents] [--seeds 20-29] [--memory 1]
        [--gateways 2] [--several-gateways] [--gateway-restart SECONDS] [--without-notes] [--replica-restart SECONDS]
        [--exact]
    python benchmarks/routing.py --adapters 8 [--max-loras 2] [--replicas 4] [--gateways 2] [--without-notes]

Each replica is a real scheduler with its KV cache and an executor that computes nothing. Conversations grow by a
message and an answer a turn and begin at times of their own; one turn follows the other after a pause. A step takes as
long as its tokens do, on a clock that all replicas share. The router is that of a server with several engines, or the
gateway's, which knows texts and what it has sent where. Two others are for comparison: replicas in turn, and of two
that are drawn the one with fewer requests. Requests may come through several gateways at random, which may start again
every so many seconds. Each reads the replicas' notes every 5 s. Replicas may lose their caches, in turn. With --exact
gateways know each cache's blocks at all times, as no feed of events can do better.

With --adapters it prints how many of 10,000 requests for adapters load one onto a device. Some adapters get more
requests than others (1/1, 1/2, 1/3, ...). A request takes 2 s, and replicas have four at a time on average.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.data_parallel_routing import Router, block_hashes
from octavo.gateway import replica_router
from octavo.gateway.notes import read_names, written_names
from octavo.gateway.replica import Replica as GatewayReplica
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.kv_cache.manager import KVCacheManager
from octavo.lora.pool import AdapterPool
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.step_plan import StepPlan, StepResult

BLOCK_SIZE = 16
STEP_S, TOKEN_S = 0.01, 0.0001  # a step's time: so much, and so much for each token
ADAPTER_REQUEST_S = 2.0
NOTES_S = 5.0  # between two readings of the notes, as gateways have it by default
MAX_TOKENS = 4096  # which callers allow; answers are far shorter


@dataclass(frozen=True)
class Pattern:
    """What conversations are like. Ranges are of tokens, and of turns; a conversation begins with one of `num_shared`
    beginnings that others have too, if there are some, and then with words of its own."""

    each: int  # conversations for each replica
    turns: tuple[int, int]
    first: tuple[int, int]
    message: tuple[int, int]
    answer: tuple[int, int]
    pause_s: float  # on average
    num_shared: int = 0
    shared: int = 0
    num_blocks: int = 1000  # of each replica


PATTERNS = {
    "chat": Pattern(2, (12, 12), (200, 800), (20, 300), (20, 200), 2),
    "crowd": Pattern(8, (1, 12), (20, 400), (20, 300), (20, 200), 20),  # that comes and goes
    "short": Pattern(2, (4, 4), (200, 800), (20, 300), (20, 200), 2),
    "agents": Pattern(3, (20, 40), (100, 1000), (50, 1000), (20, 120), 0.3, num_shared=4, shared=1500, num_blocks=6000),
    "documents": Pattern(4, (2, 6), (1000, 6000), (20, 60), (50, 300), 10, num_blocks=4000),
    "long": Pattern(10, (10, 20), (4000, 8000), (100, 500), (20, 60), 2, num_blocks=12000),
    "questions": Pattern(32, (1, 1), (20, 200), (20, 60), (20, 200), 10, num_shared=8, shared=800),
}


class NoExecutor:
    """Samples the token 7 everywhere."""

    runs_ahead, num_stages = False, 1
    cache_groups = group_layers([LayerCacheSpec("full", num_kv_heads=1, key_size=8, value_size=8)])
    weight_bytes = cache_bytes = 1 << 20

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.num_host_blocks = [num_blocks], [0]
        self.num_tokens = 0  # that it was given to compute

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        self.num_tokens += sum(row.num_tokens for row in plan.rows)
        done: Future[StepResult] = Future()
        done.set_result(StepResult([7] * sum(row.num_samples for row in plan.rows)))
        return done


class Replica:
    """A core, and what it has done."""

    def __init__(self, num_blocks: int) -> None:
        scheduler = SchedulerConfig(
            max_num_seqs=64, max_num_batched_tokens=512, enable_chunked_prefill=True, policy="fcfs",
            preemption_mode="recompute", check_invariants=False,
        )  # fmt: skip
        config = SimpleNamespace(
            scheduler=scheduler,
            cache=SimpleNamespace(
                block_size=BLOCK_SIZE, enable_prefix_caching=True, disk=None, host_bytes=0, events=None
            ),
            model=SimpleNamespace(seed=0), device="cpu", speculative=None, draft=None, lora=None, media=None,
            sound=None, prompt_embeds=None,
        )  # fmt: skip
        self.executor = NoExecutor(num_blocks)
        self.core = EngineCore(cast(Any, config), cast(Any, self.executor))
        self.num_hits = 0
        self.busy_s = 0.0
        self.is_stepping = False


@dataclass
class Conversation:
    """Its tokens so far, and those of the answer that is being made."""

    tokens: list[int]
    turns_left: int
    answer: list[int] = field(default_factory=list)
    messages: dict[bytes, int] = field(default_factory=dict)  # names of beginnings that end with a message, and bytes

    def end_message(self, name: bytes) -> None:
        if self.tokens:
            self.messages[name] = 4 * len(self.tokens)


class EnginesRouter:
    """Knows tokens."""

    def __init__(self, num_replicas: int, num_blocks: int, seed: int) -> None:
        self._router, self._all = Router(num_replicas, BLOCK_SIZE, num_blocks), range(num_replicas)

    def route(self, request: EngineRequest, messages: dict[bytes, int]) -> int:
        return self._router.route(request, block_hashes(request, BLOCK_SIZE), self._all)

    def end(self, request_id: str, answer: list[int]) -> None:
        self._router.end(request_id, answer)


class Gateway:
    """One gateway's router and replicas, and what it has read of each replica's notes."""

    def __init__(self, num_replicas: int, num_blocks: int, seed: int) -> None:
        self.router = replica_router.ReplicaRouter(random.Random(seed))
        self.fleet = [GatewayReplica(str(i), cast(Any, None), "") for i in range(num_replicas)]
        self.num_read = [0] * num_replicas
        self.reads_at = 0.0
        for one in self.fleet if num_blocks else ():
            self.router.set_cache_bytes(one, 4 * BLOCK_SIZE * num_blocks)

    def read(self, notes: list[list[str]]) -> None:
        for i, prompts in enumerate(notes):
            self.router.learn(self.fleet[i], [read_names(one)[1] for one in prompts[self.num_read[i] :]], None)
            self.num_read[i] = len(prompts)


class GatewayRouter:
    """Knows the ends of messages, at four bytes a token."""

    def __init__(
        self, num_replicas: int, num_blocks: int, seed: int, num_gateways: int = 1, restart_s: float = math.inf,
        *, agrees: bool = False, has_notes: bool = True,
    ) -> None:  # fmt: skip
        self._num_replicas, self._num_gateways, self._seeds = num_replicas, num_gateways, itertools.count(seed)
        self._num_blocks = num_blocks if has_notes else 0  # notes have them
        self._restart_s, self._restarts_at, self._has_notes, self._agrees = restart_s, 0.0, has_notes, agrees
        self._random = random.Random(seed)
        self._notes: list[list[str]] = [[] for _ in range(num_replicas)]
        self._routed: dict[str, tuple[Gateway, GatewayReplica]] = {}
        self._under_way: dict[str, tuple[str, set[bytes]]] = {}  # replica's name and blocks of each request
        self.caches: list[KVCacheManager] = []  # of the replicas, if they are known

    def route(self, request: EngineRequest, messages: dict[bytes, int]) -> int:
        now = request.arrival_time
        if now >= self._restarts_at:
            self._restarts_at += self._restart_s
            self._all = [
                Gateway(self._num_replicas, self._num_blocks, next(self._seeds)) for _ in range(self._num_gateways)
            ]
        gateway = self._random.choice(self._all)
        hashes_of_blocks = block_hashes(request, BLOCK_SIZE) if self.caches else []
        if self.caches:
            known = self._cached(gateway, hashes_of_blocks)
            gateway.router._known = lambda _: known  # type: ignore[method-assign]
        if self._has_notes and now >= gateway.reads_at:
            gateway.reads_at = now + NOTES_S
            gateway.read(self._notes)
        hashes = {name.rjust(16, b"."): count for name, count in messages.items()}
        placement_hash = next(iter(hashes)) if self._agrees else None
        chosen = gateway.router.choose(gateway.fleet, hashes, placement_hash=placement_hash)
        assert chosen is not None
        gateway.router.begin(chosen)
        self._routed[request.request_id] = gateway, chosen
        self._under_way[request.request_id] = chosen.name, set(hashes_of_blocks)
        place = gateway.fleet.index(chosen)
        self._notes[place].append(written_names("", hashes, None).decode())
        return place

    def end(self, request_id: str, answer: list[int]) -> None:
        gateway, replica = self._routed.pop(request_id)
        gateway.router.end(replica)
        del self._under_way[request_id]

    def _cached(self, gateway: Gateway, hashes: list[bytes]) -> dict[GatewayReplica, int]:
        """Return the bytes of a prompt that each replica has, or computes for another request; the most first."""
        found = {}
        for one, cache in zip(gateway.fleet, self.caches, strict=True):
            coming = set().union(*(blocks for name, blocks in self._under_way.values() if name == one.name))
            pool, suffix = cache.attention[0].pool, cache.attention[0].key_suffix
            is_there = (key + suffix in pool or key in coming for key in hashes)
            found[one] = 4 * BLOCK_SIZE * sum(itertools.takewhile(bool, is_there))
        return dict(sorted(((one, count) for one, count in found.items() if count), key=lambda item: -item[1]))


class RoundRobin:
    """Takes the replicas in turn."""

    def __init__(self, num_replicas: int, num_blocks: int, seed: int) -> None:
        self._turns = itertools.cycle(range(num_replicas))

    def route(self, request: EngineRequest, messages: dict[bytes, int]) -> int:
        return next(self._turns)

    def end(self, request_id: str, answer: list[int]) -> None:
        pass


class TwoChoices:
    """Draws two replicas, and takes the one with fewer requests (Mitzenmacher 2001)."""

    def __init__(self, num_replicas: int, num_blocks: int, seed: int) -> None:
        self._random, self._num_running = random.Random(seed), [0] * num_replicas
        self._routed: dict[str, int] = {}

    def route(self, request: EngineRequest, messages: dict[bytes, int]) -> int:
        drawn = self._random.sample(range(len(self._num_running)), min(2, len(self._num_running)))
        chosen = self._routed[request.request_id] = min(drawn, key=self._num_running.__getitem__)
        self._num_running[chosen] += 1
        return chosen

    def end(self, request_id: str, answer: list[int]) -> None:
        self._num_running[self._routed.pop(request_id)] -= 1


ROUTERS: dict[str, Callable[[int, int, int], Any]] = {
    "engines": EnginesRouter, "gateway": GatewayRouter, "round-robin": RoundRobin, "two-choices": TwoChoices,
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    num_hits: int  # prompt tokens found in the caches
    num_tokens: list[int]  # that each replica computed
    ttft_s: float  # on average
    busiest_s: float  # seconds of steps of the replica that had most: the work cannot be done faster

    @property
    def largest_share(self) -> float:
        """The work of the replica that had most, over the mean."""
        return max(self.num_tokens) * len(self.num_tokens) / sum(self.num_tokens)


def simulate(
    num_replicas: int, num_conversations: int, pattern: Pattern, num_blocks: int, seed: int, router_name: str,
    restart_s: float = math.inf, *, is_exact: bool = False,
) -> Figures:  # fmt: skip
    """`num_blocks` are each replica's. The same `seed` gives the same conversations to any number of replicas."""
    rng = random.Random(seed)
    replicas = [Replica(num_blocks) for _ in range(num_replicas)]
    router = ROUTERS[router_name](num_replicas, num_blocks, seed)
    if is_exact:
        router.caches = [one.core.scheduler.cache for one in replicas]
    restarts_at, restarting = restart_s, itertools.cycle(replicas)
    shared = [[rng.randrange(1000) for _ in range(pattern.shared)] for _ in range(pattern.num_shared)] or [[]]
    talks = []
    for _ in range(num_conversations):
        talks.append(Conversation(list(begin := rng.choice(shared)), 0))
        talks[-1].end_message(b"shared %d" % shared.index(begin))
        talks[-1].tokens += [rng.randrange(1000) for _ in range(rng.randint(*pattern.first))]
        talks[-1].turns_left = rng.randint(*pattern.turns)
    # What happens when: (time, order, kind, number). Messages and pauses are drawn per turn beforehand, so that they do
    # not depend on who answers.
    drawn = [
        [
            (rng.expovariate(1 / pattern.pause_s), rng.randint(*pattern.message), rng.randint(*pattern.answer))
            for _ in range(talk.turns_left)
        ]
        for talk in talks
    ]
    events = [(drawn[i][0][0], i, "turn", i) for i in range(num_conversations)]
    heapq.heapify(events)
    order = num_conversations
    begun: dict[str, float] = {}  # of requests without a token, when they came
    waits: list[float] = []
    while events:
        now, _, kind, number = heapq.heappop(events)
        if now >= restarts_at:
            restarts_at += restart_s
            next(restarting).core.scheduler.cache.forget_prefixes()
        if kind == "turn":
            talk = talks[number]
            _, num_message, num_answer = drawn[number][-talk.turns_left]
            message = random.Random(f"{seed} {number} {talk.turns_left}")
            talk.tokens += [message.randrange(1000) for _ in range(num_message)]
            params = SamplingParams(max_tokens=num_answer, ignore_eos=True)
            request = EngineRequest(
                f"{number}-{talk.turns_left}", Prompt(list(talk.tokens)), params, [], num_answer, now
            )
            # The router knows what is allowed, not what the answer will be.
            allowed = EngineRequest(request.request_id, request.prompt, params, [], MAX_TOKENS, now)
            talk.end_message(b"%d %d" % (number, len(talk.tokens)))
            chosen = router.route(allowed, talk.messages)
            replicas[chosen].core.add(request)
            begun[request.request_id] = now
            if not replicas[chosen].is_stepping:
                replicas[chosen].is_stepping = True
                heapq.heappush(events, (now, order := order + 1, "step", chosen))
            continue
        replica = replicas[number]
        num_before = replica.executor.num_tokens
        outputs = replica.core.step()
        replica.num_hits += outputs.stats.num_prefix_hits
        step_s = STEP_S + TOKEN_S * (replica.executor.num_tokens - num_before)
        replica.busy_s += step_s
        later = now + step_s
        for output in outputs.outputs:
            i = int(output.request_id.partition("-")[0])
            if output.token_ids and output.request_id in begun:
                waits.append(later - begun.pop(output.request_id))
            talks[i].answer += output.token_ids
            if output.finish_reason is not None:
                router.end(output.request_id, talks[i].answer)
                talks[i].tokens += talks[i].answer
                talks[i].end_message(b"%d %d" % (i, len(talks[i].tokens)))
                talks[i].answer = []
                talks[i].turns_left -= 1
                if talks[i].turns_left:
                    pause_s = drawn[i][-talks[i].turns_left][0]
                    heapq.heappush(events, (later + pause_s, order := order + 1, "turn", i))
        replica.is_stepping = replica.core.has_work
        if replica.is_stepping:
            heapq.heappush(events, (later, order := order + 1, "step", number))
    num_hits = sum(replica.num_hits for replica in replicas)
    busiest_s = max(replica.busy_s for replica in replicas)
    return Figures(num_hits, [replica.executor.num_tokens for replica in replicas], sum(waits) / len(waits), busiest_s)


def compare(
    num_replicas: int, pattern: Pattern, seed: int, router: str = "engines", **options: Any
) -> tuple[float, Figures]:
    """The hits of so many replicas over those of one with all their memory, and their figures."""
    num_conversations = num_replicas * pattern.each
    one = simulate(1, num_conversations, pattern, num_replicas * pattern.num_blocks, seed, "engines")
    many = simulate(num_replicas, num_conversations, pattern, pattern.num_blocks, seed, router, **options)
    return many.num_hits / one.num_hits, many


def adapter_loads(
    num_replicas: int, num_adapters: int, max_loras: int, seed: int, num_gateways: int, *, has_notes: bool
) -> tuple[int, int]:
    """Return the loads of adapters, and the most requests that a replica had at a time."""
    rng = random.Random(seed)
    names = [str(i) for i in range(num_adapters)]
    pools = [AdapterPool(0, max_loras, num_adapters) for _ in range(num_replicas)]
    for pool, name in itertools.product(pools, names):
        pool.register(name, 0)
    gateways = []
    for _ in range(num_gateways):
        load = replica_router.Load()
        routers = [
            replica_router.ReplicaRouter(random.Random(rng.random()), load if has_notes else None) for _ in names
        ]
        fleets = [[GatewayReplica(str(i), cast(Any, None), name) for i in range(num_replicas)] for name in names]
        gateways.append((routers, fleets))
    now = read_at = 0.0
    ends: list[tuple[float, int, Callable[[], None]]] = []
    num_running, most = [0] * num_replicas, 0
    for number in range(10_000):
        now += rng.expovariate(num_replicas * 4 / ADAPTER_REQUEST_S)
        while ends and ends[0][0] <= now:
            heapq.heappop(ends)[2]()
        if has_notes and now >= read_at:
            read_at = now + NOTES_S
            for (routers, fleets), (place, pool) in itertools.product(gateways, enumerate(pools)):
                for router, fleet, name in zip(routers, fleets, names, strict=True):
                    router.learn(fleet[place], [], name in pool.resident)
        routers, fleets = rng.choice(gateways)
        [wanted] = rng.choices(range(num_adapters), [1 / (1 + i) for i in range(num_adapters)])
        router, fleet = routers[wanted], fleets[wanted]
        chosen = router.choose(fleet, {b"%d" % number: 2_000})
        assert chosen is not None
        router.begin(chosen)
        place = fleet.index(chosen)
        num_running[place] += 1
        most = max(most, num_running[place])
        # A request that would have to wait for a place runs at once, beside the others, and its adapter is loaded.
        pool, name = pools[place], names[wanted]
        if can_start := pool.can_start(name):
            pool.pin(name)
        else:
            pool.num_loads += 1

        def end(router=router, chosen=chosen, place=place, pool=pool if can_start else None, name=name) -> None:  # type: ignore[no-untyped-def]
            router.end(chosen)
            num_running[place] -= 1
            if pool is not None:
                pool.unpin(name)

        heapq.heappush(ends, (now + ADAPTER_REQUEST_S, number, end))
    return sum(pool.num_loads for pool in pools), most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="engines", choices=ROUTERS)
    parser.add_argument("--replicas", default="4,64")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--seeds", default="20-29")
    parser.add_argument("--memory", type=float, default=1.0, help="a replica's, as a share of the pattern's")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--several-gateways", action="store_true", help="they have the flag of this name")
    parser.add_argument("--gateway-restart", type=float, default=math.inf, help="seconds from one to the next")
    parser.add_argument("--without-notes", action="store_true", help="gateways know only their own history")
    parser.add_argument("--replica-restart", type=float, default=math.inf, help="seconds from one to the next")
    parser.add_argument("--exact", action="store_true", help="gateways know the replicas' caches")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--max-loras", type=int, default=2)
    args = parser.parse_args()
    of_gateways = args.several_gateways or args.exact or args.gateway_restart < math.inf
    if args.adapters:
        if of_gateways or args.replica_restart < math.inf:
            parser.error("--adapters takes --max-loras, --replicas, --seeds, --gateways and --without-notes")
    elif args.router != "gateway" and (of_gateways or args.gateways > 1 or args.without_notes):
        parser.error("flags of gateways need --router gateway")
    ROUTERS["gateway"] = partial(
        GatewayRouter, num_gateways=args.gateways, restart_s=args.gateway_restart, agrees=args.several_gateways,
        has_notes=not args.without_notes,
    )  # fmt: skip
    first, last = map(int, args.seeds.split("-"))
    for num in map(int, args.replicas.split(",")):
        if args.adapters:
            each = [
                adapter_loads(num, args.adapters, args.max_loras, seed, args.gateways, has_notes=not args.without_notes)
                for seed in range(first, last + 1)
            ]
            share, most = (fmean(values) for values in zip(*each, strict=True))
            print(f"{num:3} replicas, {args.adapters} adapters: {share / 100:.1f}% of requests load one; at most "
                  f"{most:.0f} requests at a replica", flush=True)  # fmt: skip
            continue
        for name in args.patterns.split(","):
            pattern = PATTERNS[name]
            pattern = replace(pattern, num_blocks=round(args.memory * pattern.num_blocks))
            found = [
                compare(num, pattern, seed, args.router, restart_s=args.replica_restart, is_exact=args.exact)
                for seed in range(first, last + 1)
            ]
            hits = [share for share, _ in found]
            loads = [figures.largest_share for _, figures in found]
            ttft_s = fmean(figures.ttft_s for _, figures in found)
            busiest_s = fmean(figures.busiest_s for _, figures in found)
            print(f"{num:3} replicas, {name:10} hits of one large cache's {fmean(hits):.1%}, at least {min(hits):.1%}; "
                  f"largest load {fmean(loads):.2f} of the mean, at most {max(loads):.2f}; first token after "
                  f"{ttft_s * 1e3:.0f} ms; the busiest works for {busiest_s:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
