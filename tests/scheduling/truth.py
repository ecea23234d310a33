"""What must come out of a simulated engine: the setups, and every sequence computed alone on a device without blocks.

A token's state stands for its key and its value: a hash over that token and over the states that it can see in each
cache group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from octavo.kv_cache.groups import CacheGroup, LayerCacheSpec
from octavo.request import EngineRequest
from octavo.step_cost import StepCostModel

VOCAB_SIZE = 48
EOS = 0
# A second each, and so much for the other features of a step.
STEP_COST = StepCostModel((1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.01, 0.01))
FAILURE = "a logits processor failed"

FULL = LayerCacheSpec("full", num_kv_heads=1, key_size=1, value_size=1)
LARGE = LayerCacheSpec("full", num_kv_heads=1, key_size=2, value_size=2)
NARROW = LayerCacheSpec("window", num_kv_heads=1, key_size=1, value_size=1, window=3)
WIDE = LayerCacheSpec("window", num_kv_heads=1, key_size=1, value_size=1, window=10)
STATE = LayerCacheSpec("state", num_bytes=1)

# What the layers of the simulated models keep, and the pool that each group has its blocks from.
MODELS: dict[str, list[tuple[LayerCacheSpec, int]]] = {
    "full": [(FULL, 0)],
    "full and window": [(FULL, 0), (NARROW, 0), (WIDE, 0)],
    "window": [(WIDE, 0)],
    "full and state": [(FULL, 0), (STATE, 1)],
    "state": [(STATE, 0)],
    "different pools": [(STATE, 0), (WIDE, 1), (LARGE, 2), (FULL, 1)],
}


@dataclass(frozen=True)
class Setup:
    """A scheduler's configuration and the memory under it."""

    num_blocks: int = 24
    block_size: int = 4
    num_host_blocks: int = 8
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 24
    policy: str = "fcfs"
    preemption_mode: str = "recompute"
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    keeps_on_host: bool = False  # blocks that leave the pools, so that they come back
    runs_ahead: bool = False  # steps are planned before the results of the last one are known
    num_stages: int = 1  # so many steps are under way, each of other sequences
    memory_failures: int = 0  # percent of the steps that the device has no memory for
    model: str = "full"
    target_step_s: float = 0.0  # that steps take where streams wait, at what `STEP_COST` says
    draft_tokens: str = "none"  # "right", "wrong" or "random": what the proposer makes up

    @property
    def max_model_len(self) -> int:
        """The longest request that both the memory and, without chunked prefill, one step can hold."""
        capacity = self.num_blocks * self.block_size
        return capacity if self.enable_chunked_prefill else min(capacity, self.max_num_batched_tokens)

    @property
    def groups(self) -> list[CacheGroup]:
        return [CacheGroup(spec, (layer,), pool) for layer, (spec, pool) in enumerate(MODELS[self.model])]

    def pool_sizes(self) -> list[int]:
        """Each pool has room for `num_blocks` blocks of each of its groups that keep all keys, and is short of others:
        `num_blocks` of them are enough for a window, and one is for a state."""
        sizes = [0] * (1 + max(group.pool for group in self.groups))
        for group in self.groups:
            sizes[group.pool] += max(1, self.num_blocks // 4) if group.spec.kind == "state" else self.num_blocks
        for pool in {group.pool for group in self.groups if group.spec.kind == "window"}:
            sizes[pool] += 1  # the null block
        return sizes


@dataclass(frozen=True)
class Expected:
    """What a sequence must put out, whatever else runs."""

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None


@dataclass
class Watched:
    """A request as the test follows it."""

    request: EngineRequest
    fails_at: int | None  # output tokens before a logits processor fails
    deadline: int | None  # the step by which it must have finished
    due: float = math.inf  # where requests have deadlines: nobody who comes later goes before it
    outputs: dict[int, list[int]] = field(default_factory=dict)  # tokens so far, by sequence
    expected: dict[int, Expected] = field(default_factory=dict)  # by sequence, once it has put out a token
    live: set[int] = field(default_factory=set)  # sequences that the test has neither seen finish nor aborted

    @property
    def has_started(self) -> bool:
        return bool(self.outputs)

    @property
    def num_most_steps(self) -> int:
        """Steps that it can take alone, at a token each. Beams may all have to be computed anew for each token."""
        num_tokens = len(self.request.prompt.token_ids) + self.request.max_tokens
        if self.request.params.use_beam_search:
            return self.request.params.num_sequences * self.request.max_tokens * num_tokens
        return len(self.live) * num_tokens


def standalone(setup: Setup, watched: Watched, index: int) -> Expected:
    """The tokens of a sequence that runs alone on a device without blocks."""
    request, params = watched.request, watched.request.params
    truth = Truth(setup, request)
    for token in request.prompt.token_ids:
        truth.append(token)
    stops = [EOS, *params.stop_token_ids]
    output: list[int] = []
    while True:
        if watched.fails_at == len(output):
            return Expected(output, "error", None)
        token = choose(truth.states[-1], params.seed or 0, index, stops if len(output) < params.min_tokens else [])
        output.append(token)
        if token in params.stop_token_ids:
            return Expected(output, "stop", token)
        if token == EOS and not params.ignore_eos:
            return Expected(output, "stop", None)
        if len(output) == request.max_tokens:
            return Expected(output, "length", None)
        truth.append(token)


def searched(setup: Setup, watched: Watched) -> dict[int, Expected]:
    """The answers of a beam search that is done by the book: whole sequences, nothing shared, nothing kept between two
    steps but tokens and scores."""
    request, params = watched.request, watched.request.params
    width, max_tokens = params.num_sequences, request.max_tokens
    stops = [*([] if params.ignore_eos else [EOS]), *params.stop_token_ids]

    def state_of(output: list[int]) -> int:
        truth = Truth(setup, request)
        for token in [*request.prompt.token_ids, *output]:
            truth.append(token)
        return truth.states[-1]

    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        if watched.fails_at == length - 1:
            return dict.fromkeys(range(width), Expected([], "error", None))
        masked = [EOS, *params.stop_token_ids] if length - 1 < params.min_tokens else []
        found = [
            (score + value, [*output, token])
            for score, output in beams
            for token, value in likelihoods(state_of(output), masked)
        ]
        found.sort(key=lambda one: (-one[0], one[1]))
        penalty = length**params.length_penalty
        ends = [one[1][-1] in stops or length == max_tokens for one in found]
        finished += [
            (score / penalty, output) for (score, output), end in zip(found[:width], ends, strict=False) if end
        ]
        finished = sorted(finished, key=lambda one: (-one[0], one[1]))[:width]
        beams = [one for one, end in zip(found, ends, strict=True) if not end][:width]
        if not beams:
            break
        if len(finished) == width:
            longest_is_best = params.early_stopping == "never" and params.length_penalty > 0
            most = max_tokens**params.length_penalty if longest_is_best else penalty
            if params.early_stopping is True or beams[0][0] / most <= finished[-1][0]:
                break

    def expected(output: list[int]) -> Expected:
        if output[-1] in params.stop_token_ids:
            return Expected(output, "stop", output[-1])
        return Expected(output, "stop" if output[-1] in stops else "length", None)

    return {index: expected(output) for index, (_, output) in enumerate(finished[: params.n])}


def likelihoods(state: int, masked: list[int]) -> list[tuple[int, float]]:
    """Every token that may follow and a number that stands for its log-probability, best first; no two are equal."""
    values = [(token, -(hash((state, token)) % 2**40) / 2**37) for token in range(VOCAB_SIZE) if token not in masked]
    return sorted(values, key=lambda one: -one[1])


class Truth:
    """The states of a sequence's tokens, each after the one before, on a device without blocks."""

    def __init__(self, setup: Setup, request: EngineRequest) -> None:
        self.states: list[int] = []
        self._root = root(request.prompt.cache_salt)
        self._specs = [group.spec for group in setup.groups]

    def append(self, token: int) -> None:
        states = self.states
        seen = [tuple(states[p] + g for p in visible(spec, len(states))) for g, spec in enumerate(self._specs)]
        states.append(advance(self._root, token, len(states), seen))


def root(salt: str | None) -> int:
    """The state before the first token. The salt stands in it so that blocks shared across salts would show."""
    return 1 + sum((salt or "").encode())


def visible(spec: LayerCacheSpec, position: int) -> range:
    """The tokens whose numbers go into that of the token at `position`, itself apart. Where all keys are kept, the last
    one stands for all before it."""
    return range(max(0, position - (spec.window - 1 if spec.kind == "window" else 1)), position)


def advance(root: int, token: int, position: int, seen: list[tuple[int, ...]]) -> int:
    """The state of a token, by all that is seen from there in each group."""
    return hash((root, token, position, *seen))


def choose(state: int, seed: int, index: int, masked: list[int]) -> int:
    """A token that is a function of everything before it, of the request's seed and of which completion it is."""
    for attempt in range(1000):
        token = hash((state, seed, index, attempt)) % VOCAB_SIZE
        if token not in masked:
            return token
    raise AssertionError("everything is masked")
