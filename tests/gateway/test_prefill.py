"""`prefill_model`: long prompts that no replica has had are computed by another entry first."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.gateway.catalogue import read_catalogue
from octavo.gateway.proxy_request import ProxyRequest
from octavo.gateway.replica import Replica
from octavo.gateway.request_body import RequestBody
from octavo.gateway.upstream import Upstream
from octavo.peer_addresses import address_proof
from tests.gateway.fakes import Asked, FakeLaunch, answer_plainly, fake_servers, gateway, until
from tests.waiting import Clock

LONG = [{"role": "user", "content": "x" * 400}]  # 100 tokens
REPLY = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "y" * 20}]


async def save_prompt(asked: Asked) -> None:
    asked.writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")


async def fail(asked: Asked) -> None:
    asked.reply(b"{}", 500)


async def hang_up(asked: Asked) -> None:
    asked.die()


async def lose_engine(asked: Asked) -> None:
    asked.reply(b"{}", 500, x_octavo_cut_off="1")


def entries(decode: str, prefill: str) -> dict[str, Any]:
    return {
        "a": {"addresses": [decode], "prefill_model": "p", "prefill_min_tokens": 50, "served_model_name": "m"},
        "p": {"addresses": [prefill], "served_model_name": "m"},
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_a_long_prompt_is_computed_first_and_its_next_turn_is_not(clock: Clock, path: str) -> None:
    said = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")

    async def run() -> None:
        async with (
            fake_servers(answer_plainly, save_prompt) as (decode, prefill),
            gateway(entries(decode.address, prefill.address)) as gate,
        ):
            assert (await gate.ask("a", path, stream=True, **{said: LONG})).status_code == 200
            [first], [then] = prefill.asked, decode.asked
            assert first.headers["x-octavo-only-prompt"] == "1" and first.target == path
            assert "x-octavo-only-prompt" not in then.headers and first.body == then.body
            assert (first.headers.get("x-octavo-blocks-at"), then.headers["x-octavo-blocks-at"]) == (
                None, prefill.address,
            )  # fmt: skip
            await gate.ask("a", path, **{said: LONG + REPLY})
            await gate.ask("a", path, **{said: REPLY})
            await gate.ask("a", "/v1/embeddings", **{said: LONG})
            assert len(prefill.asked) == 1 and len(decode.asked) == 4
            name = gate.deployment("p").replicas[0].name
            assert await gate.metric(f'octavo_gateway_requests_total{{model="p",replica="{name}",status="204"}}') == 1

    clock.run(run())


def test_a_replica_that_was_discovered_is_named_with_a_proof_of_its_key(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMPTS_KEY", "p\n")

    async def run() -> None:
        async with fake_servers(answer_plainly, save_prompt) as (decode, prefill):
            models = entries(decode.address, prefill.address)
            source = prefill.address.replace("http:", "dns+http:")
            models["p"] = {"discover": source, "served_model_name": "m", "api_key_env": "PROMPTS_KEY"}
            async with gateway(models) as gate:
                await gate.deployment("p").wait_for_addresses()
                assert (await gate.ask("a", messages=LONG)).status_code == 200
            assert prefill.asked[0].headers["authorization"] == "Bearer p"
            sent = decode.asked[0].headers
            assert sent["x-octavo-blocks-at"] == prefill.address
            assert sent["x-octavo-blocks-proof"] == address_proof("p", prefill.address)

    clock.run(run())


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_far_replica_gets_the_proof_of_a_key_by_https_alone(scheme: str) -> None:
    at, proof = (b"x-octavo-blocks-at", b"http://10.1.2.3:80"), (b"x-octavo-blocks-proof", b"00")
    request = ProxyRequest("POST", "/x", b"/x", [], RequestBody(b""), 0.0, blocks_at=(at, proof))
    for host, is_sent in (("8.8.8.8", scheme == "https"), ("10.0.0.1", True)):
        upstream = Upstream(f"{scheme}://{host}:8000", timeout_s=1)
        sent = request.headers_for(Replica("r", upstream, "m", None), keeps_keys=True)
        assert at in sent and (proof in sent) == is_sent, host


@pytest.mark.parametrize("behave", [fail, hang_up])
def test_a_prompt_that_is_not_computed_is_the_replicas_own(clock: Clock, behave: Any) -> None:
    async def run() -> None:
        async with fake_servers(answer_plainly, behave) as (decode, prefill):
            async with gateway(entries(decode.address, prefill.address)) as gate:
                assert (await gate.ask("a", messages=LONG)).status_code == 200
                assert len(prefill.asked) == len(decode.asked) == 1
                assert "x-octavo-blocks-at" not in decode.asked[0].headers
            prefill.die()
            async with gateway(entries(decode.address, prefill.address)) as gate:
                assert (await gate.ask("a", messages=LONG)).status_code == 200

    clock.run(run())


def test_a_request_that_is_cut_off_while_its_prompt_is_computed_asks_no_other_replica(clock: Clock) -> None:
    async def be_silent(asked: Asked) -> None:
        await asked.reader.read()

    async def run() -> None:
        async with (
            fake_servers(answer_plainly, be_silent) as (decode, prefill),
            gateway(entries(decode.address, prefill.address), shutdown_timeout=3.0) as gate,
        ):
            asking = asyncio.ensure_future(gate.ask(messages=LONG))
            await until(lambda: prefill.asked)
            gate.server.stop()
            response = await asking
            assert response.status_code == 503 and response.json()["error"]["code"] == "stopping"
            assert not decode.asked

    clock.run(run())


@pytest.mark.parametrize("end", [hang_up, lose_engine])
def test_a_prompt_that_ends_replicas_ends_two_at_most(clock: Clock, end: Any) -> None:
    async def run() -> None:
        async with fake_servers(end, end, end) as (prefill, *decode):
            models = entries(decode[0].address, prefill.address)
            models["a"]["addresses"].append(decode[1].address)
            async with gateway(models) as gate:
                answer = await gate.ask("a", messages=LONG)
                assert answer.json()["error"]["code"] == "request_kills_replicas"
                assert len(prefill.asked) == 1 == sum(len(server.asked) for server in decode)

    clock.run(run())


def test_a_model_whose_helper_has_left_the_catalogue_computes_its_prompts(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"

    async def run() -> None:
        async with fake_servers(save_prompt) as (prefill,):
            helper = f"p: {{addresses: ['{prefill.address}']}}"
            file.write_text(f"models: {{a: {{prefill_model: p, prefill_min_tokens: 50}}, {helper}}}")
            launch = FakeLaunch()
            launch.may_start.clear()
            async with gateway(str(file), launch) as gate:
                asking = asyncio.ensure_future(gate.ask("a", messages=LONG))
                await until(lambda: launch.begun)
                file.write_text("models: {b: {}}")
                gate.server.reload()
                launch.may_start.set()
                assert (await asking).status_code == 200 and not prefill.asked

    clock.run(run())


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{prefill_model: b}", "b is not another model"),
        ("{prefill_model: a}", "a is not another model"),
        ("{prefill_min_tokens: 5}", "needs prefill_model"),
        ("{prefill_model: c}\n  c: {}", "must always run"),
    ],
)
def test_a_catalogue_names_an_entry_that_always_runs(entry: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n  a: {entry}\n")
    with pytest.raises(ConfigError, match=said):
        read_catalogue(str(file))


def test_the_entry_that_computes_starts_again_and_no_request_waits_for_it(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        await (save_prompt if "x-octavo-only-prompt" in asked.headers else answer_plainly)(asked)

    always = {"preload": True, "keep_alive": None}
    models = {"a": always | {"prefill_model": "p", "prefill_min_tokens": 50}, "p": always}

    async def run() -> None:
        launch = FakeLaunch(behave)
        async with gateway(models, launch) as gate:
            await until(lambda: gate.deployment("p").state == gate.deployment("a").state == "ready")
            launch.last("p").die()
            await until(lambda: gate.deployment("p").state == "stopped")
            assert (await gate.ask("a", messages=LONG)).status_code == 200
            await until(lambda: gate.deployment("p").state == "ready")
            assert launch.begun.count("p") == 2 and not launch.last("p").asked
            other = [{"role": "user", "content": "z" * 400}]
            assert (await gate.ask("a", messages=other)).status_code == 200
            assert len(launch.last("p").asked) == 1
            assert "x-octavo-blocks-at" not in launch.last("a").asked[-1].headers, "only this host can reach it"

    clock.run(run())


def test_a_name_that_the_body_hides_and_a_clients_own_header_change_nothing(clock: Clock) -> None:
    async def run() -> None:
        async with fake_servers(answer_plainly, save_prompt) as (decode, prefill):
            models = entries(decode.address, prefill.address)
            models["a"]["served_model_name"] = "a"
            async with gateway(models) as gate:
                hidden = json.dumps({"messages": LONG, "x": [{"model": "a"}] * 17, "model": "a"})
                headers = {"x-octavo-only-prompt": "1", "x-octavo-blocks-at": "http://elsewhere"}
                headers["x-octavo-blocks-proof"] = "aa"
                answer = await gate.http.post("/v1/chat/completions", content=hidden, headers=headers)
                assert answer.status_code == 200 and not prefill.asked
                assert not headers.keys() & decode.asked[0].headers.keys()
                for path in (
                    "/v1/cache/blocks/f0/read", "/llm/v1/cache/blocks/f0/read", "/v1//cache/blocks/f0/read",
                    "/v1/cache/%2e/blocks/f0/read", "/v1/cache/x/%2e%2e/blocks/f0/read", "/v1/cache/%2562locks/f0/read",
                ):  # fmt: skip
                    answer = await gate.http.post(path, json={"model": "a"})
                    assert answer.status_code == 404 and len(decode.asked) == 1, path

    clock.run(run())


def test_token_ids_count_like_a_text(clock: Clock) -> None:
    async def run() -> None:
        async with (
            fake_servers(answer_plainly, save_prompt) as (decode, prefill),
            gateway(entries(decode.address, prefill.address)) as gate,
        ):
            await gate.ask("a", "/v1/completions", prompt=[12345] * 2000)
            assert len(prefill.asked) == 1

    clock.run(run())


def test_the_entry_that_computes_takes_no_other_models_memory(clock: Clock) -> None:
    always = {"memory_gib": 1.0, "preload": True, "keep_alive": None}
    models = {"a": {"memory_gib": 1.0, "prefill_model": "p", "prefill_min_tokens": 50}, "p": always}

    async def run() -> None:
        async with gateway(models, launch := FakeLaunch(), memory_gib=1.0) as gate:
            await until(lambda: gate.deployment("p").state == "ready")
            for text in "xyz":
                long = [{"role": "user", "content": text * 400}]
                assert (await gate.ask("a", messages=long)).status_code == 200
            assert launch.begun == ["p", "a"]

    clock.run(run())
