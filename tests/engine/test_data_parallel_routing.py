"""Requests go where their prefix is, unless that replica has more to do than the prefix saves."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks.routing import PATTERNS, compare
from octavo.engine.data_parallel_routing import PrefixIndex, Router, block_hashes
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams

SIZE = 4


def request(name: str, tokens: list[int], max_tokens: int = 1, **prompt: Any) -> EngineRequest:
    return EngineRequest(name, Prompt(tokens, **prompt), SamplingParams(), [0], max_tokens, 0.0)


def route(router: Router, one: EngineRequest, available: Iterable[int]) -> int:
    return router.route(one, block_hashes(one, SIZE), available)


def test_a_prefix_attracts_its_own_kind_only_and_less_than_a_load_repels() -> None:
    router = Router(2, SIZE, 100)
    assert route(router, request("a", list(range(40))), [0, 1]) == 0
    router.end("a", list(range(40, 49)))
    assert route(router, request("b", list(range(48))), [0, 1]) == 0  # prompt and answer are known there
    assert router.load(0) == 1 + 1
    router.end("b", [])
    assert route(router, request("salted", list(range(48)), cache_salt="s"), [0, 1]) == 1
    router.end("salted", [])
    route(router, request("long", [7] * 80, max_tokens=60), [0])
    assert route(router, request("c", list(range(48))), [0, 1]) == 1
    assert route(router, request("d", [9]), [0]) == 0
    with pytest.raises(ValueError, match="empty"):
        route(router, request("e", [9]), [])


def test_a_prefix_attracts_while_its_first_request_is_computed() -> None:
    router = Router(2, SIZE, 100)
    assert [route(router, request(name, list(range(40))), [0, 1]) for name in ("a", "b")] == [0, 0]


def test_a_session_stays_where_it_was_unless_the_load_repels_it() -> None:
    router = Router(2, SIZE, 100)
    homes = {"a": 0, "b": 1}
    for name, home in homes.items():
        one = request(name, [home] * 40)
        one.session_id = name
        assert route(router, one, [0, 1]) == home
        router.end(name, [])
    again = request("again", [7] * 40)  # the history was rewritten: nothing of it is known
    again.session_id = "b"
    assert route(router, again, [0, 1]) == 1
    router.end("again", [])
    route(router, request("long", [8] * 400), [1])
    later = request("later", [9] * 40)
    later.session_id = "b"
    assert route(router, later, [0, 1]) == 0
    router.forget(0)
    new = request("new", [9] * 40)
    new.session_id = "a"
    assert route(router, new, [1]) == 1


def test_a_dead_replica_has_neither_load_nor_prefixes() -> None:
    router = Router(2, SIZE, 100)
    route(router, request("a", list(range(40))), [1])
    router.forget(1)
    router.end("a", [1, 2, 3])
    assert [router.load(0), router.load(1)] == [0, 0]
    route(router, request("b", list(range(40))), [1])
    assert router.load(1) == 40 + 1


def test_a_replica_that_comes_back_gets_its_share_and_not_all_that_is_new() -> None:
    router = Router(3, SIZE, 1000)
    streams = (request(str(i), [i] * 40, max_tokens=100) for i in range(1000))
    for _ in range(30):
        route(router, next(streams), range(3))
    router.forget(1)
    for _ in range(90):
        route(router, next(streams), (0, 2))
    given = [route(router, next(streams), range(3)) for _ in range(30)]
    assert set(given[:5]) == {0, 1, 2}
    assert max(given.count(i) for i in range(3)) <= 20


def test_an_index_is_bounded_and_forgets_the_ends_of_old_prefixes_first() -> None:
    index = PrefixIndex(3)
    index.add([b"a", b"b", b"c"])
    index.add([b"x"])
    assert (len(index), index.num_found([b"a", b"b", b"c"]), index.num_found([b"x"])) == (3, 2, 1)


def test_random_loads_are_even() -> None:
    router, rng = Router(4, SIZE, 1000), random.Random(0)
    for i in range(400):
        tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 100))]
        route(router, request(str(i), tokens, rng.randint(1, 100)), range(4))
    loads = [router.load(i) for i in range(4)]
    assert max(loads) < 1.2 * sum(loads) / 4


def test_answers_count_as_long_as_they_have_been_and_not_as_long_as_they_may_be() -> None:
    router = Router(1, SIZE, 100)
    for i in range(200):
        route(router, request(str(i), [i], max_tokens=100_000), [0])
        router.end(str(i), [1] * 10)
    route(router, request("last", [0], max_tokens=100_000), [0])
    assert router.load(0) == 1 + 10
    route(router, request("short", [0], max_tokens=3), [0])
    assert router.load(0) == 1 + 10 + 1 + 3


def test_conversations_find_their_prefixes_again_and_replicas_work_alike() -> None:
    hits, figures = compare(4, PATTERNS["chat"], seed=0)
    assert hits >= 0.95
    assert figures.largest_share < 1.2
