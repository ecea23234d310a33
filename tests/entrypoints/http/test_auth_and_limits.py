"""What the server refuses before a route sees it, and the deadlines that it hands to the engine."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive

from octavo import http_protocol
from octavo.api_keys import ApiKeys, sent_by_default, with_environment
from octavo.bench import serve as bench_serve
from octavo.engine.hub_link import Channels
from octavo.entrypoints.cli.run import make_ps_parser
from octavo.entrypoints.cli.terminal import ApiClient
from octavo.entrypoints.http import auth_and_limits, body_reader, server_state
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.openai import tokenize
from octavo.errors import ConfigError, RequestError
from octavo.gateway.server import GatewayArgs
from octavo.request import SequenceOutput
from octavo.stats import EngineStats
from tests.entrypoints.fake_engine import Address, FakeEngine, serving
from tests.leaving import connect
from tests.waiting import Clock, virtual_sleep, wait_until, within

LIMITS = {"max_body_bytes": 2000, "max_queue_len": 2, "max_connections": 12, "max_request_time": 50.0}
BODY = {"prompt": "a"}
bench_parser = bench_serve.make_parser("octavo")
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def limited_server(shared_engine: FakeEngine) -> Iterator[Address]:
    with serving(shared_engine, disable_log_requests=True, **LIMITS) as url:
        yield url


@pytest.fixture
def limited(limited_server: Address) -> Address:
    """A server that has seen the connections of other tests end."""
    wait_until(lambda: limited_server.num_connections == 0)
    return limited_server


def read_answer(sock: socket.socket) -> tuple[int, dict[str, object] | None]:
    """Status (0 if there is none) and error of what the server says until it hangs up."""
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionResetError:
        pass  # it did not read all that was sent
    if not data:
        return 0, None
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long_is_413_and_not_read(limited: Address, engine: FakeEngine, chunked: bool) -> None:
    with connect(limited) as sock:
        if chunked:
            sock.sendall((HEAD + "Transfer-Encoding: chunked\r\n\r\n").encode() + b"1000\r\n" + b" " * 0x1000)
        else:
            sock.sendall((HEAD + "Content-Length: 100000000000\r\n\r\n{").encode())
        status, error = read_answer(sock)  # although the body has not ended
    assert status == 413
    assert error is not None
    assert "2000" in str(error["message"])
    assert error["code"] == "request_too_large"
    assert not engine.seen


def test_a_body_of_the_longest_length_is_read(limited: Address, engine: FakeEngine) -> None:
    body = json.dumps(BODY).encode().ljust(2000)
    for content in (body, iter([body[:1000], body[1000:]])):  # the second one is sent in chunks
        answer = httpx.post(f"{limited}/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200
    longer = httpx.post(f"{limited}/v1/completions", content=body + b" ", headers={"Content-Type": "application/json"})
    assert longer.status_code == 413


def test_a_body_that_stops_is_408(engine: FakeEngine) -> None:
    with serving(engine, body_timeout=0.05, disable_log_requests=True) as url, connect(url) as sock:
        sock.sendall((HEAD + "Content-Length: 100\r\n\r\n   ").encode())
        status, error = read_answer(sock)
    assert status == 408
    assert error is not None and "3 bytes" in str(error["message"])
    assert not engine.seen


def test_a_body_that_drips_has_its_time_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def drip() -> dict[str, Any]:
        await virtual_sleep(10)
        return {"type": "http.request", "body": b" ", "more_body": True}

    reader = body_reader.BodyReader(2000, 35.0)
    answer = clock.run(reader.read(Headers(), drip))
    assert isinstance(answer, Response) and b"within 35 s: only 3 bytes came" in answer.body
    with pytest.raises(RequestError, match="did not arrive within 35 s") as refused:
        clock.run(all_of(reader.limited(drip)))
    assert refused.value.status == 408


async def all_of(receive: Receive) -> None:
    while (await receive())["more_body"]:
        pass


def test_a_client_who_leaves_in_the_middle_of_its_body_does_no_harm(limited: Address, engine: FakeEngine) -> None:
    with connect(limited) as sock:
        sock.sendall((HEAD + "Content-Length: 100\r\n\r\n{").encode())
    assert httpx.post(f"{limited}/v1/completions", json=BODY).status_code == 200


def test_a_head_that_is_too_long_is_431(limited: Address) -> None:
    with connect(limited) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * (http_protocol.MAX_HEAD_BYTES + 10))
        status, error = read_answer(sock)
    assert status == 431
    assert error is not None and error["type"] == "invalid_request_error"


def test_a_head_that_drips_is_408_and_one_that_never_begins_is_hung_up_on(
    limited: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(limited) as dripping:
        wait_until(lambda: limited.num_connections == 1)
        monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)  # it counts from the first byte
        dripping.sendall(b"GET /health HTTP/1.1\r\n")
        assert read_answer(dripping)[0] == 408
    with connect(limited) as silent:
        assert read_answer(silent)[0] == 0


def test_what_is_no_http_gets_openais_error_body(limited: Address) -> None:
    with connect(limited) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, error = read_answer(sock)
    assert status == 400
    assert error is not None and error["message"] == "Invalid HTTP request received."


def test_connections_beyond_the_limit_are_503_with_retry_after(limited: Address) -> None:
    sockets = [connect(limited) for _ in range(12)]
    try:
        for sock in sockets:  # requests whose bodies are on their way
            sock.sendall(
                b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
            )
        wait_until(lambda: limited.num_connections == 12)
        answer = httpx.get(f"{limited}/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "too_many_connections"
        assert "retry-after" in answer.headers
    finally:
        for sock in sockets:
            sock.close()
    wait_until(lambda: httpx.get(f"{limited}/health").status_code == 200)


@pytest.mark.parametrize("path", sorted(auth_and_limits.TOKENIZING_PATHS))
def test_requests_that_only_tokenize_are_bounded_too(
    limited: Address, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    state, threads = limited.server.state, server_state.NUM_TEXT_THREADS
    monkeypatch.setattr(state, "num_tokenizing", threads + 2)
    engine.stats = EngineStats(num_running=8, num_waiting=2)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(limited + path, json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"].get("code", "queue_full") == "queue_full"
    monkeypatch.setattr(state, "num_tokenizing", threads + 1)
    assert httpx.post(limited + path, json=body).status_code in (200, 400), "the engine's queue is another"
    wait_until(lambda: state.num_tokenizing == threads + 1)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_request_waits_for_no_note(
    limited: Address, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    """A hub that does not answer, or has ended."""
    sent = list[bytes]()
    hub = Channels(lambda *_: None, lambda _: None, lambda: None)
    hub.transport = cast(Any, SimpleNamespace(is_closing=lambda: has_ended, write=sent.append))
    monkeypatch.setattr(limited.server.state, "hub", hub)
    answer = httpx.post(f"{limited}/v1/completions", json=BODY, headers={"X-Octavo-Prompt-Names": "ab"})
    assert (answer.status_code, [b"note_prompt" in one for one in sent]) == (200, [] if has_ended else [True])


def test_a_request_that_only_tokenizes_counts_while_it_does(
    limited: Address, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = list[int]()

    async def note(work: Any, **_: Any) -> Any:
        counts.append(limited.server.state.num_tokenizing)
        return work()

    monkeypatch.setattr(tokenize, "run_off_loop", note)
    for body, status in (({"prompt": "a"}, 200), ({"messages": []}, 400), ({"prompt": "a"}, 200)):
        assert httpx.post(f"{limited}/tokenize", json=body).status_code == status
    assert counts == [1, 1]


def test_a_full_queue_asks_nobody_to_try_a_route_again_that_there_is_not(limited: Address, engine: FakeEngine) -> None:
    engine.stats = EngineStats(num_running=8, num_waiting=2)
    for path in ("/v1/completion", "/v1/responses/x/cance", "/v1/moderations", "/sleep"):
        assert httpx.post(limited + path, json=BODY).status_code == 404, path


def test_a_full_queue_is_429_with_an_estimate_of_the_wait(limited: Address, engine: FakeEngine) -> None:
    num_rejected = engine.metrics.num_rejected["queue_full"]
    engine.stats = EngineStats(num_running=8, num_waiting=2)
    engine.metrics.requests_per_s = 0.0
    answer = httpx.post(f"{limited}/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5"), "nothing is known of the rate"
    assert answer.json()["error"] == {
        "message": "The queue is full (--max-queue-len 2); try again in about 5 s.",
        "type": "rate_limit_error", "param": None, "code": "queue_full",
    }  # fmt: skip
    assert engine.metrics.num_rejected["queue_full"] == num_rejected + 1
    engine.metrics.requests_per_s = 0.25
    assert httpx.post(f"{limited}/v1/completions", json=BODY).headers["retry-after"] == "8", "two requests, 4 s each"
    assert httpx.get(f"{limited}/v1/models").status_code == 200
    engine.stats = EngineStats(num_running=8, num_waiting=1)
    assert httpx.post(f"{limited}/v1/completions", json=BODY).status_code == 200


def test_clients_are_told_apart_by_address_and_key(engine: FakeEngine) -> None:
    with serving(engine, disable_log_requests=True, api_key=["a", "b"]) as url:
        for key in "aab":
            assert httpx.post(f"{url}/v1/completions", json=BODY, headers={"x-api-key": key}).status_code == 200
        for way in ("1.2.3.4", "5.6.7.8, 1.2.3.4", "1.2.3.4, 127.0.0.1", "5.6.7.8"):  # as the gateway here says
            headers = {"x-api-key": "a", "x-forwarded-for": way}
            assert httpx.post(f"{url}/v1/completions", json=BODY, headers=headers).status_code == 200
    first, again, other, *ways = engine.clients
    assert first == again != other and ways[0] == ways[1] == ways[2] != ways[3] and first not in ways
    keys = ApiKeys([])
    names = [
        keys.client(address, f"Bearer {number}", None)
        for number, address in enumerate(
            ("1.2.3.4", "1.2.3.4", "1.2.3.5", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
        )
    ]
    assert names[0] == names[1] and names[3] == names[4] and len({*names}) == 4, "no key is looked for"
    assert keys.client(None, None, None) != keys.client("x:y", None, None)
    mapped = [keys.client(one, None, None) for one in ("::ffff:1.2.3.4", "1.2.3.4", "::ffff:1.2.3.5", "fe80::1%eth0")]
    assert mapped[0] == mapped[1] == names[0] and len({*mapped}) == 3, "a socket for both kinds shows IPv4 so"
    keys = ApiKeys(["a", "b"])
    sent = [("Bearer 1", "a"), ("Bearer 2", "a"), (None, "a"), ("Bearer a", "a"), (None, "b")]
    *same, other = (keys.client("1.2.3.4", *one) for one in sent)
    assert len({*same}) == 1 and other not in same, "keys that admit nobody make no other clients"


def test_a_key_of_a_variable_has_no_space_around_it_and_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("OCTAVO_API_KEY", "a\n")
    assert with_environment(["b"]) == ["b", "a"] and sent_by_default() == "a"
    for key in ("\n", "hunter\n2", "h\u00fcnter"):
        monkeypatch.setenv("OCTAVO_API_KEY", key)
        with pytest.raises(ConfigError, match="OCTAVO_API_KEY must be a key of printable ASCII") as error:
            with_environment([])
        assert key not in str(error.value)
    monkeypatch.setenv("OCTAVO_API_KEY", "")
    assert with_environment([]) == []


@pytest.mark.parametrize("key", ["hunter\n2", "h\u00fcnter", "hunter ", " "])
@pytest.mark.parametrize(
    ("check", "flag"),
    [
        (lambda key: ServerArgs(api_key=["a", key]).check(), "--api-key"),
        (lambda key: GatewayArgs(api_key=[key]).check(), "--api-key"),
        (lambda key: GatewayArgs(keys="k", admin_port=0, admin_key=["a", key]).check(), "--admin-key"),
        (lambda key: ApiClient(make_ps_parser("octavo").parse_args(["--api-key", key])), "--api-key"),
        (lambda key: bench_serve.Plan(bench_parser.parse_args(["--api-key", key]), "http://h", None, 1.0), "--api-key"),
    ],
)
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(
    check: Callable[[str], object], flag: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}.* printable ASCII") as error:
        check(key)
    assert "nter" not in str(error.value)


def test_stalled_uploads_take_no_place_in_the_queue(limited: Address, engine: FakeEngine) -> None:
    stalled = [connect(limited) for _ in range(11)]  # more than there are slots and places in the queue
    try:
        for sock in stalled:
            sock.sendall((HEAD + "Content-Length: 100\r\n\r\n{").encode())
        wait_until(lambda: limited.num_in_flight == 11)
        assert httpx.post(f"{limited}/v1/completions", json=BODY).status_code == 200
    finally:
        for sock in stalled:
            sock.close()


def test_requests_are_counted_when_their_bodies_have_come(limited: Address, engine: FakeEngine) -> None:
    engine.may_begin = lambda: False
    whole = json.dumps(BODY)
    sockets = [connect(limited) for _ in range(11)]  # eight slots and two places in the queue
    try:
        for sock in sockets:
            sock.sendall((HEAD + f"Connection: close\r\nContent-Length: {len(whole)}\r\n\r\n{whole[:-1]}").encode())
        wait_until(lambda: limited.num_in_flight == 11)
        for sock in sockets:
            sock.sendall(whole[-1:].encode())
        assert len(select.select(sockets, [], [], within(60))[0]) == 1, "the one that is refused"
        engine.may_begin = lambda: True
        answers = []
        for sock in sockets:
            data = b""
            while part := sock.recv(65536):
                data += part
            answers.append(int(data.split()[1]))
    finally:
        for sock in sockets:
            sock.close()
    assert sorted(answers) == [200] * 10 + [429]


def test_bodies_on_their_way_may_take_so_much_memory_and_no_more(
    limited: Address, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_reader, "MAX_BODIES_HELD", 2)
    sockets = [connect(limited) for _ in range(3)]
    try:
        for sock in sockets:
            sock.sendall((HEAD + "Content-Length: 2000\r\n\r\n" + "x" * 1900).encode())
        [refused], _, _ = select.select(sockets, [], [], within(60))
        status, error = read_answer(refused)
        assert status == 503
        assert error is not None and error["code"] == "too_many_uploads"
    finally:
        for sock in sockets:
            sock.close()
    wait_until(lambda: httpx.post(f"{limited}/v1/completions", json=BODY).status_code == 200)


def test_without_a_limit_any_number_may_wait(http: httpx.Client, engine: FakeEngine) -> None:
    engine.stats = EngineStats(num_running=8, num_waiting=10**6)
    assert http.post("/v1/completions", json=BODY).status_code == 200


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(("route", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_the_smaller_of_both_deadlines_counts_from_the_arrival(
    limited: Address, engine: FakeEngine, route: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_and_limits, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    for fields in ({}, {"timeout": 7}, {"timeout": 0.5}, {"timeout": 1000.0}):
        assert httpx.post(limited + route, json={**body, **fields}).status_code == 200
    assert engine.deadlines == [1050, 1007, 1000.5, 1050]


def test_without_limits_there_is_no_deadline(http: httpx.Client, engine: FakeEngine) -> None:
    assert http.post("/v1/completions", json=BODY).status_code == 200
    assert engine.deadlines == [None]


@pytest.mark.parametrize("timeout", [0, -1, "5", True, 1e400])
def test_a_timeout_that_is_none_is_refused(http: httpx.Client, timeout: object) -> None:
    content = json.dumps({**BODY, "timeout": timeout}).encode()
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_queue_len": -1},
        {"max_body_bytes": 0},
        {"body_timeout": 0.0},
        {"max_request_time": -1.0},
        {"max_ttft": 0.0},
        {"max_ttft": float("inf")},
        {"max_request_time": float("nan")},
        {"shutdown_timeout": float("inf")},
        {"max_engine_restarts": -1},
        {"engine_step_timeout": -1.0},
        {"engine_ready_timeout": -1.0},
        {"max_connections": 0},
        {"log_format": "xml"},
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        ServerArgs(**wrong).check()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prompt_server(shared_engine: FakeEngine) -> Iterator[str]:
    with serving(shared_engine, disable_log_requests=True, max_ttft=2.0) as url:
        yield url


def post(url: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": list(range(1, 101)), **fields})


def test_a_first_token_that_would_come_too_late_is_429_and_says_when_it_would_not(
    prompt_server: str, engine: FakeEngine
) -> None:
    assert post(prompt_server).status_code == 200, "nothing is known yet"
    engine.forecast.record_step([], EngineStats(prompt_token_s=0.01))
    assert post(prompt_server).status_code == 200, "1 s"
    engine.forecast.add("other", 450)
    num_rejected = engine.metrics.num_rejected["first_token_too_late"]
    answer = post(prompt_server)
    assert engine.metrics.num_rejected["first_token_too_late"] == num_rejected + 1
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
    assert answer.json()["error"] == {
        "message": "The first token would come after about 5.5 s; the limit is 2 s. Try again in about 4 s.",
        "type": "rate_limit_error", "param": None, "code": "first_token_too_late",
    }  # fmt: skip
    assert httpx.get(f"{prompt_server}/v1/models").status_code == 200
    engine.forecast.record_step([], EngineStats(prompt_token_s=0.01, num_chunked_tokens=360))
    assert post(prompt_server).status_code == 200, "90 tokens are left, and 100 come"
    assert post(prompt_server, max_ttft=1.5).status_code == 429
    engine.forecast.record_step([SequenceOutput("other", 0, [5])], EngineStats(prompt_token_s=0.01))
    assert post(prompt_server, max_ttft=1.5).status_code == 200


def test_a_prompt_that_alone_takes_too_long_is_told_so(prompt_server: str, engine: FakeEngine) -> None:
    engine.forecast.record_step([], EngineStats(prompt_token_s=0.03))
    answer = post(prompt_server)
    assert answer.status_code == 400 and "retry-after" not in answer.headers
    assert "100 tokens alone take about 3.0 s" in answer.json()["error"]["message"]


def test_where_all_slots_are_taken_the_first_token_waits_for_an_end(prompt_server: str, engine: FakeEngine) -> None:
    engine.metrics.requests_per_s = 0.5
    engine.stats = EngineStats(num_running=8, num_waiting=1)
    assert post(prompt_server).headers["retry-after"] == "2", "two requests, 2 s each"
    engine.metrics.requests_per_s = 0.0


def test_what_is_cached_of_prompts_takes_no_time(prompt_server: str, engine: FakeEngine) -> None:
    hits = EngineStats(prompt_token_s=0.01, num_prefix_queries=1000, num_prefix_hits=900)
    engine.forecast.record_step([], hits)
    engine.forecast.add("other", 900)
    assert engine.forecast.seconds(100) == pytest.approx(1.0)
    assert post(prompt_server).status_code == 200
