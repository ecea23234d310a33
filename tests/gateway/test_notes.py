"""What servers tell gateways: the prompts that they were given, and their adapters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from octavo.engine.prompt_notes import PromptNotes
from octavo.gateway.catalogue import Catalogue, ModelEntry
from octavo.gateway.proxy_request import PROMPT_NAMES
from octavo.gateway.request_body import read_body
from tests.gateway.fakes import Asked, FakeServer, Gateway, answer_plainly, fake_servers, gateway, until
from tests.waiting import Clock


@contextlib.asynccontextmanager
async def octavo_servers(
    count: int, *, has_notes: bool = True
) -> AsyncIterator[tuple[list[FakeServer], dict[str, Any]]]:
    """Servers that take notes, and the entry of a model there."""
    async with fake_servers(*[answer_plainly] * count) as servers:
        for one in servers:
            one.notes = PromptNotes() if has_notes else None
        yield servers, {"addresses": [one.address for one in servers]}


async def places(gate: Gateway, servers: list[FakeServer], turns: int) -> list[int]:
    """Return where 16 conversations go after so many turns."""
    found = []
    for number in range(16):
        before = [len(one.asked) for one in servers]
        messages = [{"role": "user", "content": f"{number} {turn} " + "x" * 900} for turn in range(turns)]
        assert (await gate.ask(messages=messages)).status_code == 200
        found += [i for i, one in enumerate(servers) if len(one.asked) > before[i]]
    return found


def test_conversations_stay_where_they_are_when_a_gateway_starts_again(clock: Clock) -> None:
    async def run() -> None:
        async with octavo_servers(4) as (servers, entry):
            async with gateway({"a": entry}) as gate:
                first = await places(gate, servers, 1)
            assert len(set(first)) == 4
            async with gateway({"a": entry}) as gate:
                assert await places(gate, servers, 2) == first

    clock.run(run())


def test_gateways_learn_from_each_other_while_they_run(clock: Clock) -> None:
    async def run() -> None:
        async with octavo_servers(4) as (servers, entry), gateway({"a": entry}) as one, gateway({"a": entry}) as other:
            first = await places(one, servers, 1)
            seen = other.deployment("a").router._holders
            await until(lambda: len(seen) == 16)
            assert await places(other, servers, 2) == first

    clock.run(run())


def test_a_server_is_read_once_for_all_its_models_and_anew_for_a_new_one(clock: Clock) -> None:
    async def run() -> None:
        async with octavo_servers(2) as (servers, entry):
            async with gateway({"a": entry, "b": entry, "c": entry}) as gate:
                assert [one.num_notes_read for one in servers] == [1, 1]
                await gate.ask("b", messages=[{"role": "user", "content": "x"}])
            async with gateway({"a": entry, "b": entry}) as gate:
                assert [one.num_notes_read for one in servers] == [2, 2]
                known = {name: len(gate.deployment(name).router._holders) for name in "ab"}
                assert known == {"a": 0, "b": 1}
                catalogue = {name: msgspec.convert(entry, ModelEntry) for name in ("a", "b", "c")}
                catalogue["d"] = msgspec.structs.replace(catalogue["b"], served_model_name="b")
                gate.server.models.apply(Catalogue(catalogue))
                await gate.server.models.read_notes(1)
                assert len(gate.deployment("d").router._holders) == 1
                before = [one.num_notes_read for one in servers]
                await gate.server.models.read_notes(1)
                assert [one.num_notes_read for one in servers] == [one + 1 for one in before]

    clock.run(run())


def test_clients_neither_write_nor_read_notes(clock: Clock) -> None:
    async def run() -> None:
        async with octavo_servers(2) as (servers, entry), gateway({"a": entry}) as gate:
            await gate.http.post("/v1/embeddings", json={"model": "a"}, headers={PROMPT_NAMES.decode(): "ab"})
            assert [one.notes.read("", 0)["prompts"] for one in servers if one.notes is not None] == [[], []]
            for path in ("/v1/routing_notes", "/v1/routing%5Fnotes?id=&after=0", "/x/../v1//routing_notes"):
                answer = await gate.http.get(path, headers={"x-octavo-model": "a"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")

    clock.run(run())


def test_servers_without_notes_are_not_asked_again_and_get_no_names(clock: Clock) -> None:
    async def run() -> None:
        async with octavo_servers(2, has_notes=False) as (servers, entry), gateway({"a": entry}) as gate:
            assert [one.has_notes for one in gate.deployment("a").replicas] == [False, False]
            await gate.ask(messages=[{"role": "user", "content": "x"}])
            ((asked,),) = [one.asked for one in servers if one.asked]
            assert PROMPT_NAMES.decode() not in asked.headers

    clock.run(run())


def test_adapters_of_octavo_and_of_other_servers_have_places(clock: Clock) -> None:
    async def lists_models(asked: Asked) -> None:
        cards = [{"id": "base"}, {"id": "b", "parent": "base"}, {"id": "c", "parent": "base"}]
        asked.reply(json.dumps({"data": cards}).encode())

    async def run() -> None:
        async with octavo_servers(2) as (servers, entry), fake_servers(*[lists_models] * 2) as foreign:
            for one in servers:
                one.adapters = {"b": False, "c": False}
            for each, at in ((servers, entry), (foreign, {"addresses": [one.address for one in foreign]})):
                async with gateway({"base": at, "b": at, "c": at}) as gate:
                    routers = [gate.deployment(name).router for name in ("base", "b", "c")]
                    assert [one.is_for_adapter for one in routers] == [False, True, True]
                    for number in range(12):
                        await gate.ask("bc"[number % 2], messages=[{"role": "user", "content": str(number)}])
                models = [{one.json["model"] for one in server.asked if one.method == "POST"} for server in each]
                assert sorted(map(sorted, models)) == [["b"], ["c"]]

    clock.run(run())


def test_a_conversation_stays_only_where_the_cache_still_has_it(clock: Clock) -> None:
    async def run() -> None:
        async with octavo_servers(2) as (servers, entry):
            for one in servers:
                one.cache_tokens = 1000
            async with gateway({"a": entry}) as gate:
                deployment = gate.deployment("a")

                def num_known(name: str) -> int:
                    prefixes, _ = read_body(asked[name], "application/json").prefixes
                    return int(deployment.router.num_known_bytes(prefixes))

                asked: dict[str, bytes] = {}

                async def ask(name: str) -> None:
                    answer = await gate.ask("a", messages=[{"role": "user", "content": name * 1500}])
                    asked[name] = answer.request.content

                for name in "abcd":  # a cache has two of these
                    await ask(name)
                assert all(num_known(name) > 1500 for name in "abcd")
                for name in "efgh":
                    await ask(name)
                assert not any(num_known(name) for name in "abcd")
                assert all(num_known(name) > 1500 for name in "efgh")

    clock.run(run())
