"""`canaries`: other entries answer a part of a model's new conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.catalogue import Catalogue, ModelEntry
from octavo.gateway.deployment import Deployment
from tests.gateway.fakes import Asked, FakeLaunch, answer_plainly, be_busy, fake_servers, gateway, until
from tests.gateway.test_client_keys import Keys, with_keys
from tests.waiting import Clock

TURN = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]


def said(number: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": "s"}, {"role": "user", "content": f"question {number}"}]


def entries(a: str, b: str, percentage: float) -> dict[str, Any]:
    canary = {"addresses": [b], "served_model_name": "next"}
    return {"a": {"addresses": [a], "aliases": ["x"], "canaries": {"b": percentage}}, "b": canary}


def test_a_part_of_the_conversations_goes_to_the_canary_and_stays_there(clock: Clock) -> None:
    async def run() -> None:
        async with (
            fake_servers(answer_plainly, answer_plainly) as (a, b),
            gateway(entries(a.address, b.address, 25)) as gate,
        ):
            for number in range(100):
                assert (await gate.ask("x", messages=said(number))).status_code == 200
            first = {one.json["messages"][1]["content"] for one in b.asked}
            assert 10 < len(first) < 40 and len(a.asked) + len(b.asked) == 100
            assert {one.json["model"] for one in b.asked} == {"next"}
            for number in range(100):
                await gate.ask("a", messages=[*said(number), *TURN])
            assert {one.json["messages"][1]["content"] for one in b.asked} == first and len(b.asked) == 2 * len(first)
            for _ in range(50):
                await gate.ask("a", messages=said(0), session_id="s")
            assert len(b.asked) - 2 * len(first) in (0, 50), "a session has one version"
            before = len(b.asked)
            for number in range(20):
                await gate.http.get("/v1/files", headers={"x-octavo-model": "a"})
                await gate.ask("b", messages=said(number))
            assert len(b.asked) - before == 20, "lists are the model's own, and the canary has a name too"
            sample = 'octavo_gateway_requests_total{model="b",replica="%s",status="200"}'
            assert await gate.metric(sample % b.address) == len(b.asked)
            async with gateway(entries(a.address, b.address, 0)) as other:
                for number in range(20):
                    await other.ask("a", messages=said(number))
                assert await other.metric(sample.replace('"b"', '"a"') % a.address) == 20

    clock.run(run())


def test_without_a_canary_that_can_answer_the_model_does_and_its_error_is_the_clients(clock: Clock) -> None:
    async def run() -> None:
        launch = FakeLaunch()
        launch.error = "octavo: error: no memory"
        models: dict[str, Any] = {"a": {"canaries": {"b": 100}}, "b": {}}
        async with fake_servers(answer_plainly) as (server,):
            models["a"]["addresses"] = [server.address]
            async with gateway(models, launch) as gate:
                for _ in range(3):
                    assert (await gate.ask("a", messages=said(1))).status_code == 200
                await until(lambda: gate.deployment("b").num_failed_starts)
                assert launch.begun == ["b"], "a start that failed is not tried at once again"
                server.die()
                refused = await gate.ask("a", messages=said(1))
                assert refused.status_code == 503 and "no memory" not in refused.text

    clock.run(run())


def test_a_canary_that_is_not_ready_starts_beside_the_requests(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    async def find_nothing(source: object, move_to: object) -> None: ...

    async def wait_for_addresses(deployment: Deployment) -> None:
        waits.append(deployment.name)

    monkeypatch.setattr(Deployment, "wait_for_addresses", wait_for_addresses)
    monkeypatch.setattr("octavo.gateway.deployment.follow", find_nothing)

    async def run() -> None:
        launch = FakeLaunch()
        launch.may_start.clear()
        models: dict[str, Any] = {"a": {"canaries": {"b": 50, "c": 50}}, "b": {}}
        models["c"] = {"discover": "dns+http://nowhere:8000"}
        async with fake_servers(answer_plainly) as (server,):
            models["a"]["addresses"] = [server.address]
            async with gateway(models, launch) as gate:
                for number in range(20):
                    assert (await gate.ask("a", messages=said(number))).status_code == 200
                assert set(waits) == {"a"}, "none waits for the first addresses"
                assert launch.begun == ["b"] and len(server.asked) == 20
                launch.may_start.set()
                await until(lambda: gate.deployment("b").state == "ready")
                for number in range(20):
                    assert (await gate.ask("a", messages=said(number))).status_code == 200
                assert len(launch.last("b").asked) + len(server.asked) == 40 and launch.last("b").asked

    clock.run(run())


def test_a_canary_takes_no_other_models_memory(clock: Clock) -> None:
    async def run() -> None:
        models: dict[str, Any] = {"a": {"canaries": {"b": 100}, "memory_gib": 3}, "b": {"memory_gib": 3}}
        async with gateway(models, memory_gib=4) as gate:
            for number in range(3):
                assert (await gate.ask("a", messages=said(number))).status_code == 200
            assert gate.deployment("a").state == "ready" and gate.launch.begun == ["a"]

    clock.run(run())


def test_a_canary_that_is_lost_leaves_the_request_to_the_model(clock: Clock) -> None:
    async def hang_up(asked: Asked) -> None:
        asked.die()

    async def run() -> None:
        async with fake_servers(hang_up, hang_up, answer_plainly, hang_up) as (one, other, server, last):
            canary = {"addresses": [one.address, other.address]}
            models = {
                "a": {"addresses": [server.address], "canaries": {"b": 100}}, "b": canary,
                "c": {"addresses": [last.address], "canaries": {"b": 100}},
            }  # fmt: skip
            async with gateway(models) as gate:
                assert (await gate.ask("a", messages=said(1))).status_code == 200
                assert len(one.asked + other.asked) == len(server.asked) == 1
                refused = await gate.ask("c", messages=said(2))
                assert refused.status_code == 500 and refused.json()["error"]["code"] == "request_kills_replicas"
                assert len(one.asked + other.asked) == 2 and len(last.asked) == 1, "a request ends two replicas at most"
        async with fake_servers(answer_plainly) as (server,):
            launch = FakeLaunch(hang_up)
            models = {"a": {"addresses": [server.address], "canaries": {"b": 100}}, "b": {"preload": True}}
            async with gateway(models, launch) as gate:
                await until(lambda: gate.deployment("b").state == "ready")
                assert (await gate.ask("a", messages=said(1))).status_code == 200
                assert len(launch.last("b").asked) == len(server.asked) == 1

    clock.run(run())


def test_a_busy_canary_leaves_the_request_to_the_model(clock: Clock) -> None:
    async def run() -> None:
        async with fake_servers(answer_plainly, be_busy) as (a, b), gateway(entries(a.address, b.address, 100)) as gate:
            assert (await gate.ask("a", messages=said(1))).status_code == 200
            assert len(b.asked) == len(a.asked) == 1
            assert (await gate.ask("b", messages=said(1))).status_code == 429, (
                "the canary's own name has no other model"
            )

    clock.run(run())


def test_requests_about_kept_things_go_to_the_model(clock: Clock) -> None:
    async def run() -> None:
        async with (
            fake_servers(answer_plainly, answer_plainly) as (a, b),
            gateway(entries(a.address, b.address, 100)) as gate,
        ):
            header = {"x-octavo-model": "a"}
            for path in ("/v1/responses/resp_x/cancel", "/v1/chat/completions/chatcmpl-x"):
                assert (await gate.http.post(path, headers=header)).status_code == 200
            for field in ("previous_response_id", "conversation"):
                assert (await gate.ask("a", "/v1/responses", input="x", **{field: "unknown"})).status_code == 200
            assert len(a.asked) == 4 and not b.asked

    clock.run(run())


def test_a_request_without_a_conversation_is_known_by_its_body(clock: Clock) -> None:
    async def run() -> None:
        async with (
            fake_servers(answer_plainly, answer_plainly) as (a, b),
            gateway(entries(a.address, b.address, 50)) as gate,
        ):
            num_of_canary = 0
            for number in range(8):
                for server in (a, b):
                    server.asked.clear()
                for _ in range(4):  # each has another boundary
                    sound = {"file": ("a.wav", b"sound %d" % number)}
                    await gate.http.post("/v1/audio/transcriptions", data={"model": "a"}, files=sound)
                    await gate.ask("a", "/rerank", query=f"q {number}", documents=["d"])
                for path in ("/v1/audio/transcriptions", "/rerank"):
                    numbers = {sum(one.target == path for one in server.asked) for server in (a, b)}
                    assert numbers == {0, 4}, path
                    num_of_canary += any(one.target == path for one in b.asked)
            assert 0 < num_of_canary < 16

    clock.run(run())


def test_what_a_canary_has_kept_is_asked_of_it_and_a_catalogue_changes_percentages_alone(
    clock: Clock, tmp_path: Path
) -> None:
    async def keep(asked: Asked) -> None:
        asked.reply(b'{"id": "resp_1"}')

    async def run() -> None:
        async with fake_servers(answer_plainly, keep) as (a, b):
            file = tmp_path / "models.yaml"
            text = (
                f"models: {{a: {{addresses: ['{a.address}'], canaries: {{b: %d}}}}, b: {{addresses: ['{b.address}']}}}}"
            )
            file.write_text(text % 100)
            async with gateway(str(file)) as gate:
                assert (await gate.ask("a", "/v1/responses", input="x")).json()["id"] == "resp_1"
                replicas = gate.deployment("a").replicas + gate.deployment("b").replicas
                file.write_text(f"models: {{a: {{addresses: ['{a.address}']}}, b: {{addresses: ['{b.address}']}}}}")
                gate.server.reload()
                await gate.ask("a", "/v1/responses", input="x")
                assert (len(a.asked), len(b.asked)) == (1, 1)
                file.write_text(text % 100)
                gate.server.reload()
                await gate.ask("a", "/v1/responses", previous_response_id="resp_1", input="y")
                assert (len(a.asked), len(b.asked)) == (1, 2)
                assert gate.deployment("a").replicas + gate.deployment("b").replicas == replicas, "none began anew"

    clock.run(run())


def test_a_key_for_a_model_is_for_its_canary(clock: Clock, tmp_path: Path) -> None:
    async def test(gate: Any, keys: Keys) -> None:
        _, headers = await keys.create(models=["x"])
        gate.http.headers.update({**headers, "x-api-key": ""})
        for canaries in ({"b": 100.0}, {}):
            models = {"a": ModelEntry(aliases=["x"], canaries=canaries), "b": ModelEntry()}
            gate.server.models.apply(Catalogue(models))
            assert (await gate.ask("b", messages=said(1))).status_code == (200 if canaries else 403)
            assert (await gate.ask("a", messages=said(1))).status_code == 200
            assert gate.launch.begun == (["b"] if canaries else ["b", "a"])
            rows = (await keys.http.get("/usage")).json()["data"]
            counted = {row["model"]: (row["requests"], row["completion_tokens"]) for row in rows}
            assert counted == ({"a": (1, 0), "b": (1, 6)} if canaries else {"a": (2, 3), "b": (1, 6)})

    with_keys(clock, tmp_path, test)
