"""Chooses the replica that answers a request: one that has had much of its conversation, and was not given much else
lately; or for a new conversation, where several gateways share the replicas, the one that all of them would choose."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.gateway.replica import Replica

MAX_HASHES = 65_536  # remembered prefixes of a model
# How many times the mean of requests in flight a replica may have before affinity gives way: the constant of consistent
# hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016).
LOAD_FACTOR = 1.25
SLACK = 2  # and so many requests more, so that affinity holds while there are few
# Less than among engines: load decides where a conversation begins, and seldom moves it. In simulation (benchmarks/
# routing.py) weights from 0.3 on move conversations of 20 s between two turns away from caches that have them.
_LOAD_WEIGHT = 0.2
_REQUEST_MEMORY = 64  # requests of a replica after which older ones count e times less
_NUM_DRAWN = 8
_MAX_HOLDERS = 8  # remembered replicas of a prefix, the latest
_ANSWER_BYTES = 512  # of an answer: some 128 tokens
_MAX_UNIT = 1e100
# An adapter counts as so much text before each of its conversations. Loading one is work, and takes another's place.
_ADAPTER_BYTES = 65_536
_ADAPTER = b"adapter"  # in place of a prefix's hash

Prompt = tuple[list[bytes], bytes | None]  # its prefixes and session


Kept = tuple["ReplicaRouter", bytes]  # a prefix, and the router of its model


class _Cache:
    """What a server's cache still has of the prompts that it was given, for all of its models, if it evicts the least
    recently used, and of a prompt the end first. `max_bytes` is its size, and `evicted` has what was evicted since the
    notes were read."""

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes, self.evicted = max_bytes, set[Kept]()
        self._kept: OrderedDict[Kept, int] = OrderedDict()  # by prefix, the bytes that the one before it lacks
        self._num_bytes = 0

    def add(self, router: ReplicaRouter, prefixes: Mapping[bytes, int]) -> list[Kept]:
        """Note a prompt, and return the prefixes that are evicted for it."""
        before, new = 0, list[tuple[Kept, int]]()
        for one, count in prefixes.items():
            new.append(((router, one), count - before))
            before = count
        for kept, count in reversed(new):
            self._num_bytes += count - self._kept.pop(kept, 0)
            self._kept[kept] = count
            self.evicted.discard(kept)
        evicted = []
        while self._num_bytes > self.max_bytes and len(self._kept) > 1:
            kept, count = self._kept.popitem(last=False)
            self._num_bytes -= count
            evicted.append(kept)
        self.evicted.update(evicted)
        return evicted

    def remove(self, kept: Kept) -> None:
        self._num_bytes -= self._kept.pop(kept, 0)


@dataclass(eq=False)
class Load:
    """The work and the caches of servers, by the names of the replicas. Models with the same addresses share it."""

    num_in_flight: Counter[str] = field(default_factory=Counter)
    # Bytes that each replica was given, in units that grow with each request: older requests count less.
    given: dict[str, float] = field(default_factory=dict)
    unit: float = 1.0
    caches: dict[str, _Cache] = field(default_factory=dict)  # of replicas that say how large theirs are


class ReplicaRouter:
    """Chooses among the replicas of one model. Of those that have had some of a conversation and the least loaded of
    others, a request goes to the one with the smallest sum of two numbers: the bytes of the conversation that it has
    not had or has evicted since, and `_LOAD_WEIGHT` times the bytes that it was given lately. Servers have this rule
    for their engines, all of which they look at (`octavo.engine.data_parallel_routing`). `random_source` draws the
    others."""

    def __init__(self, random_source: random.Random | None = None, load: Load | None = None) -> None:
        self._random = random_source or random.Random()
        self._holders: OrderedDict[bytes, list[Replica]] = OrderedDict()  # by the hash of a prefix
        self.load = load or Load()
        self.is_for_adapter = False  # the model is an adapter, which some replicas have on their devices
        self._num_able = self._num_in_flight = 0  # replicas that take requests, and requests in flight
        self._num_to_recount = 0  # choices until these are counted again
        self.num_affine = 0  # requests sent to a replica that has their prefix or session

    def choose(
        self,
        replicas: Sequence[Replica],
        prefixes: Mapping[bytes, int],
        excluded: Collection[Replica] = (),
        session: bytes | None = None,
        placement_hash: bytes | None = None,
    ) -> Replica | None:
        """Return the replica for a request with these prefixes, the longest last, and their bytes; None if no one takes
        requests. The request counts as given to it. The replica of the `session` comes first. With `placement_hash`, of
        a part of the conversation, gateways with the same replicas choose alike: a replica that has a prefix, otherwise
        one by the hash."""
        if not replicas:
            return None
        most = self._most_in_flight(replicas)
        adapter_bytes = 0
        if self.is_for_adapter:
            adapter_bytes = _ADAPTER_BYTES
            prefixes = {_ADAPTER: adapter_bytes} | {one: adapter_bytes + count for one, count in prefixes.items()}
            placement_hash = placement_hash and replicas[0].served_name.encode()

        def is_able(one: Replica) -> bool:
            return self.load.num_in_flight[one.name] < most and one not in excluded and one.takes_requests()

        num_bytes, known = max(prefixes.values(), default=0), self._known(prefixes)
        of_session = [] if session is None else self._holders.get(session, [])
        chosen = next(filter(is_able, of_session), None)
        if chosen is None and placement_hash is not None:
            chosen = next(filter(is_able, known), None)  # it has most of the conversation
            chosen = chosen or max(filter(is_able, replicas), key=lambda one: _score(placement_hash, one), default=None)
        if chosen is None and (other := self._less_loaded(replicas, excluded, most)) is not None:
            holders = () if placement_hash is not None else filter(is_able, known)
            chosen = min([*holders, other], key=lambda one: _LOAD_WEIGHT * self._given(one) - known.get(one, 0))
        if chosen is None:
            return None
        self.num_affine += known.get(chosen, 0) > adapter_bytes or chosen in of_session
        self._count_given(chosen, num_bytes - known.get(chosen, 0) + _ANSWER_BYTES, len(replicas))
        self.remember(chosen, prefixes, session)
        if (cache := self.load.caches.get(chosen.name)) is not None:
            text = {one: count - adapter_bytes for one, count in prefixes.items() if one != _ADAPTER}
            for router, one in cache.add(self, text):
                router._drop(chosen.name, one)
        return chosen

    def _count_given(self, replica: Replica, num_bytes: int, num_replicas: int) -> None:
        load = self.load
        load.given[replica.name] = load.unit * (self._given(replica) + num_bytes)
        load.unit *= 1 + 1 / (_REQUEST_MEMORY * num_replicas)
        if load.unit > _MAX_UNIT:
            load.given = {name: given / load.unit for name, given in load.given.items()}
            load.unit = 1.0

    def remember(self, replica: Replica, hashes: Iterable[bytes], session: bytes | None = None) -> None:
        """Note that a replica has these prefixes and the session from now on."""
        if session is not None:
            self._holders[session] = [replica]
            self._holders.move_to_end(session)
        for one in hashes:
            holders = self._holders.setdefault(one, [])
            self._holders.move_to_end(one)
            if replica in holders:
                holders.remove(replica)
            holders.append(replica)
            del holders[:-_MAX_HOLDERS]
        while len(self._holders) > MAX_HASHES:
            one, holders = self._holders.popitem(last=False)
            for cache in filter(None, (self.load.caches.get(holder.name) for holder in holders)):
                cache.remove((self, one))

    def forget(self, replica: Replica) -> None:
        """Forget a replica that has ended, and all that it held."""
        self.load.given.pop(replica.name, None)
        self.load.caches.pop(replica.name, None)
        for one in [one for one, holders in self._holders.items() if replica in holders]:
            self._drop(replica.name, one)

    def set_cache_bytes(self, replica: Replica, num_bytes: float) -> None:
        """Note how many bytes of prompts a replica's cache holds, of all models together; the rest is forgotten as the
        replica evicts it."""
        self.load.caches.setdefault(replica.name, _Cache(num_bytes)).max_bytes = num_bytes

    def _drop(self, name: str, one: bytes) -> None:
        """Note that a replica no longer has a prefix."""
        if (holders := self._holders.get(one)) is not None:
            holders[:] = [holder for holder in holders if holder.name != name]
            if not holders:
                del self._holders[one]

    def num_known_bytes(self, prefixes: Mapping[bytes, int]) -> int:
        """Return how many bytes of a conversation with these prefixes some replica has had."""
        return max(self._known(prefixes).values(), default=0)

    def begin(self, replica: Replica) -> None:
        """Note that a replica gets a request; `end` follows."""
        replica.num_in_flight += 1
        self.load.num_in_flight[replica.name] += 1

    def end(self, replica: Replica) -> None:
        replica.num_in_flight -= 1
        self.load.num_in_flight[replica.name] -= 1
        if not self.load.num_in_flight[replica.name]:
            del self.load.num_in_flight[replica.name]  # the address may never come back

    def learn(self, replica: Replica, prompts: Iterable[Prompt], has_adapter: bool | None) -> None:
        """Take in what a server says: the prefixes and sessions of prompts that other gateways gave it, or this one
        before its restart; and if the model is an adapter, whether it is on the device. The replica that alone had the
        adapter keeps its requests when the adapter has been evicted there: elsewhere it would evict another one."""
        evicted = set[Kept]() if (cache := self.load.caches.get(replica.name)) is None else cache.evicted
        for prefixes, session in prompts:
            is_known = session in self._holders  # its last request may have been elsewhere
            new = [one for one in prefixes if (self, one) not in evicted and replica not in self._holders.get(one, ())]
            self.remember(replica, new, None if is_known else session)
        evicted -= {kept for kept in evicted if kept[0] is self}
        self.is_for_adapter |= has_adapter is not None
        holders = self._holders.get(_ADAPTER, [])
        if has_adapter and replica not in holders:
            self.remember(replica, [_ADAPTER])
        elif has_adapter is False and replica in holders and len(holders) > 1 and not replica.num_in_flight:
            holders.remove(replica)

    def _given(self, replica: Replica) -> float:
        """Return the bytes that a replica was given lately; as many as the most loaded one until it is counted."""
        given = self.load.given.get(replica.name)
        return (max(self.load.given.values(), default=0.0) if given is None else given) / self.load.unit

    def _less_loaded(self, replicas: Sequence[Replica], excluded: Collection[Replica], most: float) -> Replica | None:
        """Return the least loaded of some that are drawn at random and have fewer requests than `most`. If there are no
        such ones, return the least loaded of all."""
        drawn = self._random.sample(replicas, min(len(replicas), _NUM_DRAWN))
        for some, limit in ((drawn, most), (replicas, most), (replicas, math.inf)):
            able = [
                one for one in some
                if self.load.num_in_flight[one.name] < limit and one not in excluded and one.takes_requests()
            ]  # fmt: skip
            if able:
                return min(able, key=self._given)
        return None

    def _known(self, prefixes: Mapping[bytes, int]) -> dict[Replica, int]:
        """Return how many bytes of the conversation each replica has had, the one with most first; at least
        `_MAX_HOLDERS` of those that have had any."""
        known: dict[Replica, int] = {}
        for one in reversed(list(prefixes)):
            for replica in reversed(self._holders.get(one, ())):
                known.setdefault(replica, prefixes[one])
            if len(known) >= _MAX_HOLDERS:
                break
        return known

    def _most_in_flight(self, replicas: Sequence[Replica]) -> float:
        """Return how many requests a replica may have, a new one included, before affinity gives way."""
        self._num_to_recount -= 1
        if self._num_to_recount <= 0:
            self._num_to_recount = len(replicas) // _NUM_DRAWN  # so that counting costs a choice no more than drawing
            able = [one for one in replicas if one.takes_requests()]
            self._num_able = max(1, len(able))
            self._num_in_flight = sum(self.load.num_in_flight[one.name] for one in replicas)
            # A replica that is new or was away begins with the least load: with none it would get all requests. It may
            # be away for this model alone.
            given = self.load.given
            least = min((given[one.name] for one in able if one.name in given), default=0.0)
            self.load.given = {one.name: max(given.get(one.name, 0.0), least) for one in replicas}
        return int(SLACK + LOAD_FACTOR * (1 + self._num_in_flight) / self._num_able)


def _score(key: bytes, replica: Replica) -> bytes:
    """Rendezvous hashing (Thaler, Ravishankar 1998): the replica with the highest score gets the key, and if it leaves,
    only its keys move."""
    return hashlib.blake2b(key + b"\0" + replica.name.encode(), digest_size=8).digest()
