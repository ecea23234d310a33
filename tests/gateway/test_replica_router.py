"""The router chooses a replica for a request."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.gateway import replica_router as router_module
from octavo.gateway.breaker import FAILURES_TO_OPEN
from octavo.gateway.notes import read_names, tag, written_names
from octavo.gateway.replica import FAILED_CHECKS, Replica
from octavo.gateway.replica_router import Load, ReplicaRouter
from octavo.gateway.upstream import Upstream


def replicas(count: int, model: str = "m") -> list[Replica]:
    return [Replica(str(i), Upstream(f"http://127.0.0.1:{i + 1}", timeout_s=1), model) for i in range(count)]


def test_without_a_prefix_load_is_even() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(8)
    for _ in range(800):
        chosen = router.choose(fleet, {})
        assert chosen is not None
        router.begin(chosen)
    loads = [one.num_in_flight for one in fleet]
    assert max(loads) <= 1.1 * 100 and min(loads) >= 0.9 * 100


def test_the_longest_prefix_wins() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(8)
    router.remember(fleet[2], [b"1"])
    router.remember(fleet[5], [b"1", b"2"])
    assert router.choose(fleet, {b"1": 9_000, b"2": 20_000, b"3": 21_000}) is fleet[5]
    assert router.choose(fleet, {b"1": 9_000, b"x": 9_900}) in (fleet[2], fleet[5])
    assert router.num_affine == 2


def test_a_session_goes_where_its_last_request_went() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(8)
    router.remember(fleet[2], [b"1", b"2"], b"session a")
    router.remember(fleet[5], [b"3"], b"session a")
    assert router.choose(fleet, {b"1": 9_000, b"2": 20_000}, session=b"session a") is fleet[5]
    assert router.choose(fleet, {b"1": 9_000, b"2": 20_000}, session=b"session b") is fleet[2]
    assert router.choose(fleet, {b"1": 9_000, b"2": 20_000}, [fleet[5]], b"session a") is fleet[2]
    router.load.num_in_flight["5"] = 100
    assert router.choose(fleet, {}, session=b"session a") is not fleet[5]
    router.forget(fleet[5])
    assert router.choose(fleet, {b"3": 9_000}, [fleet[2]], b"session a") is not None


def test_several_gateways_agree_and_a_replica_that_leaves_moves_only_its_share() -> None:
    fleet, keys = replicas(8), [str(i).encode() for i in range(2000)]
    first = [ReplicaRouter(random.Random(1)).choose(fleet, {}, placement_hash=key) for key in keys]
    # Another gateway lists the replicas in another order, and its connections are its own.
    other = [ReplicaRouter(random.Random(2)).choose(replicas(8)[::-1], {}, placement_hash=key) for key in keys]
    names = [one.name for one in first if one is not None]
    assert names == [one.name for one in other if one is not None]
    assert all(200 < count < 300 for count in Counter(names).values())
    fewer = [ReplicaRouter(random.Random(3)).choose(fleet[1:], {}, placement_hash=key) for key in keys]
    assert all(one is before for one, before in zip(fewer, first, strict=True) if before is not fleet[0])


def test_load_and_known_prefixes_count_more_than_the_replica_that_gateways_agree_on() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(4)
    for number in range(400):
        chosen = router.choose(fleet, {}, placement_hash=b"the same" if number % 2 else str(number).encode())
        assert chosen is not None
        router.begin(chosen)
    assert max(one.num_in_flight for one in fleet) <= 1.25 * 100 + 3
    router, fleet = ReplicaRouter(random.Random(1)), replicas(4)
    router.remember(fleet[2], [b"1"])
    assert {router.choose(fleet, {b"1": 9_000}, placement_hash=str(i).encode()) for i in range(20)} == {fleet[2]}
    for one in fleet[1:]:
        one.checks.num_failed = FAILED_CHECKS
    assert router.choose(fleet, {}, placement_hash=b"x") is fleet[0]


def test_load_corrects_affinity() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(4)
    router.remember(fleet[0], [b"1"])
    for _ in range(400):
        chosen = router.choose(fleet, {b"1": 9_000})
        assert chosen is not None
        router.remember(chosen, [b"1"])
        router.begin(chosen)
    assert max(one.num_in_flight for one in fleet) <= 1.3 * 100


@given(st.lists(st.sampled_from(["fine", "sick", "broken", "tried"]), min_size=1, max_size=9), st.integers(0, 99))
def test_only_replicas_that_take_requests_are_chosen(states: list[str], seed: int) -> None:
    router, fleet = ReplicaRouter(random.Random(seed)), replicas(len(states))
    for one, state in zip(fleet, states, strict=True):
        one.checks.num_failed = FAILED_CHECKS if state == "sick" else FAILED_CHECKS - 1
        if state == "broken":
            one.breaker.num_failures, one.breaker.open_until = FAILURES_TO_OPEN, math.inf
        router.remember(one, [b"1"])
    tried = {one for one, state in zip(fleet, states, strict=True) if state == "tried"}
    for prefixes in ({}, {b"1": 9_000}):
        chosen = router.choose(fleet, prefixes, tried)
        assert (chosen is None) == ("fine" not in states)
        assert chosen is None or states[fleet.index(chosen)] == "fine"


def test_a_replica_that_has_ended_is_forgotten() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(3)
    router.remember(fleet[0], [b"1", b"2"])
    router.remember(fleet[1], [b"1"])
    router.forget(fleet[0])
    assert router._holders == {b"1": [fleet[1]]}
    assert router.choose(fleet[1:], {b"1": 9_000, b"2": 20_000}) is fleet[1]


def test_memory_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(router_module, "MAX_HASHES", 10)
    router, (one,) = ReplicaRouter(), replicas(1)
    for number in range(100):
        router.remember(one, [b"%d" % number])
    assert len(router._holders) == 10


def test_conversations_begin_where_least_was_to_do_and_stay() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(2)
    document = router.choose(fleet, {b"document": 50_000})
    assert document is not None
    other = fleet[1 - fleet.index(document)]
    for number in range(9):
        assert router.choose(fleet, {b"%d" % number: 1_000}) is other
        assert router.choose(fleet, {b"document": 50_000, b"question %d" % number: 50_200}) is document


def test_a_replica_that_is_new_gets_its_share_and_no_more(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(router_module, "_MAX_UNIT", 1.5)  # units begin anew now and then
    router, fleet = ReplicaRouter(random.Random(1)), replicas(4)
    for number in range(1000):
        assert router.choose(fleet[:3], {b"%d" % number: 1_000}) is not fleet[3]
    later = Counter(router.choose(fleet, {b"later %d" % number: 1_000}) for number in range(100))
    assert all(20 <= later[one] <= 30 for one in fleet)


def test_replicas_that_are_away_do_not_lower_the_bound_of_the_others() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(4)
    router.remember(fleet[0], [b"1"])
    for one in fleet[2:]:
        one.checks.num_failed = FAILED_CHECKS
    for one in fleet[:2]:
        router.load.num_in_flight[one.name] = 10
    assert [router.choose(fleet, {b"1": 9_000}) for _ in range(5)] == [fleet[0]] * 5


def test_a_replica_that_comes_back_gets_its_part_and_no_more() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(4)
    fleet[0].checks.num_failed = FAILED_CHECKS
    for number in range(2000):
        router.choose(fleet, {str(number).encode(): 9_000})
    fleet[0].checks.num_failed = 0
    counts = Counter(router.choose(fleet, {f"x{number}".encode(): 9_000}) for number in range(400))
    assert 80 < counts[fleet[0]] < 120


def test_replicas_that_join_a_large_fleet_get_requests() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(100)
    for number in range(2000):
        router.choose(fleet[:80], {str(number).encode(): 9_000})
    counts = Counter(router.choose(fleet, {f"x{number}".encode(): 9_000}) for number in range(5000))
    assert all(30 < counts[one] < 80 for one in fleet)


def test_a_replica_that_was_only_looked_at_is_still_to_be_counted() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(2)
    router.choose(fleet[:1], {b"x": 9_000})
    assert router._given(fleet[1]) == router._given(fleet[0]) > 0
    assert list(router.load.given) == [fleet[0].name]


def test_a_prefix_remembers_its_latest_holders() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(20)
    for one in fleet:
        router.remember(one, [b"instructions"])
    router.remember(fleet[3], [b"instructions"])
    found = {router.choose(fleet, {b"instructions": 900_000}) for _ in range(100)}
    assert found <= {fleet[3], *fleet[13:]}


def test_several_gateways_leave_a_conversation_where_it_is() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(4)
    for number in range(400):
        router.choose(fleet, {str(number).encode(): 50_000})
    for number in range(100):
        router.choose(fleet, {f"x{number}".encode(): 50_000}, excluded=fleet[:2] + fleet[3:])
    router.remember(fleet[2], [b"short", b"brief"])
    assert router.choose(fleet, {b"brief": 100}) is not fleet[2]
    assert router.choose(fleet, {b"short": 100}, placement_hash=b"x") is fleet[2]


def test_a_gateway_learns_from_a_server_what_another_one_gave_it() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(8)
    turns, session = {bytes([number]) * 16: 9_000 * number for number in range(1, 30)}, b"session a".ljust(16)
    every = [read_names(one)[1] for one in (written_names("m", turns, session).decode(), "no names", "ab,x", "")]
    router.learn(fleet[5], every, None)
    assert router.choose(fleet, {**turns, b"next": 300_000}) is fleet[5]
    assert router.choose(fleet, {}, session=session) is fleet[5]
    router.remember(fleet[2], [], session)
    router.learn(fleet[5], every, None)
    assert router.choose(fleet, {}, session=session) is fleet[2], "its own history is newer"


@pytest.mark.parametrize(
    "names",
    [
        ",",
        ", ",
        f",{b'adapter'.hex()}",
        f",{'0' * 32},zz,{'1' * 32}",
        f",{'0' * 30}é",
        f",{'0' * 32}\n",
        f",session-{'0' * 30}",
        ",session-",
        f",session-{'0' * 32},{'1' * 32}",
    ],
)
def test_a_note_in_another_form_says_nothing(names: str) -> None:
    assert read_names(tag("m") + names) == ("", ([], None))


def test_requests_without_a_session_have_no_place_that_notes_can_name() -> None:
    router, fleet = ReplicaRouter(random.Random(1)), replicas(8)
    router.learn(fleet[3], [([b""], b"")], None)
    counts = Counter(router.choose(fleet, {str(number).encode(): 9_000}) for number in range(400))
    assert set(counts.values()) == {50}


def test_a_replica_without_requests_leaves_no_count() -> None:
    router, (replica,) = ReplicaRouter(), replicas(1)
    for _ in range(2):
        router.begin(replica)
    router.end(replica)
    assert router.load.num_in_flight == {replica.name: 1}
    router.end(replica)
    assert replica.name not in router.load.num_in_flight


@given(st.integers(0, 1024), st.booleans())
def test_names_have_a_prompts_ends_and_few_of_its_many_beginnings(count: int, has_session: bool) -> None:
    every = [number.to_bytes(16) for number in range(count)]
    session = b"s" * 16 if has_session else None
    written = written_names("m", dict.fromkeys(every, 0), session).decode()
    if not written:
        return
    model, (names, said) = read_names(written)
    assert model == tag("m")
    assert said == session
    assert names == sorted({*names}) and set(names) >= {*every[:1], *every[-3:]} and len(names) <= 13


def test_prefixes_that_a_cache_evicts_are_forgotten_and_the_end_of_a_conversation_first() -> None:
    router, (replica, other) = ReplicaRouter(), replicas(2)
    first, second = {b"a": 1_000, b"b": 6_000}, {b"c": 5_000}

    def give(prefixes: dict[bytes, int]) -> None:
        assert router.choose([replica, other], prefixes, {other}) is replica

    for num_bytes, num_known in ((11_000, 6_000), (10_000, 1_000), (5_000, 0)):
        router.forget(replica)
        router.set_cache_bytes(replica, num_bytes)
        give(first)
        give(second)
        assert router.num_known_bytes(first) == num_known and router.num_known_bytes(second) == 5_000
    router.set_cache_bytes(replica, 11_000)
    give(first)
    give({b"d": 4_000})
    assert router.num_known_bytes(first) == 6_000 and not router.num_known_bytes(second), "it was used before first"
    give({b"e": 99_000})
    assert router.num_known_bytes({b"e": 99_000}) == 99_000 and not router.num_known_bytes(first)
    router.set_cache_bytes(other, 10)
    assert router.choose([replica, other], {b"x": 5, b"y": 9}, {replica}) is other
    assert router.num_known_bytes({b"x": 5, b"y": 9}) == 9


def test_notes_of_prompts_that_have_been_evicted_since_bring_nothing_back() -> None:
    router, (replica,) = ReplicaRouter(), replicas(1)
    router.set_cache_bytes(replica, 2_000)
    for name in (b"a", b"b", b"a", b"c"):
        router.choose([replica], {name: 1_000})
    router.learn(replica, [([b"a"], None), ([b"b"], None), ([b"of another gateway"], None)], None)
    assert [router.num_known_bytes({name: 1_000}) for name in (b"a", b"b", b"c")] == [1_000, 0, 1_000]
    assert router.num_known_bytes({b"of another gateway": 1_000}) == 1_000
    router.learn(replica, [([b"b"], None)], None)
    assert router.num_known_bytes({b"b": 1_000}) == 1_000, "another gateway has sent it again"


def test_models_of_one_server_share_its_cache() -> None:
    load = Load()
    routers, (replica,) = [ReplicaRouter(load=load) for _ in range(2)], replicas(1)
    for router in routers:
        router.set_cache_bytes(replica, 3_000)
    text = {b"a": 1_000}
    for router, prefixes in ((routers[0], text), (routers[0], {b"b": 1_000}), (routers[1], text)):
        router.choose([replica], prefixes)
    assert [router.num_known_bytes(text) for router in routers] == [1_000, 1_000], "each model has its own blocks"
    routers[1].choose([replica], {b"c": 1_000})
    assert [router.num_known_bytes(text) for router in routers] == [0, 1_000]
    assert routers[0].num_known_bytes({b"b": 1_000}) == 1_000
    for router in routers:
        router.learn(replica, [([b"a"], None)], None)
    assert [router.num_known_bytes(text) for router in routers] == [0, 1_000], "evicted since"


def test_prefixes_that_the_router_forgets_take_no_room_in_a_replicas_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_HASHES", 3)
    router, (replica,) = ReplicaRouter(), replicas(1)
    router.set_cache_bytes(replica, 1e9)
    for number in range(50):
        router.choose([replica], {b"%d" % number: 1_000})
    cache = router.load.caches[replica.name]
    assert cache._num_bytes == 3_000 and len(cache._kept) == 3


def adapters_of_a_fleet(names: str, count: int) -> dict[str, tuple[ReplicaRouter, list[Replica]]]:
    """A router and replicas for each adapter of so many servers."""
    load = Load()
    found = {name: (ReplicaRouter(random.Random(1), load), replicas(count, name)) for name in names}
    for router, fleet in found.values():
        for one in fleet:
            router.learn(one, [], False)
    return found


def test_adapters_spread_over_servers_and_stay_there() -> None:
    fleets, places = adapters_of_a_fleet("abcdefgh", 4), Counter[tuple[str, str]]()
    for number in range(400):
        name = "abcdefgh"[number * 7 % 8]
        router, fleet = fleets[name]
        chosen = router.choose(fleet, {b"%d" % number: 1_000})
        assert chosen is not None
        places[name, chosen.name] += 1
    assert set(places.values()) == {50}, "no adapter is in two places"
    assert Counter(server for _, server in places) == {"0": 2, "1": 2, "2": 2, "3": 2}


def test_an_adapter_gets_a_second_server_when_the_first_is_busy_with_any_model() -> None:
    fleets = adapters_of_a_fleet("ab", 2)
    (router, fleet), (other, others) = fleets.values()
    first = router.choose(fleet, {})
    assert first is not None
    for _ in range(8):
        other.begin(others[fleet.index(first)])
    second = router.choose(fleet, {})
    assert second is not None and second is not first


def test_a_server_says_where_an_adapter_is() -> None:
    ((router, fleet),) = adapters_of_a_fleet("a", 3).values()
    router.learn(fleet[2], [], True)
    assert {router.choose(fleet, {b"%d" % number: 500}) for number in range(9)} == {fleet[2]}
    router.learn(fleet[2], [], False)
    assert router.choose(fleet, {b"x": 500}) is fleet[2], "it is as good as any other, and has its conversations"
    router.learn(fleet[1], [], True)
    router.learn(fleet[2], [], False)
    assert router.choose(fleet, {b"y": 500}) is fleet[1]


def test_several_gateways_agree_about_adapters() -> None:
    chosen = set()
    for number in range(8):
        ((router, fleet),) = adapters_of_a_fleet("a", 4).values()
        one = router.choose(fleet, {b"%d" % number: 500}, placement_hash=b"%d" % number)
        assert one is not None
        chosen.add(one.name)
    assert len(chosen) == 1


def test_a_server_that_is_away_for_one_model_gets_its_part_of_the_work_and_no_more() -> None:
    load, counts = Load(), Counter[str]()
    models = [(ReplicaRouter(random.Random(1), load), replicas(8, name)) for name in "ab"]
    models[0][1][0].checks.num_failed = FAILED_CHECKS
    for number in range(400):
        for router, fleet in models:
            chosen = router.choose(fleet, {b"%d" % number: 9_000})
            assert chosen is not None
            counts[chosen.name] += 1
    assert all(90 < count < 110 for count in counts.values()), counts
