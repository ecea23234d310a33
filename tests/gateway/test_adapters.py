"""Adapters of models that the gateway starts: names of their own at the base's servers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.gateway.catalogue import ModelEntry, read_catalogue
from tests.gateway.fakes import Asked, FakeLaunch, FakeServer, fake_servers, gateway, until
from tests.waiting import Clock

PIRATE = {"adapter_of": "base", "model": "org/pirate", "aliases": ["p"]}


class Launch(FakeLaunch):
    """Also keeps the words with which each server was started."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.words: list[list[str]] = []

    async def __call__(self, name: str, entry: ModelEntry) -> FakeServer:
        self.words.append(entry.flag_words())
        return await super().__call__(name, entry)


def test_an_adapter_is_a_model_at_its_bases_server(clock: Clock) -> None:
    async def run() -> None:
        launch = Launch()
        async with gateway(
            {"pirate": PIRATE, "base": {"flags": {"max-lora-rank": 8}, "aliases": ["b"]}}, launch
        ) as gate:
            assert gate.deployment("p").state == "stopped"
            for model in ("p", "pirate", "b"):
                assert (await gate.ask(model)).status_code == 200
            assert launch.begun == ["base"]
            module = json.dumps({"name": "pirate", "path": "org/pirate"})
            assert launch.words == [["--max-lora-rank=8", "--enable-lora", f"--lora-modules={module}"]]
            assert [asked.json["model"] for asked in launch.last("base").asked] == ["pirate", "pirate", "base"]
            cards = (await gate.http.get("/v1/models")).json()["data"]
            assert [(one["id"], one["root"], one["parent"], one["state"]) for one in cards] == [
                ("pirate", "pirate", "base", "ready"), ("base", "base", None, "ready"),
                ("p", "pirate", "base", "ready"), ("b", "base", None, "ready"),
            ]  # fmt: skip
            for model, number in (("pirate", 2), ("base", 1)):
                labels = f'model="{model}",replica="0",status="200"'
                assert await gate.metric(f"octavo_gateway_requests_total{{{labels}}}") == number
            loaded = (await gate.http.get("/api/ps")).json()["models"]
            assert [one["name"] for one in loaded] == ["pirate", "base"]
            stop = {"model": "pirate", "keep_alive": 0}
            assert (await gate.http.post("/api/generate", json=stop)).json()["done_reason"] == "unload"
            await until(lambda: gate.deployment("base").state == gate.deployment("pirate").state == "stopped")

    clock.run(run())


def test_an_adapters_request_starts_its_base_again_after_a_crash_and_fails_with_its_error(clock: Clock) -> None:
    async def die_at_first(asked: Asked) -> None:
        if len(launch.servers["base"]) == 1:
            launch.last("base").die()
        else:
            asked.reply(b"{}")

    launch = Launch(die_at_first)

    async def run() -> None:
        async with gateway({"pirate": PIRATE, "base": {}}, launch) as gate:
            assert (await gate.ask("pirate")).status_code == 200
            assert launch.begun == ["base"] * 2 and not gate.deployment("pirate").router._holders.keys() - {b"adapter"}
            launch.error, launch.may_pass = "octavo: error: --lora-modules pirate: no adapter", False
            launch.last("base").die()
            answer = await gate.ask("pirate")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "start_failed")
            assert "--lora-modules pirate: no adapter" in answer.text

    clock.run(run())


def test_adapters_of_several_replicas_have_places(clock: Clock) -> None:
    entries = {name: {"adapter_of": "base", "model": f"org/{name}"} for name in ("b", "c")}

    async def run() -> None:
        async with gateway({"base": {"replicas": 2}, **entries}) as gate:
            for number in range(12):
                await gate.ask("bc"[number % 2], messages=[{"role": "user", "content": str(number)}])
            places = [Counter(one.json["model"] for one in server.asked) for server in gate.launch.servers["base"]]
            assert sorted(map(dict, places), key=str) == [{"b": 6}, {"c": 6}]  # type: ignore[call-overload]
            gate.launch.servers["base"][0].die()
            await until(lambda: gate.launch.running("base") == 2 and len(gate.deployment("b").replicas) == 2)
            for name in ("b", "c", "base"):
                assert (await gate.ask(name)).status_code == 200
            text = (await gate.http.get("/metrics")).text
            for name in ("b", "c", "base"):
                for replica in "01":
                    assert f'octavo_gateway_replica_up{{model="{name}",replica="{replica}"}} 1.0' in text

    clock.run(run())


def test_a_server_is_checked_once_for_all_its_adapters_and_killed_if_it_hangs(clock: Clock) -> None:
    async def run() -> None:
        entries = {"base": {"keep_alive": None}, "pirate": PIRATE, "poet": {"adapter_of": "base"}}
        async with gateway(entries) as gate:
            await gate.ask("pirate")
            server = gate.launch.last("base")
            before, begin = server.num_checks, clock.now()
            await until(lambda: clock.now() - begin >= 60)
            assert 11 <= server.num_checks - before <= 13, "every 5 s"
            server.hangs = True
            assert (await gate.ask("pirate")).status_code == 200, "by the server that takes its place"
            assert server.exited.done() and gate.launch.begun == ["base"] * 2

    clock.run(run())


def test_an_adapters_requests_are_no_requests_of_its_base(clock: Clock) -> None:
    may_end = asyncio.Event()

    async def behave(asked: Asked) -> None:
        await may_end.wait()
        asked.reply(b"{}")

    async def run() -> None:
        async with gateway({"base": {}, "pirate": PIRATE}, FakeLaunch(behave)) as gate:
            asking = asyncio.ensure_future(gate.ask("pirate"))
            await until(lambda: gate.launch.servers and gate.launch.last("base").asked)
            shown = {one["name"]: one for one in (await gate.http.get("/ui/stats")).json()["models"]}
            for name, number in (("base", 0), ("pirate", 1)):
                assert (shown[name]["in_flight"], shown[name]["waiting"]) == (number, 0)
                assert await gate.metric(f'octavo_gateway_model_requests{{model="{name}"}}') == number
            assert not gate.deployment("base").is_idle
            may_end.set()
            await asking

    clock.run(run())


def test_another_adapter_restarts_the_base_once_requests_have_ended(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    may_end = asyncio.Event()

    def write(**more: Any) -> None:
        entries = {"base": {}, "pirate": PIRATE | {"fallbacks": ["base"]}, **more}
        file.write_text(json.dumps({"models": entries}))

    async def behave(asked: Asked) -> None:
        if asked.json.get("waits"):
            await may_end.wait()
        asked.reply(b"{}")

    launch = Launch(behave)

    async def run() -> None:
        write()
        async with gateway(str(file), launch) as gate:
            waiting = asyncio.ensure_future(gate.ask("pirate", waits=True))
            await until(lambda: "base" in launch.servers and launch.last("base").asked)
            first = launch.last("base")
            file.write_text(file.read_text().replace('["p"]', '["q"]'))
            gate.server.reload()
            assert (await gate.ask("q")).status_code == 200 and launch.begun == ["base"]
            write(poet={"adapter_of": "base", "model": "org/poet"})
            gate.server.reload()
            for name in ("poet", "pirate", "base"):
                assert (await gate.ask(name)).status_code == 200
            assert launch.begun == ["base"] * 2 and not first.is_stopped
            may_end.set()
            assert (await waiting).status_code == 200
            await until(lambda: first.is_stopped)
            assert launch.running("base") == 1

    clock.run(run())


def test_a_key_is_for_an_adapter_alone(clock: Clock, tmp_path: Path) -> None:
    """Also where a batch's lines could name the base, at servers that the gateway starts and at others."""

    async def run() -> None:
        away = await FakeServer().start()
        at = {"addresses": [away.address]}
        entries = {"base": {}, "pirate": PIRATE, "away": at, "away-pirate": at, "other": {}}
        async with (
            gateway(entries, keys=str(tmp_path / "keys.db"), admin_port=0, admin_key=["root"]) as gate,
            httpx.AsyncClient(base_url=gate.admin_url, headers={"authorization": "Bearer root"}) as admin,
        ):
            body = {"name": "a", "models": ["p", "away-pirate", "other"]}
            gate.http.headers["authorization"] = "Bearer " + (await admin.post("/keys", json=body)).json()["key"]
            cards = (await gate.http.get("/v1/models")).json()["data"]
            assert [one["id"] for one in cards] == ["pirate", "away-pirate", "other", "p"]
            assert [(await gate.ask(name)).status_code for name in ("pirate", "p", "base")] == [200, 200, 403]
            for name, base in (("pirate", "base"), ("away-pirate", "away"), ("other", None)):
                answer = await gate.http.post("/v1/batches", json={}, headers={"x-octavo-model": name})
                assert answer.status_code == (200 if base is None else 403)
                assert base is None or f"could also use {base}, which the API key a is not for" in answer.text
            (used,) = [one for one in (await admin.get("/usage")).json()["data"] if one["model"] == "pirate"]
            assert used["requests"] == 2
        away.die()

    clock.run(run())


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ("a: {}, b: {adapter_of: c}", "models.b.adapter_of: c is not another model that the gateway starts"),
        ("b: {adapter_of: b}", "b is not another model"),
        ("a: {addresses: ['http://h']}, b: {adapter_of: a}", "a is not another model that the gateway starts"),
        ("a: {}, b: {adapter_of: a}, c: {adapter_of: b}", "models.c.adapter_of: b is not another model"),
        ("a: {}, b: {adapter_of: a, keep_alive: 5}", "models.b.keep_alive is not for an adapter"),
        ("a: {}, b: {adapter_of: a, flags: {x: 1}}", "models.b.flags is not for an adapter"),
        ("a: {}, b: {adapter_of: a, model: ./nowhere}", "models.b: there is no file or folder ./nowhere"),
        ("a: {flags: {enable_lora: false}}, b: {adapter_of: a}", "a has the flag enable-lora: false"),
        ("a: {prefill_model: b}, b: {adapter_of: c}, c: {}", "prefill_model: b is not another model of the catalogue"),
    ],
)
def test_a_mistake_about_an_adapter_is_named(tmp_path: Path, entries: str, says: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models: {{{entries}}}")
    with pytest.raises(ConfigError) as caught:
        read_catalogue(str(file))
    assert says in str(caught.value)


def test_what_an_adapter_has_made_is_found_by_its_base(clock: Clock) -> None:
    """And the other way round, at servers that the gateway starts and at others. The client's model answers."""

    def keeper(number: int) -> Any:
        async def behave(asked: Asked) -> None:
            asked.reply(json.dumps({"id": f"resp_{number}x{asked.json['model']}"}).encode())

        return behave

    async def run() -> None:
        async with fake_servers(keeper(0), keeper(1)) as servers:
            at = {"addresses": [one.address for one in servers]}
            entries = {"base": {"replicas": 2}, "pirate": PIRATE, "away": at, "away-pirate": at}
            launch = Launch()
            async with gateway(entries, launch) as gate:
                for base, adapter in (("base", "pirate"), ("away", "away-pirate")):
                    await gate.ask(base)
                    of_base = servers if base == "away" else launch.servers["base"]
                    for number, server in enumerate(of_base):
                        server.behave = keeper(number)
                    for maker, other in ((base, adapter), (adapter, base)):
                        for _ in range(4):
                            made = (await gate.ask(maker, "/v1/responses", input="x")).json()["id"]
                            place = int(made[5])
                            num_asked = len(of_base[place].asked)
                            await gate.ask(other, "/v1/responses", input="y", previous_response_id=made)
                            assert len(of_base[place].asked) == num_asked + 1
                            assert of_base[place].asked[-1].json["model"] == other

    clock.run(run())
