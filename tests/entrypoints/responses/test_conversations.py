"""OpenAI's Conversations API through its client: what is kept, and responses that go on with it."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from octavo.entrypoints.http.piecewise_json import pack, unpack
from octavo.entrypoints.http.store import Database
from octavo.entrypoints.http.streaming import encode_json
from octavo.entrypoints.responses import stored_conversations, stored_responses
from octavo.errors import RequestError
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving
from tests.waiting import wait_until, within

HI: Any = {"type": "message", "role": "user", "content": "Hi"}


def texts(client: openai.OpenAI, conversation_id: str) -> list[str]:
    """The texts of a conversation's messages, the first first."""
    items: Any = client.conversations.items.list(conversation_id, order="asc")
    return [item.content[0].text for item in items]


def prompt(engine: FakeEngine) -> str:
    return str(engine.tokenizer.decode(engine.seen[-1][0]))


def test_a_conversation_is_made_changed_listed_and_deleted(client: openai.OpenAI) -> None:
    call: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c1", "output": "7"}
    made = client.conversations.create(items=[HI, call], metadata={"who": "me"})
    assert (made.object, made.metadata, made.id[:5]) == ("conversation", {"who": "me"}, "conv_")
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"who": "you"})
    assert changed.metadata == {"who": "you"} and changed.created_at == made.created_at
    added = client.conversations.items.create(made.id, items=[output, HI])
    assert [item.type for item in added.data] == ["function_call_output", "message"] and not added.has_more
    listed = list(client.conversations.items.list(made.id, limit=3))  # the client asks for the second page
    assert [item.type for item in listed] == ["message", "function_call_output", "function_call", "message"]
    assert len({item.id for item in listed}) == 4
    output_id = str(listed[1].id)
    found = client.conversations.items.retrieve(output_id, conversation_id=made.id)
    assert found.type == "function_call_output" and found.output == "7"
    assert client.conversations.items.delete(output_id, conversation_id=made.id) == changed
    assert len(client.conversations.items.list(made.id).data) == 3
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
    for again in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            again(made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(output_id, conversation_id=made.id)


@pytest.mark.parametrize("way", ["whole", "stream", "background"])
def test_a_response_goes_on_with_a_conversation_and_is_added_to_it(
    client: openai.OpenAI, engine: FakeEngine, way: str
) -> None:
    given: Any = {"role": "developer", "content": "Be brief."}
    id = client.conversations.create(items=[given]).id

    def say(text: str, conversation: Any) -> None:
        asked: Any = {"model": MODEL, "input": text, "conversation": conversation, "store": way == "background"}
        if way == "stream":
            last: Any = list(client.responses.create(**asked, stream=True))[-1]
            assert (last.type, last.response.conversation.id) == ("response.completed", id)
        elif way == "background":
            made = client.responses.create(**asked, background=True)
            wait_until(lambda: client.responses.retrieve(made.id).status == "completed")
        else:
            assert client.responses.create(**asked).conversation.id == id  # type: ignore[union-attr]

    say("One?", id)
    assert texts(client, id) == ["Be brief.", "One?", "Hello there"]
    say("Two?", {"id": id})
    assert prompt(engine) == "system: Be brief.\nuser: One?\nassistant: Hello there\nuser: Two?\nassistant:"
    assert texts(client, id) == ["Be brief.", "One?", "Hello there", "Two?", "Hello there"]
    counted = client.responses.input_tokens.count(model=MODEL, input="Two?", conversation=id)
    assert counted.input_tokens > len(engine.seen[-1][0])


def test_a_response_after_one_of_a_conversation_has_all_that_was_said_before(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    id = client.conversations.create(items=[HI]).id
    first = client.responses.create(model=MODEL, input="One?", conversation=id)
    client.responses.create(model=MODEL, input="Elsewhere?", conversation=id)
    after = client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)
    assert prompt(engine) == "user: Hi\nuser: One?\nassistant: Hello there\nuser: Two?\nassistant:"
    assert after.conversation is None and len(texts(client, id)) == 5
    question = client.conversations.items.list(id, order="asc").data[1]
    assert question.id is not None
    client.conversations.items.delete(question.id, conversation_id=id)
    client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)
    assert prompt(engine) == "user: Hi\nuser: One?\nassistant: Hello there\nuser: Two?\nassistant:"


def test_answers_that_fail_or_are_cut_off_by_the_client_are_not_added(
    client: openai.OpenAI, http: httpx.Client, engine: FakeEngine
) -> None:
    id = client.conversations.create(items=[HI]).id
    engine.fails_after = (3, RuntimeError("lost"))
    assert http.post("/v1/responses", json={"input": "?", "conversation": id}).status_code == 500
    engine.fails_after = None
    engine.is_paused = True
    with http.stream("POST", "/v1/responses", json={"input": "?", "conversation": id, "stream": True}) as answer:
        next(answer.iter_lines())
    wait_until(lambda: not engine.active)
    engine.is_paused = False
    assert texts(client, id) == ["Hi"]
    cut = client.responses.create(model=MODEL, input="Go on", conversation=id, max_output_tokens=5)
    assert cut.status == "incomplete" and texts(client, id) == ["Hi", "Go on", "Hello"]


def test_a_turn_that_cannot_be_kept_is_an_error(client: openai.OpenAI, http: httpx.Client, engine: FakeEngine) -> None:
    """The next turn would silently miss it."""
    for is_streamed in (False, True):
        id = client.conversations.create(items=[HI]).id
        engine.is_paused = True
        with http.stream(
            "POST", "/v1/responses", json={"input": "?", "conversation": id, "background": True, "stream": is_streamed}
        ) as answer:
            wait_until(lambda: bool(engine.active))
            client.conversations.delete(id)
            engine.is_paused = False
            made = answer.read()
        if not is_streamed:
            response_id = httpx.Response(200, content=made).json()["id"]
            wait_until(lambda id=response_id: client.responses.retrieve(id).status == "failed")  # type: ignore[misc]
        else:
            assert b"response.failed" in made and b"response.completed" not in made


def test_a_reference_to_what_was_said_adds_nothing(client: openai.OpenAI, engine: FakeEngine) -> None:
    """Whoever named the item: the conversation, a client, or an earlier response."""
    mine: Any = {**HI, "id": "mine"}
    id = client.conversations.create(items=[mine, HI]).id
    said = [item.id for item in client.conversations.items.list(id, order="asc").data]
    references: Any = [{"type": "item_reference", "id": one} for one in said]
    again: Any = {"role": "user", "content": "Again"}
    first = client.responses.create(model=MODEL, input=[*references, again], conversation=id)
    assert texts(client, id) == ["Hi", "Hi", "Again", "Hello there"]
    assert prompt(engine) == "user: Hi\nuser: Hi\nuser: Again\nassistant:"
    references += [{"type": "item_reference", "id": first.output[0].id}]
    client.conversations.items.create(id, items=[*references, {**HI, "id": "other"}])
    assert texts(client, id) == ["Hi", "Hi", "Again", "Hello there", "Hi"]
    one: Any = {**HI, "id": "own"}
    response = client.responses.create(model=MODEL, input=[one])
    for _ in range(2):
        more: Any = [{"type": "item_reference", "id": "own"}, {"type": "item_reference", "id": response.output[0].id}]
        response = client.responses.create(model=MODEL, input=[*more, again], previous_response_id=response.id)
    assert prompt(engine).count("user: Hi\n") == 1 and prompt(engine).count("user: Again\n") == 2


def test_an_item_that_is_there_already_is_refused_before_it_is_answered(
    client: openai.OpenAI, http: httpx.Client, engine: FakeEngine
) -> None:
    mine: Any = {**HI, "id": "mine"}
    id = client.conversations.create(items=[mine]).id
    for items in ([mine], [{**HI, "id": "two"}, {**HI, "id": "two"}]):
        answer = http.post("/v1/responses", json={"input": items, "conversation": id})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input"), answer.text
    assert not engine.seen and texts(client, id) == ["Hi"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("", {"items": [{"role": "nobody", "content": "x"}]}, 400, "items[0].role"),
        ("", {"items": [{"type": "item_reference", "id": "msg_1"}]}, 404, "items"),
        ("", {"metadata": {"k": 1}}, 400, "metadata.k"),
        ("", {"nonsense": 1}, 400, "nonsense"),
        ("/{id}/items", {"items": "Hi"}, 400, "items"),
        ("/{id}/items", {}, 400, "items"),
        ("/{id}/items", {"items": [{**HI, "id": "msg_a"}, {**HI, "id": "msg_a"}]}, 400, "items"),
        ("/{id}/items", {"items": [{**HI, "id": "msg_known"}]}, 400, "items"),
        ("/{id}/items?include[]=message.output_text.logprobs", {"items": [HI]}, 400, "include"),
        ("/conv_no/items", {"items": [HI]}, 404, "conversation"),
        ("/conv_no", {"metadata": {}}, 404, "conversation"),
    ],
)
def test_refusals_name_the_field_and_change_nothing(
    client: openai.OpenAI, http: httpx.Client, path: str, body: Any, status: int, param: str
) -> None:
    known: Any = {**HI, "id": "msg_known"}
    id = client.conversations.create(items=[known]).id
    answer = http.post("/v1/conversations" + path.format(id=id), json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert texts(client, id) == ["Hi"]


def test_conversations_share_the_bound_of_the_store_and_those_not_used_for_longest_leave(
    shared_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(shared_engine, response_store_bytes=200_000, disable_log_requests=True) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=within(60)) as client,
    ):
        long: Any = {**HI, "content": "x" * 3_000}
        used, *others = [client.conversations.create(items=[long]).id for _ in range(30)]
        client.conversations.items.create(used, items=[HI])
        for _ in range(20):
            client.conversations.create(items=[long])
        assert len(texts(client, used)) == 2
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(others[0])
        with pytest.raises(openai.InternalServerError, match="no room"):
            client.conversations.items.create(used, items=[{**HI, "content": "x" * 300_000}])
        assert len(texts(client, used)) == 2  # what is refused leaves it as it was
        monkeypatch.setattr(Database, "put", lambda *_, **__: pytest.fail("a refused body reaches no store"))
        with pytest.raises(openai.BadRequestError):
            client.conversations.create(items=[{**HI, "role": "nobody"}])


def test_a_conversation_has_twice_the_bytes_of_a_body_at_most(shared_engine: FakeEngine) -> None:
    with (
        serving(shared_engine, max_body_bytes=4_000, disable_log_requests=True) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=within(60)) as client,
    ):
        long: Any = {**HI, "content": "x" * 3_000}
        id = client.conversations.create(items=[long]).id
        client.conversations.items.create(id, items=[long])
        with pytest.raises(openai.APIStatusError, match="8000 is the most here") as refusal:
            client.conversations.items.create(id, items=[long])
        assert (refusal.value.status_code, refusal.value.param) == (413, "items") and len(texts(client, id)) == 2
        client.conversations.items.create(id, items=[HI])

        def go_on(response_id: str | None, num_turns: int) -> None:
            for _ in range(num_turns):
                made = client.responses.create(
                    model=MODEL, input="x" * 300, truncation="auto", previous_response_id=response_id
                )
                response_id = made.id

        with pytest.raises(openai.APIStatusError, match="8000 is the most here") as refusal:
            go_on(None, 25)
        assert (refusal.value.status_code, refusal.value.param) == (413, "previous_response_id")
    database = Database(None, 1 << 20)
    conversation = stored_conversations.create(database, {}, [{**HI, "id": "one"}])
    with pytest.raises(RequestError, match="9 is the most here"):
        stored_responses.with_history(database, None, conversation["id"], [], 9)
    with pytest.raises(RequestError, match="9 is the most here"):
        stored_conversations.create(database, {}, [{**HI, "id": "one"}], 9)


def test_a_conversation_has_the_parts_of_a_request_at_most(shared_engine: FakeEngine) -> None:
    with (
        serving(shared_engine, max_parts=6, disable_log_requests=True) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=within(60)) as client,
    ):
        id = client.conversations.create(items=[HI, HI]).id
        with pytest.raises(openai.BadRequestError, match="items has 8 messages and parts"):
            client.conversations.items.create(id, items=[HI, HI])  # each has a part
        assert len(texts(client, id)) == 2
        several = client.responses.create(model=MODEL, input=[HI, HI, HI, HI])
        said: Any = client.responses.input_items.list(several.id).data
        with pytest.raises(openai.BadRequestError, match="items has 8 messages and parts"):
            client.conversations.create(items=[{"type": "item_reference", "id": item.id} for item in said])
        made = client.responses.create(model=MODEL, input="Hi", conversation=id)
        for history in ({"conversation": id}, {"previous_response_id": made.id}):
            with pytest.raises(openai.BadRequestError, match="input has 10 messages and parts"):
                client.responses.create(model=MODEL, input="Hi", **history)  # type: ignore[arg-type]


def test_a_response_is_read_once_for_all_references_to_its_items(
    client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = client.responses.create(model=MODEL, input=[HI, HI, HI])
    said: Any = client.responses.input_items.list(given.id, order="asc").data
    gets: list[str] = []
    get = Database.get

    def counted(self: Database, kind: str, id: str) -> Any:
        gets.append(id)
        return get(self, kind, id)

    monkeypatch.setattr(Database, "get", counted)
    client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": item.id} for item in said])
    assert prompt(engine) == "user: Hi\nuser: Hi\nuser: Hi\nassistant:" and gets.count(given.id) == 1


def test_objects_of_earlier_versions_are_read() -> None:
    items: Any = [{"id": "a\n"}, {"id": "b"}]
    assert unpack(pack(items)) == unpack(encode_json(items)) == items and unpack(pack([])) == unpack(None) == []
