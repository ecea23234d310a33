"""The gateway passes bodies, streams, names, ids and keys on, and refuses some requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.gateway.client import ClientSend
from octavo.gateway.upstream import Upstream
from tests.gateway.fakes import Asked, FakeLaunch, answer_plainly, fake_servers, gateway, until
from tests.waiting import Clock


def test_bytes_pass_unchanged_both_ways_but_for_the_name_of_an_alias(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.reply(b' {"odd":  "spacing" }\n', 201, x_own="kept")

    async def run() -> None:
        async with gateway({"a": {"aliases": ["gpt-4o"]}}, FakeLaunch(behave)) as gate:
            body = b'{ "messages" : [{"role":"user","model":"gpt-4o","content":"\\u00e9 1.0e2"}], "model" :"gpt-4o" }'
            sent = {"x-request-id": "r", "x-forwarded-for": "1.2.3.4"}
            response = await gate.http.post("/v1/chat/completions?x=%2F1", content=body, headers=sent)
            assert (response.status_code, response.content) == (201, b' {"odd":  "spacing" }\n')
            assert response.headers["x-own"] == "kept"
            asked = gate.launch.last("a").asked[0]
            assert asked.body == body.replace(b'"model" :"gpt-4o"', b'"model" :"a"')
            assert asked.target == "/v1/chat/completions?x=%2F1" and asked.headers["x-request-id"] == "r"
            assert asked.headers["x-forwarded-for"] == "1.2.3.4, 127.0.0.1", (
                "the address of the client itself comes last"
            )
            assert asked.headers["accept-encoding"] == "identity", "the gateway could not read a compressed answer"

    clock.run(run())


def test_a_stream_comes_as_it_is_made(clock: Clock) -> None:
    go_on = asyncio.Event()

    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b'data: {"x": 1}\n\nda')
        await go_on.wait()
        asked.piece(b"ta: [DONE]\n\n")
        asked.piece(b"")

    async def run() -> None:
        async with (
            gateway({"a": {}}, FakeLaunch(behave)) as gate,
            gate.http.stream("POST", "/v1/completions", json={"model": "a", "stream": True}) as response,
        ):
            pieces = response.aiter_raw()
            assert await anext(pieces) == b'data: {"x": 1}\n\n'
            go_on.set()
            assert b"".join([piece async for piece in pieces]) == b"data: [DONE]\n\n"

    clock.run(run())


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_header_names_a_model_in_either_encoding(clock: Clock, encoding: str) -> None:
    async def run() -> None:
        async with (
            fake_servers(answer_plainly) as (server,),
            gateway({"modèle": {"addresses": [server.address]}, "b": {}}) as gate,
        ):
            headers = {b"x-octavo-model": "modèle".encode(encoding)}
            for method, path in ("POST", "/v1/embeddings"), ("DELETE", "/v1/cache/sessions/x"):
                assert (await gate.http.request(method, path, content=b"{}", headers=headers)).status_code == 200
            assert [one.method for one in server.asked] == ["POST", "DELETE"]
            nameless = await gate.http.post("/v1/embeddings", content=b"{}", headers={"x-octavo-model": ""})
            assert "names no model" in nameless.text

    clock.run(run())


def test_a_form_names_its_model_too(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {"aliases": ["whisper-1"]}, "b": {}}) as gate:
            files = {"file": ("a.wav", b"\r\n--x\r\n\0\xff" * 99)}
            response = await gate.http.post("/v1/audio/transcriptions", data={"model": "whisper-1"}, files=files)
            assert response.status_code == 200
            body = gate.launch.last("a").asked[0].body
            assert b'name="model"\r\n\r\na\r\n' in body and b"\r\n--x\r\n\0\xff" * 99 in body

    clock.run(run())


def test_addresses_are_asked_by_their_own_name_with_their_own_key(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_TEST_KEY", "upstream-secret")

    async def plain(asked: Asked) -> None:
        asked.reply(b"{}")

    async def run() -> None:
        async with fake_servers(plain) as (server,):
            entry = {"addresses": [server.address + "/base"], "served_model_name": "org/b",
                     "api_key_env": "OCTAVO_TEST_KEY"}  # fmt: skip
            async with gateway({"b": entry}, api_key=["client-key", "other-key"]) as gate:
                assert (await gate.ask("b")).status_code == 401
                refused = await gate.http.post("/v1/messages", json={})
                assert refused.json()["type"] == "error"
                assert refused.json()["request_id"] == refused.headers["request-id"]
                assert refused.headers["request-id"] == "req_" + refused.headers["x-request-id"]
                for headers in ({"authorization": "Bearer other-key"}, {"x-api-key": "client-key"}):
                    gate.http.headers = headers  # type: ignore[assignment]
                    assert (await gate.ask("b")).status_code == 200
                for asked in server.asked:
                    assert asked.target == "/base/v1/chat/completions" and asked.json["model"] == "org/b"
                    assert asked.headers["authorization"] == "Bearer upstream-secret"
                    assert "x-api-key" not in asked.headers
                gate.http.headers = {"authorization": "Bearer wrong"}  # type: ignore[assignment]
                assert (await gate.ask("b")).status_code == 401
                assert (await gate.http.get("/v1/models")).status_code == 401
                assert (await gate.http.get("/health")).status_code == 200

    clock.run(run())


def test_errors_have_the_form_of_the_clients_api_and_the_types_of_a_server(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}}, api_key=["key"]) as gate:
            for key, status, kind in ("wrong", 401, "authentication_error"), ("key", 404, "not_found_error"):
                headers = {"x-api-key": key}
                for path in ("/v1/v1/messages", "/v1/message"):
                    refused = await gate.http.post(path, json={"model": "b"}, headers=headers)
                    assert (refused.status_code, refused.json()["error"]["type"]) == (status, "invalid_request_error")
                    named = {**headers, "anthropic-version": "2023-06-01"}
                    refused = await gate.http.post(path, json={"model": "b"}, headers=named)
                    assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)
                    assert refused.json()["request_id"] == refused.headers["request-id"]

    clock.run(run())


def test_models_are_listed_with_their_aliases(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {"aliases": ["x"]}, "b": {}}) as gate:
            listed = (await gate.http.get("/v1/models")).json()["data"]
            assert {one["id"]: one["root"] for one in listed} == {"a": "a", "b": "b", "x": "a"}
            assert (await gate.http.get("/v1/models/x")).json()["id"] == "x"
            response = await gate.http.get("/v1/models/nothing")
            assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
            assert gate.launch.begun == []

    clock.run(run())


@pytest.mark.parametrize(
    ("path", "content", "status", "says"),
    [
        ("/v1/chat/completions", b'{"model": "nothing"}', 404, "/v1/models"),
        ("/v1/chat/completions", b'{"model": 3}', 400, "model must be a string"),
        ("/v1/chat/completions", b"[1", 400, "JSON"),
        ("/v1/chat/completions", b"{}", 400, "x-octavo-model"),
        ("/v1/responses/resp_1/cancel", b"", 404, "resp_1 is not known"),
        ("/v1/chat/completions/chatcmpl-1", b"{}", 404, "chatcmpl-1 is not known"),
        ("/v1/chat/completions/render", b"{}", 400, "render names no model"),
        ("/v1/uploads", b"{}", 404, "/v1/uploads is no route that the gateway knows. For another"),
        ("/v1/chat/completion", b"{}", 404, "did you mean /v1/chat/completions? For another route"),
        ("/v1/chat/completions", b'{"model": "' + b"a" * 200 + b'"}', 413, "--max-body-bytes"),
    ],
)
def test_a_request_without_a_replica_that_could_answer_is_refused_with_a_reason(
    clock: Clock, path: str, content: bytes, status: int, says: str
) -> None:
    async def run() -> None:
        async with gateway({"a": {}, "b": {}}, max_body_bytes=200) as gate:
            response = await gate.http.post(path, content=content)
            assert response.status_code == status and says in response.json()["error"]["message"]
            assert gate.launch.begun == []

    clock.run(run())


def test_a_body_that_says_that_it_is_too_long_is_not_waited_for(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}}, max_body_bytes=200) as gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", gate.http.base_url.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 201\r\n\r\n{")
            begin = clock.now()
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 413 ") and b"--max-body-bytes" in answer
            assert clock.now() - begin < 10
            writer.close()

    clock.run(run())


def test_what_a_replica_keeps_is_asked_of_that_replica(clock: Clock) -> None:
    def keeper(number: int) -> Any:
        async def behave(asked: Asked) -> None:
            asked.reply(json.dumps({"id": f"resp_{number}x{len(asked.body)}"}).encode())

        return behave

    async def run() -> None:
        async with fake_servers(keeper(0), keeper(1)) as servers:
            models: dict[str, Any] = {"a": {"addresses": [one.address for one in servers]}, "b": {}}
            async with gateway(models) as gate:
                made: set[str] = set()
                number = 0
                while len({one[:6] for one in made}) < 2:
                    number += 1
                    made.add((await gate.ask("a", "/v1/responses", input="x" * number)).json()["id"])
                for one in made:
                    server = servers[int(one[5])]
                    for path in (f"/v1/responses/{one}", f"/v1/responses/{one}/input_items?limit=1"):
                        assert (await gate.http.get(path)).status_code == 200
                        assert server.asked[-1].target == path
                    await gate.ask("a", "/v1/responses", previous_response_id=one, input=one)
                    assert server.asked[-1].json["previous_response_id"] == one
                    for conversation in (one, {"id": one}):
                        await gate.ask("a", "/v1/responses", conversation=conversation, input="other")
                        assert server.asked[-1].json["conversation"] == conversation
                    path = f"/v1/conversations/{one}/items?limit=1"
                    assert (await gate.http.get(path)).status_code == 200 and server.asked[-1].target == path
                headers = {"x-octavo-model": "a"}
                assert "several replicas" in (await gate.http.get("/v1/files", headers=headers)).text
                assert (await gate.http.get("/v1/files/file-1", headers=headers)).status_code == 200

    clock.run(run())


def test_no_other_replica_is_asked_for_what_a_stopped_one_kept(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.reply(b'{"id": "resp_1"}')

    async def run() -> None:
        async with gateway({"a": {"keep_alive": 1}, "b": {}}, FakeLaunch(behave)) as gate:
            await gate.ask("a", "/v1/responses", input="x")
            await until(lambda: gate.launch.running("a") == 0)
            response = await gate.http.get("/v1/responses/resp_1")
            assert response.status_code == 404 and "stopped" in response.text

    clock.run(run())


def test_a_conversation_stays_with_its_replica(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {"replicas": 4}}) as gate:
            for talk in range(6):
                messages = [{"role": "user", "content": f"talk {talk}" + 20_000 * "x"}]
                for _ in range(5):
                    await gate.ask("a", messages=messages)
                    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and"}]
            homes: dict[str, set[int]] = {}
            for number, server in enumerate(gate.launch.servers["a"]):
                for asked in server.asked:
                    homes.setdefault(asked.json["messages"][0]["content"], set()).add(number)
            assert [len(found) for found in homes.values()] == [1] * 6
            assert await gate.metric('octavo_gateway_affine_requests_total{model="a"}') == 24

    clock.run(run())


def test_metrics_name_models_and_replicas_of_the_catalogue_alone(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {"aliases": ["x"]}}) as gate:
            await gate.ask("x")
            await gate.ask("made up")
            assert await gate.metric('octavo_gateway_requests_total{model="a",replica="0",status="200"}') == 1
            assert await gate.metric('octavo_gateway_requests_total{model="none",replica="none",status="404"}') == 1
            assert await gate.metric('octavo_gateway_first_byte_seconds_count{model="a"}') == 1
            assert "made up" not in (await gate.http.get("/metrics")).text

    clock.run(run())


def test_a_cache_session_is_deleted_at_every_replica(clock: Clock) -> None:
    statuses = [404, 200, 404, 400]

    def server(number: int) -> Any:
        async def behave(asked: Asked) -> None:
            asked.reply(b'{"by": %d}' % number, statuses[number])

        return behave

    async def run() -> None:
        async with fake_servers(*map(server, range(4))) as servers:
            at = [one.address for one in servers]
            models: dict[str, Any] = {"a": {"addresses": at[:3]}, "b": {"addresses": at[3:]}, "stopped": {}}
            async with gateway(models) as gate:
                path = "/v1/cache/sessions/ada%207?cache_salt=x"
                done = await gate.http.delete(path)
                assert (done.status_code, done.json()) == (200, {"by": 1})
                assert [[(one.method, one.target) for one in each.asked] for each in servers] == [
                    [("DELETE", path)]
                ] * 4
                statuses[1] = 404
                assert (await gate.http.delete(path)).status_code == 404
                named = await gate.http.delete(path, headers={"x-octavo-model": "b"})
                assert named.status_code == 400 and [len(one.asked) for one in servers] == [2, 2, 2, 3]
                statuses[1] = 200
                servers[2].die()
                lost = await gate.http.delete(path)
                assert lost.status_code == 503 and at[2] in lost.json()["error"]["message"]
                assert len(servers[1].asked) == 3, "the others have done it"
                assert gate.launch.begun == [], "a stopped model is not started for it"
                nowhere = await gate.http.delete(path, headers={"x-octavo-model": "stopped"})
                assert nowhere.status_code == 404

    clock.run(run())


def test_a_path_that_a_proxy_may_read_as_another_one_reaches_no_server(clock: Clock) -> None:
    async def run() -> None:
        async with fake_servers(answer_plainly) as (server,), gateway({"a": {"addresses": [server.address]}}) as gate:
            for path in (
                "/v1/cache/sessions/%2e%2e/%2e%2e/files/x", "/v1/cache/sessions/..%2f..%2ffiles/x",
                "/v1/cache/sessions/%252e%252e/%252E./files/x", "/v1/cache/sessions/..%5c..%5Cfiles%5cx",
                "/v1/cache/sessions/%2e/x", "/v1/cache/sessions//x", "/v1%2f%2ffiles/x", "/v1/files/x//",
            ):  # fmt: skip
                for method in ("DELETE", "GET", "POST"):
                    answer = await gate.http.request(method, path)
                    assert answer.status_code == 404 and "give the path without" in answer.text, (method, path)
            assert server.asked == []
            for path in ("/v1/files/a..b", "/v1/files/...", "/v1/cache/sessions/a%2Fb", "/v1/files/x/"):
                assert (await gate.http.delete(path)).status_code == 200
                assert server.asked[-1].target == path, "as the client wrote it"

    clock.run(run())


def test_a_server_of_several_entries_is_told_once_of_a_deleted_cache_session(clock: Clock) -> None:
    async def run() -> None:
        async with fake_servers(answer_plainly) as (server,):
            at = {"addresses": [server.address]}
            async with gateway({"a": at, "b": at, "base": {}, "adapter": {"adapter_of": "base"}}) as gate:
                await gate.ask("base")
                assert (await gate.http.delete("/v1/cache/sessions/x")).status_code == 200
                for each in (server, gate.launch.last("base")):
                    assert [one.method for one in each.asked].count("DELETE") == 1

    clock.run(run())


def test_an_answer_without_a_body_may_say_how_long_it_would_be(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async def behave(asked: Asked) -> None:
        asked.head(304, content_length="9", etag="x")

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(behave)) as gate:
            for _ in range(2):
                answer = await gate.http.get("/v1/files/file-1/content", headers={"if-none-match": "x"})
                assert (answer.status_code, answer.headers["etag"], answer.content) == (304, "x", b"")
            assert "Unexpected" not in caplog.text

    clock.run(run())


def test_a_path_below_the_stored_ones_is_no_id(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}, "b": {}}) as gate:
            for path in ("/v1/responses/compact", "/v1/chat/completions/batch", "/v1/chat/completions/derender"):
                answer = await gate.ask(None, path)
                assert answer.status_code == 400 and "names no model" in answer.json()["error"]["message"]

    clock.run(run())


def test_a_line_of_a_refusal_has_no_word_of_the_client(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.gateway.app.time", SimpleNamespace(monotonic=lambda: 7.5, time=time.time))  # one second
    caplog.set_level("INFO", logger="octavo.gateway")
    ids: list[str] = []

    async def run() -> None:
        async with gateway({"a": {}}, api_key=["k"]) as gate:
            for i in range(9):
                refused = await gate.http.get(f"/SECRET/{i}")
                assert refused.status_code == 401
                ids.append(refused.headers["x-request-id"])
            gate.http.headers.update({"x-api-key": "k", "x-request-id": "mine"})
            for method, path in (("PUT", "/v1/files/SECRET"), ("HEAD", "/v1/responses/SECRET"), ("HEAD", "/SECRET"),
                                 ("PUT", "/v1/chat/completions/render")):  # fmt: skip
                await gate.http.request(method, path, json={"model": "a"}, headers={"content-encoding": "gzip"})

    clock.run(run())
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    known = ["PUT /v1/files is refused: 415, unsupported_media_type",
             "HEAD /v1/responses is refused: 405, method_not_allowed",
             "HEAD (unknown route) is refused: 405, method_not_allowed",
             "PUT /v1/chat/completions/render is refused: 415, unsupported_media_type"]  # fmt: skip
    assert lines[-4:] == [f"{line}, request mine" for line in known] and "SECRET" not in "".join(lines)
    assert lines[:-4] == [f"GET (unknown route) is refused: 401, invalid_api_key, request {one}" for one in ids[:5]]


def test_errors_of_the_gateway_tell_the_id_and_the_methods_of_a_route(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}}) as gate:
            for method, path, allow in (
                ("HEAD", "/v1/responses", "GET, POST, PUT, PATCH, DELETE"), ("POST", "/v1/models", "GET"),
                ("GET", "/api/chat", "POST"), ("POST", "/api/tags", "GET"),
            ):  # fmt: skip
                answer = await gate.http.request(method, path, headers={"x-request-id": "mine"})
                assert (answer.status_code, answer.headers.get("allow")) == (405, allow)
                assert answer.headers["x-request-id"] == "mine"
            ids = set[str]()
            for given in ({}, {"x-request-id": "a b"}):
                for path in ("/v1/nothing", "/api/nothing", "/v1/messages", "/ui/nothing"):
                    answer = await gate.http.post(path, json={"model": "none"}, headers=given)
                    assert answer.status_code == 404 and "allow" not in answer.headers
                    ids.add(answer.headers["x-request-id"])
            assert len(ids) == 8 and "a b" not in ids

    clock.run(run())


def test_a_stream_that_breaks_is_not_refused(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="octavo.gateway")

    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b'data: {"x": 1}\n\n')
        asked.die()

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(behave)) as gate:
            assert "replica_lost" in (await gate.ask(stream=True)).text

    clock.run(run())
    assert "refused" not in caplog.text


def test_a_client_that_reads_late_gets_all_and_the_replica_waits_for_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [b"data: " + b"%d" % i * 2000 + b"\n\n" for i in range(4000)]
    waits = asyncio.Event()
    at_once = ClientSend.at_once

    def noted(self: ClientSend, data: bytes) -> bool:
        if not (is_sent := at_once(self, data)):
            waits.set()
        return is_sent

    monkeypatch.setattr(ClientSend, "at_once", noted)

    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        for event in events:
            asked.piece(event)
            await asked.writer.drain()
        asked.piece(b"")

    async def run() -> None:
        async with (
            gateway({"a": {}}, FakeLaunch(behave)) as gate,
            gate.http.stream("POST", "/v1/completions", json={"model": "a", "stream": True}) as response,
        ):
            await waits.wait()
            transport = gate.launch.last("a").asked[0].writer.transport
            await until(lambda: transport.get_write_buffer_size() > 0)
            assert b"".join([piece async for piece in response.aiter_raw()]) == b"".join(events)

    clock.run(run())


def test_a_client_that_reads_nothing_for_a_minute_is_reset(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        with contextlib.suppress(ConnectionError):
            while True:
                asked.piece(b": " + b"x" * 65536 + b"\n\n")
                await asked.writer.drain()

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(behave)) as gate:
            loop, body = asyncio.get_running_loop(), b'{"model": "a", "stream": true}'
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                host, port = gate.http.base_url.host, gate.http.base_url.port
                await loop.sock_connect(sock, (host, port))
                head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                await loop.sock_sendall(sock, head + body)
                await until(lambda: "a" in gate.launch.servers and gate.launch.last("a").asked)
                await until(lambda: gate.server.app.num_in_flight == 0)
                await until(lambda: sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET)

    clock.run(run())


def test_connections_of_clients_are_bounded(clock: Clock) -> None:
    end = asyncio.Event()

    async def behave(asked: Asked) -> None:
        await end.wait()
        asked.reply(b"{}")

    async def run() -> None:
        launch = FakeLaunch(behave)
        async with gateway({"a": {}}, launch, max_connections=2) as gate:
            host, port = gate.http.base_url.host, gate.http.base_url.port
            silent, _ = await asyncio.open_connection(host, port)
            assert await silent.read() == b"", "a connection without a head ends by itself"
            busy = [asyncio.ensure_future(gate.http.post("/v1/completions", json={"model": "a"})) for _ in range(2)]
            await until(lambda: "a" in launch.servers and len(launch.last("a").asked) == 2)
            refused, _ = await asyncio.open_connection(host, port)
            head, _, body = (await refused.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503") and json.loads(body)["error"]["code"] == "too_many_connections"
            end.set()
            assert [(await one).status_code for one in busy] == [200, 200], "others go on"

    clock.run(run())


def test_only_replicas_nearby_are_told_who_asks() -> None:
    near = ("127.0.0.1", "[::1]", "10.1.2.3", "192.168.0.9", "localhost", "octavo-0")
    for host in near:
        assert Upstream(f"http://{host}:8000", timeout_s=1).is_near, host
    for host in ("api.openai.com", "8.8.8.8"):
        assert not Upstream(f"https://{host}", timeout_s=1).is_near


def test_headers_of_one_hop_are_not_passed_on(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.reply(b"{}", connection="keep-alive, X-Hop", x_hop="1", x_own="kept")

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(behave)) as gate:
            gate.http.headers.update(
                {"connection": "Keep-Alive, x-mine , X-Forwarded-For", "x-mine": "1", "x-own": "1"}
            )
            answer = await gate.ask()
            assert "x-hop" not in answer.headers and answer.headers["x-own"] == "kept"
            seen = gate.launch.last("a").asked[0].headers
            assert "x-mine" not in seen and seen["x-own"] == "1"
            assert seen["x-forwarded-for"] == "127.0.0.1", "clients cannot hide their address"

    clock.run(run())


def test_a_far_replica_gets_no_address_of_a_client(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upstream, "is_near", False)

    async def run() -> None:
        async with gateway({"a": {}}) as gate:
            gate.http.headers.update({"x-forwarded-for": "1.2.3.4", "forwarded": "for=1.2.3.4", "x-real-ip": "1.2.3.4"})
            assert (await gate.ask()).status_code == 200
            assert not {"x-forwarded-for", "forwarded", "x-real-ip"} & gate.launch.last("a").asked[0].headers.keys()

    clock.run(run())


def test_requests_of_azures_clients_are_passed_on_as_openais(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(answer_plainly), api_key=["key"]) as gate:
            path, body = "/openai/deployments/x/chat/completions?api-version=1", {"model": "a", "messages": []}
            assert (await gate.http.post(path, json=body, headers={"api-key": "wrong"})).status_code == 401
            assert (await gate.http.post(path, json=body, headers={"api-key": "key"})).status_code == 200
            (asked,) = gate.launch.last("a").asked
            assert asked.target == "/v1/chat/completions?api-version=1"
            assert not {"api-key", "x-api-key"} & asked.headers.keys(), "the gateway's keys are its own"

    clock.run(run())
