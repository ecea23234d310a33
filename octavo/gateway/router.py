"""Chooses the replica that answers a request: the one of its session or with the longest prefix of its conversation,
unless its load is too high; else the less loaded of two drawn at random, or where several gateways share the replicas,
the one that all of them would choose. Also remembers which replica keeps an id."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Collection, Sequence

from octavo.gateway.replica import Replica

MAX_HASHES = 65_536  # remembered prefixes of a model
MAX_IDS = 65_536
# How many times the mean of requests in flight a replica may have before affinity gives way: the constant of consistent
# hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016).
LOAD_FACTOR = 1.25
SLACK = 2  # and so many requests more, so that affinity holds while there are few
_NUM_DRAWS = 4


class Router:
    """Chooses among the replicas of one model. `random_source` draws the candidates."""

    def __init__(self, random_source: random.Random | None = None) -> None:
        self._random = random_source or random.Random()
        self._holders: OrderedDict[bytes, list[Replica]] = OrderedDict()  # by the hash of a prefix
        self.num_affine = 0  # requests sent to a replica that has their prefix

    def choose(
        self,
        replicas: Sequence[Replica],
        hashes: Sequence[bytes],
        excluded: Collection[Replica] = (),
        session: bytes | None = None,
        agreed: bytes | None = None,
    ) -> Replica | None:
        """Return the replica for a request of this session with these prefixes, the longest last; None if no replica
        takes requests. If none is known to have a prefix, the hash of `agreed` chooses, equally in every gateway with
        these replicas."""
        chosen = self._less_loaded(replicas, excluded)
        if chosen is None:
            return None
        keys = hashes if session is None else [*hashes, session]
        holder = self._holder(replicas, keys, excluded)
        most = _most_in_flight(replicas)
        if holder is not None:
            if holder.num_in_flight < most:
                self.num_affine += 1
                chosen = holder
        elif agreed is not None:
            able = [
                one for one in replicas if one.takes_requests() and one not in excluded and one.num_in_flight < most
            ]
            chosen = max(able, key=lambda one: _score(agreed, one), default=chosen)
        return chosen

    def remember(self, replica: Replica, hashes: Sequence[bytes], session: bytes | None = None) -> None:
        """Note that a replica has these prefixes and the session from now on."""
        if session is not None:
            self._holders[session] = [replica]
            self._holders.move_to_end(session)
        for one in hashes:
            holders = self._holders.setdefault(one, [])
            self._holders.move_to_end(one)
            if replica not in holders:
                holders.append(replica)
        while len(self._holders) > MAX_HASHES:
            self._holders.popitem(last=False)

    def forget(self, replica: Replica) -> None:
        """Forget a replica that has ended, and all that it held."""
        for one in [one for one, holders in self._holders.items() if replica in holders]:
            self._holders[one].remove(replica)
            if not self._holders[one]:
                del self._holders[one]

    def _less_loaded(self, replicas: Sequence[Replica], excluded: Collection[Replica]) -> Replica | None:
        if len(replicas) > 2:
            for _ in range(_NUM_DRAWS):
                pair = [one for one in self._random.sample(replicas, 2) if one.takes_requests() and one not in excluded]
                if len(pair) == 2:
                    return min(pair, key=lambda one: one.num_in_flight)
        able = [one for one in replicas if one.takes_requests() and one not in excluded]
        if not able:
            return None
        least = min(one.num_in_flight for one in able)
        return self._random.choice([one for one in able if one.num_in_flight == least])

    def _holder(
        self, replicas: Sequence[Replica], hashes: Sequence[bytes], excluded: Collection[Replica]
    ) -> Replica | None:
        for one in reversed(hashes):
            able = [held for held in self._holders.get(one, ()) if held.takes_requests() and held not in excluded]
            if able:
                return min(able, key=lambda held: held.num_in_flight)
        return None


def _most_in_flight(replicas: Sequence[Replica]) -> float:
    """Return how many requests a replica may have, a new one included, before affinity gives way."""
    total = 1 + sum(one.num_in_flight for one in replicas)
    return int(SLACK + LOAD_FACTOR * total / len(replicas))


def _score(key: bytes, replica: Replica) -> bytes:
    """Rendezvous hashing (Thaler, Ravishankar 1998): the replica with the highest score gets the key, and if it leaves,
    only its keys move."""
    return hashlib.blake2b(key + b"\0" + replica.name.encode(), digest_size=8).digest()


class CreatedIds:
    """Which model's replica keeps a response, a conversation, a stored chat, a file or a batch, and for whose key. The
    oldest are forgotten first."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, tuple[str, Replica, str | None]] = OrderedDict()

    def add(self, created: str, model: str, replica: Replica, owner: str | None = None) -> None:
        self._homes[created] = model, replica, owner
        self._homes.move_to_end(created)
        if len(self._homes) > MAX_IDS:
            self._homes.popitem(last=False)

    def find(self, created: str) -> tuple[str, Replica, str | None] | None:
        return self._homes.get(created)
