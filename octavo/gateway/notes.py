"""Notes that Octavo's servers keep for gateways: the names of prompts that gateways gave them, and which adapters are
on their devices. `octavo.engine.prompt_notes` is the servers' side."""

import asyncio
import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from octavo.gateway.deployment import Deployment
from octavo.gateway.replica import Replica
from octavo.gateway.replica_router import Prompt, ReplicaRouter
from octavo.gateway.request_body import BYTES_PER_TOKEN

_MAX_READINGS = 64  # of a server's notes, one after the other
_SESSION = "session-"  # before a session's hash
_WRITTEN = re.compile(rf"([0-9a-f]{{16}})((?:,[0-9a-f]{{32}})*)(?:,{_SESSION}([0-9a-f]{{32}}))?")


def written_names(model: str, prefixes: Mapping[bytes, int], session: bytes | None) -> bytes:
    """Return the names of a prompt's beginnings for the replica, which tells other gateways: of the shortest, the last
    three, and between them ever fewer. `model` is the replica's name for it. `read_names` reads them."""
    every = list(prefixes)
    places = {0, len(every) - 3, *(len(every) - (1 << power) for power in range(len(every).bit_length()))}
    names = [every[place].hex() for place in sorted(places) if 0 <= place < len(every)]
    names += [] if session is None else [_SESSION + session.hex()]
    return ",".join([tag(model), *names]).encode() if names else b""


def read_names(written: str) -> tuple[str, Prompt]:
    """Return the tag of a prompt's model, its prefixes and its session. A note in another form than `written_names`
    gives it says nothing: its tag is empty."""
    if (found := _WRITTEN.fullmatch(written)) is None:
        return "", ([], None)
    model, prefixes, session = found.groups()
    hashes = [bytes.fromhex(one) for one in prefixes.split(",")[1:]]
    return model, (hashes, None if session is None else bytes.fromhex(session))


@functools.lru_cache(maxsize=4096)
def tag(model: str) -> str:
    """Return what stands for a model's name among its prompts' names."""
    return hashlib.blake2b(model.encode(), digest_size=8).hexdigest()


async def read_notes(models: Iterable[Deployment], timeout_s: float) -> None:
    """Read the notes of all servers, and tell the models' routers. A server is read once for all models with its
    address."""
    servers = defaultdict[tuple[object, ...], list[tuple[ReplicaRouter, Replica]]](list)
    for model in models:
        if not model.entry.may_be_several:
            continue
        for one in model.replicas:
            if not one.checks.problem and one.has_notes is not False:
                same = model.router.load, one.name, one.api_key, one.notes_at, one.has_notes
                servers[same].append((model.router, one))
    await asyncio.gather(*(_read(readers, timeout_s) for readers in servers.values()))


async def _read(readers: list[tuple[ReplicaRouter, Replica]], timeout_s: float) -> None:
    """Read the notes of one server."""
    first, was_asked = readers[0][1], readers[0][1].has_notes is not None
    for _ in range(_MAX_READINGS):
        if (notes := await first.read_notes(timeout_s)) is None:
            break
        prompts = defaultdict[str, list[Prompt]](list)
        for written in notes.prompts:
            model, prompt = read_names(written)
            prompts[model].append(prompt)
        for router, replica in readers:
            name = replica.served_name
            router.learn(replica, prompts.get(tag(name), ()), notes.adapters.get(name))
            if notes.cache_tokens > 0:
                router.set_cache_bytes(replica, BYTES_PER_TOKEN * notes.cache_tokens)
        if not notes.has_more:
            break
    for _, replica in readers:
        replica.has_notes, replica.notes_at = first.has_notes, first.notes_at
    if len(readers) > 1 and not was_asked and first.has_notes is False:  # a foreign server with several models
        adapters = {one.id for one in await first.listed(timeout_s) if one.parent is not None}
        for router, replica in readers:
            router.is_for_adapter |= replica.served_name in adapters
