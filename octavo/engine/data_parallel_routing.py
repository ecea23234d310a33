"""Chooses the engine, of several, that a request goes to.

Pure arithmetic over routed requests: no processes and no messages. A request goes to the replica with the smallest sum
of two numbers: the prompt tokens that the replica is not known to have cached, and its load times `_LOAD_WEIGHT`. The
load is the tokens that the replica was given lately, not the outstanding ones, because conversations come back to the
replica where they began: a new conversation must not go where others merely pause, and no conversation must leave its
cache because two requests arrive at once. Until an answer has ended, it counts with the recent average length of
answers: most callers allow far more tokens than they get.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.kv_cache.block_hashes import extend_hashes, prompt_hashes, split_hashes
from octavo.request import EngineRequest


class PrefixIndex:
    """The block hashes of a replica's prompts: the `max_blocks` most recently used."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def num_found(self, hashes: list[bytes]) -> int:
        """Return how many leading blocks are known."""
        return next((i for i, one in enumerate(hashes) if one not in self._hashes), len(hashes))

    def add(self, hashes: list[bytes]) -> None:
        for one in reversed(hashes):  # the end of a prefix is evicted first: it is useless without its beginning
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
    num_recent_tokens: float = 0.0  # tokens that it was given; older requests count less
    was_lost: bool = False  # died, and was given nothing since


@dataclass(slots=True)
class _Routed:
    request: EngineRequest
    replica: int
    hashes: list[bytes]
    num_expected: int  # tokens of its answers, predicted


_FIRST_ANSWER_TOKENS = 128  # the prediction before any answer has ended
_ANSWER_MEMORY = 32  # number of answers after which older answers count e times less
_MAX_SESSIONS = 65_536
_REQUEST_MEMORY = 64  # the same for requests of a replica: some turns of each conversation
# Weight of the load against missing prompt tokens. Above 1/2, a replica with two conversations more than another gives
# one away. From 1 on, one conversation more would be enough, and that conversation would go back and forth.
_LOAD_WEIGHT = 0.85


def block_hashes(request: EngineRequest, block_size: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks, for `Router.route`. It takes about 0.1 ms for 1,000 tokens: run it
    off the event loop for long prompts."""
    return split_hashes(request.block_hashes or prompt_hashes(request.prompt, block_size))


class Router:
    """Routes over `num_replicas` with `max_blocks` cached blocks each. All sequences of a request stay on one
    replica."""

    def __init__(self, num_replicas: int, block_size: int, max_blocks: int) -> None:
        self._answer_tokens = float(_FIRST_ANSWER_TOKENS)
        self._block_size = block_size
        self._replicas = [_Replica(PrefixIndex(max_blocks)) for _ in range(num_replicas)]
        self._routed: dict[str, _Routed] = {}
        self._homes: OrderedDict[str, int] = OrderedDict()  # by session: the replica of its last request

    def route(self, request: EngineRequest, hashes: list[bytes], available: Iterable[int]) -> int:
        """Return the index of the `available` replica that serves `request`, which counts as its load until `end`.
        `hashes` are the `block_hashes` of its prompt. The replica of its session counts as if it had the whole prompt
        cached. Raises `ValueError` if none is available."""
        num_tokens = len(request.prompt.token_ids)
        missing = {i: self._num_missing(i, num_tokens, hashes) for i in available}
        self._take_back(missing)
        home = None if request.session_id is None else self._homes.get(request.session_id)
        chosen = min(missing, key=lambda i: (1 if i == home else missing[i]) + _LOAD_WEIGHT * self._load(i))
        if request.session_id is not None:
            self._homes[request.session_id] = chosen
            self._homes.move_to_end(request.session_id)
            if len(self._homes) > _MAX_SESSIONS:
                self._homes.popitem(last=False)
        replica = self._replicas[chosen]
        expected = min(request.max_tokens, round(self._answer_tokens)) * request.params.num_completions
        num_given = missing[chosen] + expected
        for one in self._replicas:
            one.num_recent_tokens *= 1 - 1 / (_REQUEST_MEMORY * len(self._replicas))
        replica.load[request.request_id] = num_given
        replica.num_tokens += num_given
        replica.num_recent_tokens += num_given
        replica.index.add(hashes)
        self._routed[request.request_id] = _Routed(request, chosen, hashes, expected)
        return chosen

    def end(self, request_id: str, output_ids: list[int]) -> None:
        """End a request: its answer `output_ids` is cached by its replica now. Unknown ids are ignored."""
        routed = self._routed.pop(request_id, None)
        if routed is None:
            return
        replica, prompt = self._replicas[routed.replica], routed.request.prompt
        replica.num_tokens -= replica.load.pop(request_id)
        num_given = len(output_ids) * routed.request.params.num_completions
        replica.num_recent_tokens += num_given - routed.num_expected
        if output_ids:
            self._answer_tokens += (len(output_ids) - self._answer_tokens) / _ANSWER_MEMORY
        # The last token was not computed.
        extend_hashes(routed.hashes, prompt, [*prompt.token_ids, *output_ids[:-1]], self._block_size)
        replica.index.add(routed.hashes)

    def forget(self, number: int) -> None:
        """Forget the cache and the load of a replica that has died."""
        replica = self._replicas[number]
        for request_id in replica.load:
            del self._routed[request_id]
        replica.load.clear()
        replica.num_tokens = 0
        replica.was_lost = True
        replica.index.clear()
        self._homes = OrderedDict((session, home) for session, home in self._homes.items() if home != number)

    def forget_caches(self) -> None:
        """Forget all caches; loads stay."""
        for replica in self._replicas:
            replica.index.clear()
        self._homes.clear()

    def load(self, number: int) -> int:
        """Return the tokens that a replica still has to compute, as predicted."""
        return self._replicas[number].num_tokens

    def _take_back(self, available: Iterable[int]) -> None:
        """Give replicas that were lost the load of the least loaded other replica: otherwise they would get all new
        requests until they had caught up."""
        lost = [i for i in available if self._replicas[i].was_lost]
        least = min((self._load(i) for i in available if i not in lost), default=0.0)
        for replica in (self._replicas[i] for i in lost):
            replica.num_recent_tokens, replica.was_lost = least, False

    def _load(self, number: int) -> float:
        """Return the tokens that a replica was given lately, at least those outstanding."""
        return max(self._replicas[number].num_recent_tokens, self._replicas[number].num_tokens)

    def _num_missing(self, number: int, num_tokens: int, hashes: list[bytes]) -> int:
        # At least one token is computed, for its logits.
        return max(1, num_tokens - self._replicas[number].index.num_found(hashes) * self._block_size)
