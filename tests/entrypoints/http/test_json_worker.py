"""Large bodies are parsed elsewhere, become the same, and come back in pieces."""

from __future__ import annotations

import json
import marshal
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.entrypoints.http import json_worker, router
from octavo.entrypoints.http.json_worker import JsonWorker, parse_json, pieces
from octavo.entrypoints.http.request_limits import RequestLimits
from octavo.errors import RequestError
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.waiting import within

LIMITS = RequestLimits()


@pytest.fixture(scope="module")
def worker() -> Iterator[JsonWorker]:
    worker = JsonWorker(LIMITS, within(60))
    yield worker
    worker.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":2}', b" [1, 2.50, -0, -0.0, 1E5, 1e-400, 0.1, 123456789.123456789e5] ", b"18446744073709551616",
        b"-9223372036854775809", b"1e400", b"NaN", b"[-Infinity]", b'"\\ud800"', b'"\xed\xa0\x80"', b'"\\ud83d\\ude00"',
        b"\xef\xbb\xbf1", '"ü"'.encode("utf-16"), b'{"\\u0061":{"":[[],{}]}}',
    ],
)  # fmt: skip
def test_bodies_are_read_as_python_reads_them(body: bytes) -> None:
    assert repr(parse_json(body, LIMITS)) == repr(json.loads(body))


def test_signs_in_texts_are_no_values_of_a_short_body() -> None:
    limits = RequestLimits(max_json_nodes=20, max_json_depth=2)
    assert parse_json(b'["%s"]' % (b"[,{" * 30), limits) == ["[,{" * 30]
    for body in (b"[" + b"1," * 30 + b"1]", b"[[[]]]"):
        with pytest.raises(RequestError):
            parse_json(body, limits)


def any_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 6 else 6)
    if kind < 6:
        texts = ["", "ü\ud800", "x" * rng.choice([1, 5000])]
        return rng.choice([None, True, False, 0, -1, 2**70, 1.5, float("inf"), *texts])
    many = rng.choice([0, 1, 3, 3000 if depth < 2 else 5])
    if kind < 8:
        return [any_json(rng, depth + (1 if many < 100 else 6)) for _ in range(many)]
    return {f"k{i}": any_json(rng, depth + (1 if many < 100 else 6)) for i in range(many)}


def test_a_body_is_in_the_worker_what_it_is_here(worker: JsonWorker) -> None:
    rng = random.Random(5)
    values = [any_json(rng) for _ in range(60)]
    values += [[[i] * 3 for i in range(9000)], {"prompt": list(range(50_000)), "a": {"b": [["x" * 9000]] * 3000}}, [[]]]
    for value in values:
        body = json.dumps(value).encode()
        assert worker.parse(body) == parse_json(body, LIMITS) == value


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"a": "\xff"}', b"[" * 500, b"1" * 5000, b"[[],[]," * 300_000, b'"' + b"\\" * 99], ids=len
)
def test_what_is_wrong_with_a_body_is_said_alike(worker: JsonWorker, body: bytes) -> None:
    with pytest.raises(RequestError) as here:
        parse_json(body, LIMITS)
    with pytest.raises(RequestError) as there:
        worker.parse(body)
    assert (str(there.value), there.value.code) == (str(here.value), here.value.code)


def test_no_piece_has_many_values() -> None:
    for value in ([[1]] * 99_999, {"a": list(range(99_999))}, {str(i): i for i in range(99_999)}, [[[0] * 50_000]]):
        for _, data in pieces(value):
            if data:
                assert json_worker._size(marshal.loads(data), {}) <= 2 * json_worker._PIECE_NODES


def test_a_worker_that_dies_or_is_too_slow_is_replaced() -> None:
    worker = JsonWorker(LIMITS, within(60))
    try:
        assert worker.parse(b"[1]") == [1]
        assert worker._process is not None
        worker._process.kill()
        worker._process.wait()
        assert worker.parse(b"[2]") == [2]
        for body in (b"[3]", b"[" + b" " * (1 << 22) + b"3]"):  # which a pipe holds, and which it does not
            worker._process.send_signal(signal.SIGSTOP)
            worker._time_limit_s = 0.01
            with pytest.raises(RequestError, match="takes too long") as refused:
                worker.parse(body)
            assert refused.value.status == 503
            worker._time_limit_s = within(60)
            assert worker.parse(b"[4]") == [4]
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("fields", "is_large"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": "a", "user": "x" * (1 << 20)}, True),
        ({"prompt": "a", "metadata": {"x": [[1]] * 5001}}, True),
    ],
)
def test_the_event_loop_parses_no_large_body(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_large: bool
) -> None:
    here = list[int]()
    parse = router.parse_json

    def note(body: bytes, limits: RequestLimits) -> Any:
        here.append(len(body))
        return parse(body, limits)

    monkeypatch.setattr(router, "parse_json", note)
    with serving(engine, disable_log_requests=True) as url:
        for path in ("/v1/completions", "/invocations"):
            assert httpx.post(url + path, json=fields, timeout=within(60)).status_code == 200
    assert (not here) == is_large
