"""Which of several replicas of the engine core a request goes to.

Pure arithmetic over what was routed: no processes and no messages. The replica is the one that has the least to compute
with the request: its outstanding tokens, and those of the prompt that it is not known to have cached. Answers count as
long as answers have lately been, for most callers allow far more than they get. What a replica was lately given counts
beside what is outstanding: conversations come back to where they began, and one that begins must not go where others
merely pause.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.kv_cache.block_hashes import extend_hashes
from octavo.request import EngineRequest, Prompt


class PrefixIndex:
    """The hashes of the blocks that a replica was given, the `max_blocks` most recently used of them."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def num_found(self, hashes: list[bytes]) -> int:
        """How many blocks from the first on are known."""
        return next((i for i, one in enumerate(hashes) if one not in self._hashes), len(hashes))

    def add(self, hashes: list[bytes]) -> None:
        for one in reversed(hashes):  # so that the end of a prefix, useless without its beginning, goes first
            self._hashes[one] = None
            self._hashes.move_to_end(one)
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()

    def __len__(self) -> int:
        return len(self._hashes)


@dataclass(slots=True)
class _Replica:
    index: PrefixIndex
    load: dict[str, int] = field(default_factory=dict)  # tokens to compute, by request
    num_tokens: int = 0  # sum of `load`
    num_recent_tokens: float = 0.0  # that it was given, where older ones count less


@dataclass(slots=True)
class _Routed:
    request: EngineRequest
    replica: int
    hashes: list[bytes]


_FIRST_ANSWER_TOKENS = 128  # taken for an answer's length before one has ended
_ANSWER_MEMORY = 32  # answers: older ones count e times less
_REQUEST_MEMORY = 16  # requests a replica, the same
# Of recent tokens beside outstanding ones. benchmarks/routing.py, 4 replicas: with 1 up to 6% of the hits are lost, and
# with this and a memory of 32 requests one replica has 1.52 times the mean.
_RECENT_WEIGHT = 0.5


def block_hashes(prompt: Prompt, block_size: int) -> list[bytes]:
    """Of a prompt's full blocks: for `Router.route`. A long prompt takes 0.1 ms for each 1,000 tokens or so, which is
    better spent off an event loop."""
    hashes: list[bytes] = []
    extend_hashes(hashes, prompt, prompt.token_ids, block_size)
    return hashes


class Router:
    """Over `num_replicas` of `max_blocks` cached blocks each. A request and its sequences stay on one."""

    def __init__(self, num_replicas: int, block_size: int, max_blocks: int) -> None:
        self._answer_tokens = float(_FIRST_ANSWER_TOKENS)
        self._block_size = block_size
        self._replicas = [_Replica(PrefixIndex(max_blocks)) for _ in range(num_replicas)]
        self._routed: dict[str, _Routed] = {}

    def route(self, request: EngineRequest, hashes: list[bytes], available: Iterable[int]) -> int:
        """The number of the replica, of those `available`, that is to serve `request`, which counts as its load until
        `end`. `hashes` are the `block_hashes` of its prompt. Raises `ValueError` if none is available."""
        num_tokens = len(request.prompt.token_ids)
        missing = {i: self._num_missing(i, num_tokens, hashes) for i in available}
        chosen = min(missing, key=lambda i: self._cost(i) + missing[i])
        replica = self._replicas[chosen]
        expected = min(request.max_tokens, round(self._answer_tokens)) * request.params.num_completions
        num_given = missing[chosen] + expected
        for one in self._replicas:
            one.num_recent_tokens *= 1 - 1 / (_REQUEST_MEMORY * len(self._replicas))
        replica.load[request.request_id] = num_given
        replica.num_tokens += num_given
        replica.num_recent_tokens += num_given
        replica.index.add(hashes)
        self._routed[request.request_id] = _Routed(request, chosen, hashes)
        return chosen

    def end(self, request_id: str, output_ids: list[int]) -> None:
        """A request has ended, with `output_ids` as its answer, which its replica now has cached. Unknown ids are
        ignored."""
        routed = self._routed.pop(request_id, None)
        if routed is None:
            return
        replica, prompt = self._replicas[routed.replica], routed.request.prompt
        replica.num_tokens -= replica.load.pop(request_id)
        if output_ids:
            self._answer_tokens += (len(output_ids) - self._answer_tokens) / _ANSWER_MEMORY
        # The last token's keys and values have not been computed.
        extend_hashes(routed.hashes, prompt, [*prompt.token_ids, *output_ids[:-1]], self._block_size)
        replica.index.add(routed.hashes)

    def forget(self, number: int) -> None:
        """A replica has died: what it had cached and was to do is lost."""
        replica = self._replicas[number]
        for request_id in replica.load:
            del self._routed[request_id]
        replica.load.clear()
        replica.num_tokens = 0
        replica.num_recent_tokens = min(one.num_recent_tokens for one in self._replicas)
        replica.index.clear()

    def forget_caches(self) -> None:
        """Nobody has anything cached any more; what is to do stays."""
        for replica in self._replicas:
            replica.index.clear()

    def load(self, number: int) -> int:
        """Tokens that a replica is expected to have still to compute."""
        return self._replicas[number].num_tokens

    def _cost(self, number: int) -> float:
        return self._replicas[number].num_tokens + _RECENT_WEIGHT * self._replicas[number].num_recent_tokens

    def _num_missing(self, number: int, num_tokens: int, hashes: list[bytes]) -> int:
        # One token at least is computed, as nothing else gives logits.
        return max(1, num_tokens - self._replicas[number].index.num_found(hashes) * self._block_size)
