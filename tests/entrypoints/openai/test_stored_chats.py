"""Chats that are kept: through the real client, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from octavo.entrypoints.chat.media_parts import as_sent
from octavo.entrypoints.openai.chat_messages import ChatMessage
from tests.entrypoints.fake_engine import MODEL, FakeEngine

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_a_stored_chat_is_found_changed_and_deleted(client: openai.OpenAI, engine: FakeEngine) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "store": True}
    whole = client.chat.completions.create(**asked, metadata={"who": "me"})
    assert client.chat.completions.retrieve(whole.id).choices[0].message.content == "Hello there"
    stream = client.chat.completions.create(**asked, stream=True)
    streamed = {chunk.id for chunk in stream}.pop()
    kept = client.chat.completions.retrieve(streamed)
    assert kept.choices[0].message.content == "Hello there" and kept.choices[0].finish_reason == "stop"
    assert kept.usage is not None and kept.usage.completion_tokens == 12
    unkept = client.chat.completions.create(model=MODEL, messages=HELLO, metadata={"who": "me"})
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(unkept.id)

    listed = [chat.id for chat in client.chat.completions.list()]
    assert listed[-2:] == [whole.id, streamed]
    assert [chat.id for chat in client.chat.completions.list(metadata={"who": "me"})] == [whole.id]
    assert [chat.id for chat in client.chat.completions.list(limit=1, order="desc")][:2] == [streamed, whole.id]
    messages = client.chat.completions.messages.list(whole.id).data
    assert [message.content for message in messages] == ["Be brief.", "Hi"]
    client.chat.completions.update(whole.id, metadata={"who": "you"})
    assert client.chat.completions.retrieve(whole.id).metadata == {"who": "you"}  # type: ignore[attr-defined]
    for id in (whole.id, streamed):
        assert client.chat.completions.delete(id).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.messages.list(whole.id)


@pytest.mark.parametrize("stream", [False, True])
def test_no_client_can_put_a_chat_in_the_place_of_anothers(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "store": True, "stream": stream}
    ids = []
    for given in ({"extra_headers": {"X-Request-Id": "mine"}}, {"extra_body": {"request_id": "mine"}}) * 2:
        answer: Any = client.chat.completions.create(**asked, **given)
        ids.append({chunk.id for chunk in answer}.pop() if stream else answer.id)
    assert len({client.chat.completions.retrieve(id).id for id in ids}) == 4


def test_what_cannot_be_stored_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "store": True, "n": 2})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "store"


def test_a_chat_is_kept_as_it_was_sent(http: httpx.Client, engine: FakeEngine) -> None:
    """With its fields that are null, and the log-probabilities of a stream."""
    called = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    messages = [*HELLO, called, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    body = {"messages": messages, "store": True, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    sent = http.post("/v1/chat/completions", json=body).json()
    kept = http.get(f"/v1/chat/completions/{sent['id']}").json()
    assert kept == {**sent, "metadata": {}, "request_id": sent["id"]}
    assert kept["choices"][0]["message"]["refusal"] is None
    stream = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    id = json.loads(stream.partition("data: ")[2].partition("\n")[0])["id"]
    streamed = http.get(f"/v1/chat/completions/{id}").json()
    assert streamed["choices"] == sent["choices"]
    plain = http.post("/v1/chat/completions", json={"messages": HELLO, "store": True}).json()
    assert http.get(f"/v1/chat/completions/{plain['id']}").json()["choices"][0]["logprobs"] is None
    found = http.get(f"/v1/chat/completions/{id}/messages").json()["data"]
    assert found[2]["content"] is None and found[2]["tool_calls"][0]["function"]["name"] == "f"


def test_a_list_does_not_end_early_after_a_deleted_object(client: openai.OpenAI, engine: FakeEngine) -> None:
    """Its next page would be empty, and a loop that deletes everything would leave most of it."""
    asked: Any = {"model": MODEL, "messages": HELLO, "store": True, "metadata": {"page": "x"}}
    ids = [client.chat.completions.create(**asked).id for _ in range(2)]
    page = client.chat.completions.list(metadata={"page": "x"}, limit=1)
    client.chat.completions.delete(ids[0])
    with pytest.raises(openai.BadRequestError, match="in this list") as refused:
        page.get_next_page()
    assert refused.value.param == "after"
    for gone in (client.files, client.batches):
        with pytest.raises(openai.BadRequestError, match="in this list"):
            gone.list(after="gone")  # type: ignore[attr-defined]
    client.chat.completions.delete(ids[1])


def test_messages_of_parts_are_listed_with_their_parts(client: openai.OpenAI, engine: FakeEngine) -> None:
    parts: Any = [{"type": "text", "text": "Look at "}, {"type": "text", "text": "this."}]
    asked: Any = [{"role": "user", "content": parts}]
    chat = client.chat.completions.create(model=MODEL, messages=asked, store=True)
    [message] = client.chat.completions.messages.list(chat.id).data
    assert message.content == "Look at this." and message.to_dict()["content_parts"] == parts


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "video_url", "video_url": {"url": "https://a.example/b.mp4"}, "uuid": "film"},
        {"type": "audio_url", "audio_url": None, "uuid": "song"},
        {"type": "image_embeds", "image_embeds": {"image_embeds": "AA=="}},
    ],
)
def test_a_medium_is_kept_as_it_was_sent(part: dict[str, Any]) -> None:
    read = ChatMessage.model_validate({"role": "user", "content": [part]}).content
    assert isinstance(read, list) and [as_sent(one) for one in read] == [part]


@pytest.mark.parametrize("metadata", [{str(i): "x" for i in range(17)}, {"a": 1}, {"a": "\ud800"}, {"a": None}])
def test_metadata_of_a_stored_chat_are_sixteen_texts(http: httpx.Client, metadata: dict[str, Any]) -> None:
    body = {"messages": HELLO, "metadata": metadata}
    content = json.dumps({**body, "store": True})
    answer = http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "metadata"
    assert http.post("/v1/chat/completions", json={"messages": HELLO, "metadata": {"a": 1}}).status_code == 200
