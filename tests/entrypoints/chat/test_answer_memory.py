"""Tokens of earlier answers in the prompts of their conversations: found where they are, and nowhere else."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.entrypoints.chat.answer_memory import (
    AnswerMemory,
    AnswerReading,
    Recalled,
    RememberedAnswer,
    _Said,
    _said,
    _size,
    message_keys,
    recall,
    remembered,
    text_digest,
)
from octavo.entrypoints.chat.answer_reader import AnswerFormat
from octavo.entrypoints.chat.chat_run import ChatPrompt, make_chat
from octavo.entrypoints.chat.message_rendering import render_messages
from octavo.entrypoints.chat.tools.format_detection import _TURN_ENDS, ModelFormats, model_formats
from octavo.entrypoints.http.server_state import PreparedPrompt
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.errors import RequestError
from octavo.loading.tokenizer import ModelTokenizer
from octavo.request import pack_tokens
from octavo.sampling_params import SamplingParams
from tests.entrypoints.chat.published import SPECIAL
from tests.entrypoints.chat.test_history_fuzz import TEMPLATES
from tests.entrypoints.chat.tools.test_format_detection import THINK, TOOL_TEMPLATES, chat, each
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving
from tests.waiting import within

Message = dict[str, Any]
ENDS = (
    *_TURN_ENDS,
    "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
    "<SPECIAL_12>",
    "<|return|>",
    "<|call|>",
    "<|end|>",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def bytes_tokenizer(template: str, ends: Sequence[str] = ENDS) -> ModelTokenizer:
    """A tokenizer of bytes whose marks of turns' ends are tokens."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*ends, "<s>", "<unk>"])
    return ModelTokenizer(backend, SPECIAL, chat_template=template)


class Server:
    """What a server does with the prompts and answers of one template."""

    def __init__(self, template: str, formats: ModelFormats | None = None, memory: AnswerMemory | None = None) -> None:
        self.tokenizer = bytes_tokenizer(template)
        self.formats = formats or model_formats(self.tokenizer)
        self.memory = AnswerMemory(1 << 20) if memory is None else memory
        self.ends = [self.tokenizer.convert_tokens_to_ids(end) for end in ENDS]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def said(self, body: ChatCompletionRequest, message: Message, text: str) -> _Said:
        """What a text says in the place of the message, as answer to a prompt."""
        [sent] = talk(message).messages
        reading = AnswerReading(self.tokenizer, self.formats, schemas_of(body), self.encode)
        return _said(text, self.render(body), sent, reading)

    def render(self, body: ChatCompletionRequest) -> str:
        return render_messages(self.tokenizer, body, body.messages, body.tools, trusts_template=True)

    def recalled(self, body: ChatCompletionRequest) -> Recalled | None:
        reading = AnswerReading(self.tokenizer, self.formats, schemas_of(body), self.encode)
        keys = message_keys(body.messages, body.cache_salt)
        return recall(self.memory, keys, body.messages, self.render(body), reading)

    def answer(self, body: ChatCompletionRequest, text: str) -> list[int]:
        """Remember that a prompt was answered with a text; return the tokens of both."""
        prompt, found = self.render(body), self.recalled(body)
        prompt_ids = self.encode(prompt) if found is None else found.token_ids
        keys, about = message_keys(body.messages, body.cache_salt), (len(prompt), text_digest(prompt))
        formats = self.tokenizer, self.formats
        self.memory.add(remembered(keys[-1], found, prompt_ids, self.encode(text), self.ends, about, *formats))
        return prompt_ids + self.encode(text)

    def written(self, body: ChatCompletionRequest, message: Message, next_one: Message) -> tuple[str, str]:
        """What the template writes for an answer to a prompt, and the mark of its end; empty if there is none."""
        prompt, after = self.render(body), self.render(followed(body, message, next_one))
        if not after.startswith(prompt):
            return "", ""
        places = {end: after.find(end, len(prompt)) for end in ENDS}
        end = min((place, end) for end, place in {**places, "": len(after)}.items() if place >= 0)[1]
        return after[len(prompt) : after.find(end, len(prompt))], end


def schemas_of(body: ChatCompletionRequest) -> dict[str, dict[str, Any]]:
    return {tool.function.name: tool.function.schema_of_arguments for tool in body.tools or ()}


def talk(*messages: Message, **fields: Any) -> ChatCompletionRequest:
    return make_chat({"messages": list(messages), **fields})


def followed(body: ChatCompletionRequest, *messages: Message) -> ChatCompletionRequest:
    return body.model_copy(update={"messages": [*body.messages, *talk(*messages).messages]})


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def odd(text: str, choose: random.Random) -> str:
    """The text as a model may write it: JSON with other blanks."""
    for _ in range(3):
        old, new = choose.choice([('": ', '":'), (", ", ","), ("{", "{ "), ("}", " }"), ("\n", "\n\n"), (":", ": ")])
        text = text.replace(old, new)
    return text


def random_answer(choose: random.Random, number: int, thinks: bool, calls: bool) -> Message:
    message: Message = {"role": "assistant", "content": None}
    if calls or choose.random() < 0.6:
        arguments = {"at": choose.choice(["Rome", 'né "w" 世', "a\nb", "<x>"]), "days": choose.randrange(9)}
        call = {"name": "look", "arguments": json.dumps(dict(choose.sample(list(arguments.items()), 2)))}
        message["tool_calls"] = [{"id": f"abcdefgh{number}", "type": "function", "function": call}]
    else:
        message["content"] = f"Answer {number}."
    if thinks:
        message["reasoning_content"] = f"Thought {number}."
    return message


# Templates that say what is an answer and what ends it, as models write it.
RECALLED = {
    "SHORT_IDS", "hermes", "qwen3_coder", "llama3_json", "pythonic", "olmo3", "lfm2", "mistral", "deepseek_v3",
    "deepseek_v31", "kimi_k2", "granite", "phi4_mini", "minimax", "minimax_m2", "xlam", "seed_oss", "minimax_m3",
    "deepseek_v32", "deepseek_v4", "mistral_list", "apertus", "minicpm5", "solar_open2", "thinks", "thinks_in_turn",
}  # fmt: skip
CALLS = each('<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>', "\n")
THINKING = chat(f"{THINK}{CALLS}", answer=THINK)
# As Qwen3's: reasoning stays until the user says something new.
THINKING_IN_TURN = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
) + THINKING.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.index0 > ns.last %}")
REASONING_TEMPLATES = {"thinks": THINKING, "thinks_in_turn": THINKING_IN_TURN}


@pytest.mark.parametrize("name", [*TEMPLATES, *REASONING_TEMPLATES])
def test_what_is_recalled_is_what_was_said(name: str) -> None:
    """Answers are as the template writes them, but for blanks in JSON and around marks."""
    template = (TEMPLATES | REASONING_TEMPLATES)[name]
    choose, server = random.Random(name), Server(template)
    body, num_recalled = talk(user("Look."), tools=[TOOL]), 0
    for number in range(8):
        message = random_answer(choose, number, server.formats.reasoning is not None, name == "thinks_in_turn")
        try:
            text, end = server.written(body, message, following(message))
        except RequestError:
            break
        said = server.said(body, message, text)
        for call, (_, _, own) in zip(message.get("tool_calls", ()), said.calls, strict=False):
            call["id"] = own or call["id"]  # the server gives the model's own ids to clients
        [sent] = talk(message).messages
        if not end or not said.is_of(sent):
            break
        own = odd(text, choose)
        own = own if server.said(body, message, own) == said else text
        token_ids = server.answer(body, own + end)
        next_one = following(message)
        last, body = body, followed(body, message, next_one)
        found = server.recalled(body)
        if found is None:
            break
        num_recalled += 1
        assert found.token_ids[: len(token_ids)] == token_ids
        rendered = server.render(body)[len(server.render(last)) + len(text) + len(end) :]
        assert server.tokenizer.decode(found.token_ids[len(token_ids) :]) == rendered
        for wrong in altered(message, choose):
            found = server.recalled(followed(last, wrong, next_one))
            assert found is None or found.answer.key != message_keys(last.messages, None)[-1], wrong
    assert num_recalled == 8 or name not in RECALLED


def following(message: Message) -> Message:
    """What comes after an answer."""
    calls = message.get("tool_calls")
    return {"role": "tool", "tool_call_id": calls[0]["id"], "content": "7"} if calls else user("Next")


def altered(message: Message, choose: random.Random) -> list[Message]:
    """The message with one thing changed."""
    found = [{**message, "content": (message["content"] or "") + "!"}]
    if "reasoning_content" in message:
        found += [{**message, "reasoning_content": "Other."}, {**message, "reasoning_content": None}]
    for call in message.get("tool_calls", ()):
        for function in (
            {**call["function"], "name": "other"},
            {**call["function"], "arguments": json.dumps({"at": "elsewhere", "days": 10})},
        ):
            found.append({**message, "tool_calls": [{**call, "function": function}]})
        found.append({**message, "tool_calls": [call, {**call, "id": "abcdefghX"}]})
        found.append({**message, "tool_calls": None, "content": "None"})
    return found


def test_the_longest_history_is_recalled_and_others_are_not() -> None:
    server = Server(TOOL_TEMPLATES["hermes"])
    first = talk(user("One?"))
    one = server.answer(first, "1 <|im_end|>")
    second = followed(first, {"role": "assistant", "content": "1"}, user("Two?"))
    two = server.answer(second, " 2<|im_end|>")
    assert two[: len(one)] == one
    third = followed(second, {"role": "assistant", "content": "2"}, user("Three?"))
    found = server.recalled(third)
    assert found is not None and found.token_ids[: len(two)] == two
    other = followed(second, {"role": "assistant", "content": "not 2"}, user("Three?"))
    found = server.recalled(other)
    assert (
        found is not None and found.token_ids[: len(one)] == one and "not 2" in server.tokenizer.decode(found.token_ids)
    )
    for changed in (
        third.model_copy(update={"cache_salt": "s"}),
        talk(
            {"role": "system", "content": "S"}, *({"role": one.role, "content": one.content} for one in third.messages)
        ),
        third.model_copy(update={"tools": talk(user("x"), tools=[TOOL]).tools}),
    ):
        assert server.recalled(changed) is None


def test_an_answer_that_was_cut_is_recalled_where_the_template_goes_on_with_its_text() -> None:
    server = Server(TOOL_TEMPLATES["hermes"])
    first = talk(user("One?"))
    token_ids = server.answer(first, "Once upon")
    found = server.recalled(followed(first, {"role": "assistant", "content": "Once upon"}, user("Go on")))
    assert found is not None and found.token_ids[: len(token_ids)] == token_ids
    assert server.tokenizer.decode(found.token_ids[len(token_ids) :]).startswith("<|im_end|>\n")
    assert server.recalled(followed(first, {"role": "assistant", "content": "Once upon a time"}, user("Go on"))) is None
    assert server.recalled(followed(first, {"role": "assistant", "content": "Once"}, user("Go on"))) is None


def test_reasoning_that_a_template_drops_stays_dropped() -> None:
    server = Server(THINKING_IN_TURN)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = talk(user("Look."), tools=[TOOL])
    token_ids = server.answer(
        asked, '<think>\nHm\n</think>\n\n<tool_call>{"name":"look","arguments":{}}</tool_call><|im_end|>'
    )
    called = {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    within = followed(asked, called, result)
    found = server.recalled(within)
    assert found is not None and found.token_ids[: len(token_ids)] == token_ids
    server.answer(within, "<think>\nSo\n</think>\n\n7.<|im_end|>")
    said = {"role": "assistant", "content": "7.", "reasoning_content": "So"}
    assert server.recalled(followed(within, said, user("Thanks"))) is None
    assert server.recalled(followed(within, {**said, "reasoning_content": None}, user("Thanks"))) is None


HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
    "{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.look to=assistant<|channel|>commentary<|message|>{{ m.content }}"
    "<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_calls_and_final_messages_of_harmony_are_recalled() -> None:
    """The final message ends with another token than in histories, and its analysis is dropped there."""
    server = Server(HARMONY)
    asked = talk(user("Look."), tools=[TOOL])
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"Rome"}<|call|>'
    token_ids = server.answer(asked, thought + call)
    function = {"name": "look", "arguments": '{"at": "Rome"}'}
    called = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    called["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
    looked = followed(asked, called, following(called))
    found = server.recalled(looked)
    assert found is not None and found.token_ids[: len(token_ids)] == token_ids
    said, final = {"role": "assistant", "content": "7."}, "<|channel|>final<|message|>7."
    token_ids = server.answer(looked, final + "<|return|>")
    thanks = followed(looked, said, user("Thanks"))
    found = server.recalled(thanks)
    assert found is not None and found.token_ids[: len(token_ids) - 1] == token_ids[:-1]
    assert server.tokenizer.decode(found.token_ids).count("<|return|>") == 0
    other = talk(user("Other."))
    server.answer(other, thought + final + "<|return|>")
    assert server.recalled(followed(other, {**said, "reasoning_content": "Hm"}, user("Thanks"))) is None


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_a_final_message_of_harmony_stays_as_it_is_where_the_tokenizer_has_no_other_end(unknown: str | None) -> None:
    special = {role: token for role, token in SPECIAL.items() if role != "unk_token"}
    if unknown is not None:
        special["unk_token"] = unknown
    backend = bytes_tokenizer(HARMONY, [end for end in ENDS if end != "<|end|>"]).backend_tokenizer
    tokenizer = ModelTokenizer(backend, special, chat_template=HARMONY)
    answer = tokenizer.encode("7.<|return|>", add_special_tokens=False)
    formats = model_formats(tokenizer)
    assert formats.reasoning is not None and formats.reasoning.has_channels
    kept = remembered(b"", None, [], answer, answer[-1:], (0, b""), tokenizer, formats)
    assert kept.tokens == pack_tokens(answer) and kept.has_end


def test_a_memory_is_bounded_and_forgets_what_was_not_used_for_longest() -> None:
    memory = AnswerMemory(20_000)
    server = Server(TOOL_TEMPLATES["hermes"], memory=memory)
    talks = [talk(user(f"{i}?")) for i in range(30)]
    for body in talks:
        server.answer(body, "x" * 100 + "<|im_end|>")
        assert server.recalled(followed(talks[0], {"role": "assistant", "content": "x" * 100}, user("Go on")))
    assert memory._num_bytes <= 20_000
    assert memory._num_bytes == sum(map(_size, (one for kept in memory._answers.values() for one in kept)))
    assert server.recalled(followed(talks[1], {"role": "assistant", "content": "x" * 100}, user("Go on"))) is None
    for i in range(20):  # as many answers to one question
        server.answer(talks[0], f"{i}<|im_end|>")
    [key] = message_keys(talks[0].messages, None)
    assert len(memory.find(key)) == 8
    assert memory._num_bytes == sum(map(_size, (one for kept in memory._answers.values() for one in kept)))


def test_a_long_conversation_keeps_its_beginning_within_the_bound() -> None:
    memory = AnswerMemory(20_000)
    server = Server(TOOL_TEMPLATES["hermes"], memory=memory)
    body, first = talk(user("0?")), list[int]()
    for i in range(20):
        token_ids = server.answer(body, "x" * 300 + "<|im_end|>")
        first = first or token_ids
        body = followed(body, {"role": "assistant", "content": "x" * 300}, user(f"{i}?"))
        assert sum(len(one.tokens) for one in reached(memory)) <= memory._num_bytes <= 20_000
    found = server.recalled(body)
    assert found is not None and found.token_ids[: len(first)] == first
    assert found.num_known > 4 * len(first), "more than the first answer is there"
    keys = message_keys(body.messages, None)
    del memory._answers[keys[0]]
    assert server.recalled(body) is None, "an answer whose beginning is gone is not used"


def reached(memory: AnswerMemory) -> list[RememberedAnswer]:
    """All answers that a memory keeps alive."""
    seen: dict[int, Any] = {}
    left: list[Any] = [memory._answers]
    while left:
        one = left.pop()
        if id(one) not in seen and isinstance(one, (RememberedAnswer, dict, list, tuple)):
            seen[id(one)] = one
            left += gc.get_referents(one)
    return [one for one in seen.values() if isinstance(one, RememberedAnswer)]


@pytest.fixture(scope="module")
def talking(tiny_tokenizer: Path) -> FakeEngine:
    engine = FakeEngine(tiny_tokenizer, max_model_len=4096)
    engine.tokenizer.chat_template = chat(f"{THINK}{CALLS}", answer=THINK, end="</s>\n")
    return engine


@pytest.fixture
def engine(talking: FakeEngine) -> FakeEngine:
    talking.reset()
    return talking


OWN = '<think>\nHm\n</think>\n\nI look.\n<tool_call>{"name":"look","arguments":{"days":1,"at":"Rome"}}</tool_call>'
PARAMETERS = TOOL["function"]["parameters"]  # type: ignore[index]


def by_chats(http: httpx.Client, is_streamed: bool, **fields: Any) -> Iterator[None]:
    """A conversation of two turns by chat completions; it pauses before the second."""
    messages: list[Message] = [user("Where?")]
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "messages": messages, "tools": [TOOL], "extra_body": fields}
        if is_streamed:
            with client.chat.completions.stream(**asked) as stream:
                message: Any = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        sent = {name: value for name, value in message.to_dict().items() if name in (
            "role", "content", "tool_calls", "reasoning_content"
        )}  # fmt: skip
        for call in sent["tool_calls"]:  # what the stream helper adds
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        result = {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "7"}
        if is_streamed:  # the helper keeps no reasoning
            sent["reasoning_content"] = "Hm"
        messages += [sent, result]
        yield
        client.chat.completions.create(**asked)


def by_responses(http: httpx.Client, is_streamed: bool, **fields: Any) -> Iterator[None]:
    tool = {"type": "function", "name": "look", "parameters": PARAMETERS}
    asked = {"tools": [tool], **fields}
    made = http.post("/v1/responses", json={"input": "Where?", "stream": is_streamed, **asked})
    if is_streamed:
        *_, last = (json.loads(line[6:]) for line in made.text.splitlines() if line.startswith("data: "))
        response = last["response"]
    else:
        response = made.json()
    output = {"type": "function_call_output", "call_id": response["output"][-1]["call_id"], "output": "7"}
    yield
    if is_streamed:
        asked |= {"input": [user("Where?"), *response["output"], output]}
    else:
        asked |= {"input": [output], "previous_response_id": response["id"]}
    assert http.post("/v1/responses", json=asked).status_code == 200


def by_messages(http: httpx.Client, is_streamed: bool, **fields: Any) -> Iterator[None]:
    tool = {"name": "look", "input_schema": PARAMETERS}
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0) as client:
        messages: list[Any] = [user("Where?")]
        asked: Any = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": [tool], "extra_body": fields}
        if is_streamed:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        use = answer.content[-1]
        assert use.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "7"}
        messages += [{"role": "assistant", "content": answer.content}, user([result])]  # type: ignore[arg-type]
        yield
        counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[tool], extra_body=fields)
        assert client.messages.create(**asked).usage.input_tokens + 3 == counted.input_tokens


def by_ollama(http: httpx.Client, is_streamed: bool, **fields: Any) -> Iterator[None]:
    messages: list[Message] = [user("Where?")]
    asked = {"model": MODEL, "messages": messages, "tools": [TOOL], "stream": is_streamed, **fields}
    parts = [json.loads(line)["message"] for line in http.post("/api/chat", json=asked).text.splitlines()]
    said: Message = {"role": "assistant"}
    for name in ("content", "thinking"):
        said[name] = "".join(part.get(name) or "" for part in parts)
    said["tool_calls"] = [call for part in parts for call in part.get("tool_calls") or ()]
    messages += [said, {"role": "tool", "tool_name": "look", "content": "7"}]
    yield
    assert http.post("/api/chat", json=asked).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("ask", [by_chats, by_responses, by_messages, by_ollama])
def test_each_api_goes_on_from_its_answers(
    engine: FakeEngine, ask: Callable[..., Iterator[None]], is_streamed: bool
) -> None:
    def tokens(memory_bytes: int = 1 << 20, **fields: Any) -> tuple[list[int], list[int]]:
        engine.reset()
        with (
            serving(engine, disable_log_requests=True, answer_memory_bytes=memory_bytes) as url,
            httpx.Client(base_url=url, timeout=within(60)) as http,
        ):
            engine.answer = OWN
            turns = ask(http, is_streamed, **fields)
            next(turns)
            engine.answer = "7."
            next(turns, None)
        first, second = (seen[0] for seen in engine.seen)
        return first + engine.inputs.encode(OWN, add_special_tokens=False) + [engine.tokenizer.eos_token_id], second

    known, second = tokens()
    assert second[: len(known)] == known
    text = engine.tokenizer.decode(second[len(known) :])
    assert text.startswith("\n<|im_start|>tool\n7</s>")
    if is_streamed:  # what follows is of the prompt alone
        return
    plain = tokens(memory_bytes=0)[1]
    assert plain[: len(known)] != known
    if ask is not by_ollama:
        assert tokens(reuse_answers=False)[1] == plain


def second_turn(http: httpx.Client, path: str) -> dict[str, Any]:
    """The body of a conversation's second turn, after its first."""
    if path == "/v1/chat/completions":
        body: dict[str, Any] = {"messages": [user("Where?")], "tools": [TOOL]}
        message = http.post(path, json=body).json()["choices"][0]["message"]
        sent = {name: message[name] for name in ("role", "content", "tool_calls", "reasoning_content")}
        result = {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "7"}
        return {**body, "messages": [user("Where?"), sent, result]}
    if path == "/v1/messages":
        tools = [{"name": "look", "input_schema": PARAMETERS}]
        body = {"model": MODEL, "max_tokens": 500, "messages": [user("Where?")], "tools": tools}
        content = http.post(path, json=body).json()["content"]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "7"}
        turn = {"role": "assistant", "content": content}
        return {**body, "messages": [user("Where?"), turn, {"role": "user", "content": [result]}]}
    tools = [{"type": "function", "name": "look", "parameters": PARAMETERS}]
    output = http.post(path, json={"input": "Where?", "tools": tools}).json()["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "7"}
    return {"input": [user("Where?"), *output, result], "tools": tools, "store": False}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_that_another_server_has_begun_goes_on_with_its_prompt(engine: FakeEngine, path: str) -> None:
    def ask(http: httpx.Client, **fields: Any) -> tuple[list[int], dict[str, Any], list[str]]:
        """The prompt's tokens that the engine gets, and the stream's header and events."""
        answer = http.post(path, json={**body, "stream": True, **fields}, headers={"X-Octavo-Resumable": "1"})
        assert answer.status_code == 200, answer.text
        text = re.sub(r'"completed_at":\d+', '"completed_at":0', answer.text)  # seconds, which may have passed
        return engine.seen[-1][0], json.loads(answer.headers["x-octavo-resumable"]), text.split("\n\n")

    def comments(events: list[str], name: str) -> list[list[int]]:
        return [json.loads(event.removeprefix(name)) for event in events if event.startswith(name)]

    with (
        serving(engine, disable_log_requests=True, answer_memory_bytes=1 << 20) as remembers,
        httpx.Client(base_url=remembers, timeout=within(60)) as own,
    ):
        engine.answer = OWN
        body = second_turn(own, path)
        engine.answer = "It is 7."
        prompt, about, events = ask(own)
        assert comments(events, ": prompt ") == [prompt]
        with (
            serving(engine, disable_log_requests=True, answer_memory_bytes=0) as knows_nothing,
            httpx.Client(base_url=knows_nothing, timeout=within(60)) as other,
        ):
            plain, other_about, other_events = ask(other)
            assert plain != prompt and not comments(other_events, ": prompt ")
            resume = {**about, "tokens": comments(events, ": tokens ")[:1], "prompt": prompt}
            found, _, rest = ask(other, resume=resume)
            assert found == prompt and rest == events[-len(rest) :] and not comments(rest, ": prompt ")
        other_resume = {**other_about, "tokens": comments(other_events, ": tokens ")[:1]}
        assert ask(own, resume=other_resume)[0] == plain
        assert ask(own, resume={**about, "tokens": []})[0] == prompt


def test_a_stream_drops_the_prompt_that_a_trial_with_fewer_turns_has_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial may leave out media, with which nothing is recalled."""

    async def submit(_id: Any, _body: Any, _params: Any, prepare: Any, **_kwargs: Any) -> tuple[Any, Any]:
        prepare()
        return SimpleNamespace(token_ids=[1]), None

    args = SimpleNamespace(trust_request_chat_template=False, unknown_fields="error")
    state: Any = SimpleNamespace(args=args, formats=ModelFormats(), answers=None, submit=submit)
    prompt = ChatPrompt(talk(user("Where?")), state, SamplingParams())
    made = PreparedPrompt("", add_special_tokens=False)
    monkeypatch.setattr(prompt, "_render_and_choose_format", lambda history, media_files: (made, AnswerFormat()))
    resumable: Any = SimpleNamespace(recalled_prompt=[7])
    asyncio.run(prompt.submit("chatcmpl-1", resumable))
    assert resumable.recalled_prompt is None


def test_answers_outlive_the_server_in_its_store(engine: FakeEngine, tmp_path: Path) -> None:
    sent: list[Message] = [user("Where?")]
    known: list[int] = []
    for turn in range(3):
        with (
            serving(engine, disable_log_requests=True, response_store=str(tmp_path / "store.db")) as url,
            httpx.Client(base_url=url, timeout=within(60)) as http,
        ):
            engine.answer = OWN
            answer = http.post("/v1/chat/completions", json={"messages": sent, "tools": [TOOL]}).json()
            prompt = engine.seen[-1][0]
            assert prompt[: len(known)] == known
            known = [*prompt, *engine.inputs.encode(OWN, add_special_tokens=False), engine.tokenizer.eos_token_id]
            message = answer["choices"][0]["message"]
            message = {name: message[name] for name in ("role", "content", "tool_calls", "reasoning_content")}
            sent += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"{turn}"}]
    assert len(known) > 3 * len(OWN)
