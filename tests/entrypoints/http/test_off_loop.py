"""While a long text is rendered or tokenized, or a grammar compiled, other requests are answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from octavo.engine import input_processor
from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.entrypoints.chat import message_rendering
from octavo.entrypoints.http import piecewise_json, router, streaming
from octavo.entrypoints.http.router import MAX_INLINE_BYTES
from octavo.entrypoints.openai import stored_chats, tokenize
from tests.entrypoints.fake_engine import MODEL, FakeEngine
from tests.leaving import ask_and_leave
from tests.waiting import until, wait_until, within

LONG = "x" * (MAX_INLINE_LENGTH + 1)
SHORT = {"prompt": "short"}


def test_pictures_do_not_wait_for_videos() -> None:
    """However many of these are hard to decode."""
    may_go = threading.Event()

    async def run() -> None:
        videos = [asyncio.create_task(run_off_loop(may_go.wait, length=0, media={"image", "video"})) for _ in range(3)]
        assert await run_off_loop(lambda: "seen", length=0, media={"image"}) == "seen"
        may_go.set()
        await asyncio.gather(*videos)

    asyncio.run(run())


def talk(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


class Hold:
    """Holds up a function whose arguments hold a long text, or every call of it, until it is let go."""

    def __init__(self) -> None:
        self.is_held = threading.Event()
        self.may_go = threading.Event()
        self.threads: list[str] = []

    def around(self, function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
        def held(*args: Any, **options: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            if always or LONG in str(args):
                self.is_held.set()
                assert self.may_go.wait(within(60))
            return function(*args, **options)

        return held


@pytest.fixture
def hold() -> Iterator[Hold]:
    hold = Hold()
    yield hold
    hold.may_go.set()


def meanwhile(http: httpx.Client, hold: Hold, route: str, body: dict[str, Any]) -> httpx.Response:
    """The answer to a request that is held up while short ones are answered."""
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(http.post, route, json=body)
        assert hold.is_held.wait(within(60))
        for _ in range(3):
            assert http.post("/v1/completions", json=SHORT).status_code == 200
            assert http.post("/v1/chat/completions", json=talk("short")).status_code == 200
        assert not slow.done()
        hold.may_go.set()
        return slow.result()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 3}),
        ("/v1/completions", {"prompt": ["a", LONG], "truncate_prompt_tokens": 3}),
        ("/v1/chat/completions", {**talk(LONG), "truncate_prompt_tokens": 3}),
        ("/generate", {"prompt": LONG, "truncate_prompt_tokens": 3}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", talk(LONG)),
    ],
)
def test_others_go_on_while_a_long_text_is_tokenized(
    http: httpx.Client,
    engine: FakeEngine,
    hold: Hold,
    route: str,
    body: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.inputs, "encode", hold.around(engine.inputs.encode))
    assert meanwhile(http, hold, route, body).status_code == 200


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
def test_others_go_on_while_a_long_conversation_is_rendered(
    http: httpx.Client, engine: FakeEngine, hold: Hold, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_rendering, "render_chat", hold.around(message_rendering.render_chat))
    body = talk(LONG) if route == "/tokenize" else {**talk(LONG), "truncate_prompt_tokens": 3}
    assert meanwhile(http, hold, route, body).status_code == 200


def test_others_go_on_while_grammars_are_compiled_and_long_texts_too(
    http: httpx.Client, engine: FakeEngine, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold.around(input_processor.make_checked_grammar, always=True)
    monkeypatch.setattr(input_processor, "make_checked_grammar", held)
    with ThreadPoolExecutor(8) as pool:
        slow = [pool.submit(http.post, "/v1/completions", json={**SHORT, "guided_regex": "a"}) for _ in range(8)]
        assert hold.is_held.wait(within(60))
        long = {"prompt": LONG, "truncate_prompt_tokens": 3}
        assert http.post("/v1/completions", json=long).status_code == 200
        assert not any(one.done() for one in slow)
        hold.may_go.set()
        assert [one.result().status_code for one in slow] == [200] * 8


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {"prompt": LONG}), ("/v1/completions/render", {"prompt": [LONG[:400]] * 6}),
        ("/v1/chat/completions/render", talk(LONG[:400])),
    ],
)  # fmt: skip
def test_others_go_on_while_many_tokens_are_written(
    http: httpx.Client, hold: Hold, route: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piecewise_json, "MAX_PIECE_VALUES", 100)
    write = streaming.encode_in_pieces
    held = hold.around(write, always=True)
    monkeypatch.setattr(
        streaming, "encode_in_pieces", lambda value: (held if piecewise_json.is_large(value) else write)(value)
    )
    answer = meanwhile(http, hold, route, body).json()
    found = answer if isinstance(answer, list) else [answer]
    assert sum(len(one["tokens"] if route == "/tokenize" else one["token_ids"]) for one in found) > 400
    assert hold.threads[0].startswith("octavo-text")


def test_others_go_on_while_a_large_chat_is_stored(
    http: httpx.Client, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piecewise_json, "MAX_PIECE_VALUES", 5)
    monkeypatch.setattr(stored_chats, "encode_in_pieces", hold.around(stored_chats.encode_in_pieces, always=True))
    body = {**talk("short"), "store": True, "metadata": {"a": "b"}}
    answer = meanwhile(http, hold, "/v1/chat/completions", body).json()
    assert http.get(f"/v1/chat/completions/{answer['id']}").json() == {
        **answer, "metadata": {"a": "b"}, "request_id": answer["id"],
    }  # fmt: skip
    assert hold.threads[0].startswith("octavo-text")


def test_tokens_are_named_a_few_at_a_time(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "some words that are several tokens", "return_token_strs": True}
    whole, lengths = http.post("/tokenize", json=body).json(), list[int]()
    convert = engine.tokenizer.convert_ids_to_tokens

    def note(token_ids: list[int]) -> Any:
        lengths.append(len(token_ids))
        return convert(token_ids)

    monkeypatch.setattr(tokenize, "_TOKENS_AT_ONCE", 4)
    monkeypatch.setattr(engine.tokenizer, "convert_ids_to_tokens", note)
    assert http.post("/tokenize", json=body).json() == whole
    assert max(lengths) == 4 and sum(lengths) == whole["count"] == len(whole["token_strs"])


def test_short_texts_cost_no_thread(
    http: httpx.Client, engine: FakeEngine, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.inputs, "encode", hold.around(engine.inputs.encode))
    http.post("/v1/completions", json=SHORT)
    http.post("/v1/chat/completions", json=talk("short"))
    assert len(hold.threads) >= 2
    assert not [name for name in hold.threads if name.startswith("octavo-")]


def test_a_client_who_leaves_meanwhile_leaves_nothing_behind(
    address: str, http: httpx.Client, engine: FakeEngine, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.inputs, "encode", hold.around(engine.inputs.encode))
    body = {"prompt": LONG, "truncate_prompt_tokens": 3}
    ask_and_leave(address, "/v1/completions", body, once=hold.is_held.is_set)
    hold.may_go.set()
    assert http.post("/v1/completions", json=SHORT).status_code == 200
    wait_until(lambda: not engine.active)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_nothing_is_fetched_for_a_client_who_has_left(
    address: str, engine: FakeEngine, route: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, is_left = threading.Event(), threading.Event()

    class Pictures:
        def needs_fetching(self, media: Any) -> bool:
            return True

        async def fetch(self, media: Any) -> dict[str, bytes]:
            is_asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                is_left.set()
            return {}

    monkeypatch.setattr(engine.inputs, "media_processor_of", lambda media: Pictures())
    url = "http://pictures.test/a.png"
    parts: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"type": "image_url", "image_url": {"url": url}},
        "/v1/messages": {"type": "image", "source": {"type": "url", "url": url}},
        "/v1/responses": {"type": "input_image", "image_url": url},
    }
    turns = [{"role": "user", "content": [parts[route]]}]
    body = {"input": turns} if route == "/v1/responses" else {"messages": turns, "max_tokens": 1}
    ask_and_leave(address, route, {"model": MODEL, "stream": stream} | body, once=is_asked.is_set)
    wait_until(is_left.is_set)
    assert not engine.active


def test_a_cancelled_caller_does_not_wait_for_its_work() -> None:
    has_begun, may_go = threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        may_go.wait()

    async def use() -> None:
        task = asyncio.create_task(run_off_loop(work, length=MAX_INLINE_LENGTH + 1))
        await until(has_begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not may_go.is_set()
        may_go.set()

    asyncio.run(use())


@pytest.mark.parametrize("size", [100, MAX_INLINE_BYTES + 1])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ('{"prompt": "a", "user": "%s"}', 200, None),
        ('{"prompt": "a", "user": "%s", "max_tokens": "5"}', 400, "max_tokens should be a valid integer, got '5'."),
        ('{"prompt": "a", "user": "%s", "mood": 1}', 400, "Unrecognized request argument supplied: mood"),
        ('{"prompt": "a", "user": "%s", "stream_options": {}}', 400, "stream_options is only allowed when stream is"),
        ('{"prompt": "a", "user": "%s", "service_tier": "b"}', 400, "service_tier is not built yet; leave it out."),
        ('{"user": "%s"}', 400, "prompt is required."),
        ('["%s"]', 400, "The body must be a JSON object."),
        ('{"prompt": "a", "user": "%s"', 400, "The body is not valid JSON: Expecting ',' delimiter at character"),
        ('{"prompt": "a", "user": "%s", "n": ' + "[" * 100_000, 400, "The body is nested too deeply: "),
    ],
)
def test_long_bodies_are_checked_like_short_ones(
    http: httpx.Client, size: int, body: str, status: int, message: str | None
) -> None:
    content = (body % ("x" * size)).encode()
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert message is None or answer.json()["error"]["message"].startswith(message)


def test_others_go_on_while_a_long_body_is_checked(
    http: httpx.Client, engine: FakeEngine, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "validate_body", hold.around(router.validate_body))
    body = {**SHORT, "user": LONG * 8}
    assert meanwhile(http, hold, "/v1/completions", body).status_code == 200


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = list[int]()
    encode = engine.inputs.encode

    def note(text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(engine.inputs, "encode", note)
    text = "x" * 300_000
    for route, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", talk(text))):
        answer = http.post(route, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert max(lengths) < 20_000, "all of it is tokenized"
    answer = http.post("/v1/completions", json={"prompt": text, "truncate_prompt_tokens": 9})
    assert answer.status_code == 200 and max(lengths) == 300_000, "its end is wanted"
