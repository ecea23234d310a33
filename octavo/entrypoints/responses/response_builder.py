"""Builds an answer as a response object, and as the events of a stream.

Order: `response.created`, `queued` in the background, `in_progress`; for each item `output_item.added`, the deltas and
ends of its parts, `output_item.done`; then one of `completed`, `incomplete`, `failed`. Events are numbered. A whole
response is the sum of its events.
"""

from __future__ import annotations

import base64
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from octavo.call_arguments import read_arguments
from octavo.entrypoints.chat.answer_reader import CallDelta, Delta, ReasoningDelta, TextDelta
from octavo.entrypoints.chat.chat_run import AnswerPart
from octavo.entrypoints.chat.tools.tool_parser_base import JsonScanner
from octavo.entrypoints.http.streaming import named_event
from octavo.entrypoints.openai.logprobs_format import LogprobsFormatter
from octavo.entrypoints.openai.tool_choice import flat
from octavo.entrypoints.responses.items import ID_PREFIXES, TEXT_OF_CALLS, item_id
from octavo.entrypoints.responses.response_tools import SEARCH, ResponsesTool, shown_tools
from octavo.entrypoints.responses.responses_protocol import ResponsesRequest
from octavo.sampling_params import SamplingParams

Event = dict[str, Any]
_EVENTS_OF_CALLS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
_MAX_HELD_TOKENS = 64  # whose text may still come: marks, or a part of a character


class ResponseBuilder:
    """Builds the answer to one request, which may call `tools`. `formatter` writes log-probabilities, if they are
    wanted."""

    def __init__(
        self,
        body: ResponsesRequest,
        response_id: str,
        model: str,
        formatter: LogprobsFormatter | None,
        tools: Sequence[ResponsesTool] = (),
    ) -> None:
        self._formatter = formatter
        self._num_top = body.top_logprobs or 0
        reasoning = body.reasoning
        self._summarizes = reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)
        self._tools = {tool.name_for_model: tool for tool in tools}
        self._packs_reasoning = "reasoning.encrypted_content" in (body.include or ())
        self._number = -1  # number of the last event
        self._is_open = False  # whether the last item is open
        self._is_input_whole = False  # whether the input of the last custom tool's call is whole
        self._search = ""  # arguments of the last search for tools
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come
        self.response = _empty_response(body, response_id, model)

    def set_params(self, params: SamplingParams) -> None:
        """Record the sampling parameters after the model's defaults have filled in omitted ones."""
        self.response |= {"temperature": params.temperature, "top_p": params.top_p}

    @property
    def status(self) -> str:
        status: str = self.response["status"]
        return status

    def begin(self) -> list[Event]:
        """Return the events of a new response."""
        self.response["status"] = "queued" if self.response["background"] else "in_progress"
        events = [self._event("response.created", response=self._snapshot())]
        return [*events, self._event(f"response.{self.status}", response=self._snapshot())]

    def write(self, part: AnswerPart) -> bytes:
        """Return the events that `part` adds, as server-sent events."""
        return b"".join(map(named_event, self.add(part)))

    def add(self, part: AnswerPart) -> list[Event]:
        """Return the events that `part` adds."""
        events: list[Event] = []
        if self.status == "queued":
            self.response["status"] = "in_progress"
            events.append(self._event("response.in_progress", response=self._snapshot()))
        if self._formatter is not None:
            found = self._formatter.chat(part.token_ids, part.logprobs or [], self._num_top)
            self._logprobs += [token.model_dump() for token in found.content]
        deltas = _merged(part.deltas)
        logprobs = iter(self._take_logprobs(deltas))
        for delta in deltas:
            events += self._add_text(delta.text, next(logprobs)) if isinstance(delta, TextDelta) else self._add(delta)
        self.response["usage"] = _usage(part)
        if part.finish_reason == "abort":
            reason = part.stop_reason or "the server stopped"
            return events + self.fail("server_error", f"The request ended before its answer: {reason}.")
        if part.finish_reason is not None:
            if not self.response["output"]:  # an empty answer is a turn too: the next request sends it back
                events += self._open("message")
            is_cut = part.finish_reason == "length"
            events += self._close("incomplete" if self._is_last_cut(is_cut) else "completed")
            if is_cut:
                self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            events += self._end("incomplete" if is_cut else "completed")
        return events

    def fail(self, code: str, message: str) -> list[Event]:
        """End the response with an error. Return the events."""
        self.response |= {"error": {"code": code, "message": message}, "completed_at": None}
        return [*self._close("incomplete"), *self._end("failed")]

    def cancel(self) -> None:
        """End the response as cancelled, without events."""
        self._close("incomplete")
        self.response["status"] = "cancelled"

    def _take_logprobs(self, deltas: list[Delta]) -> list[list[dict[str, Any]]]:
        """Return the log-probabilities of each text in `deltas`. Tokens of reasoning, calls, marks and the stop belong
        to no text; tokens after the last text are kept for the next one."""
        texts = [delta.text for delta in deltas if isinstance(delta, TextDelta)]
        if not self._logprobs:
            return [[] for _ in texts]
        is_message = self._is_open and self._item["type"] == "message"
        goes_on = is_message and bool(deltas) and isinstance(deltas[0], TextDelta)
        found, pending = list[list[dict[str, Any]]](), self._logprobs
        for i in reversed(range(len(texts))):
            first, last = tokens_of(texts[i], pending, from_start=goes_on and i == 0)
            if i == len(texts) - 1:
                self._logprobs = pending[last:]
            found.append(pending[first:last])
            pending = pending[:first]
        if deltas and not texts:
            self._logprobs = self._logprobs[-_MAX_HELD_TOKENS:]
        return found[::-1]

    def _is_last_cut(self, is_cut: bool) -> bool:
        """Return whether the last item is not whole, given whether the answer `is_cut`. A whole call is one even if
        something after it is cut, and a stop string may end an answer within a call."""
        if self._is_open and self._item["type"] == "function_call":
            return JsonScanner().end(self._item["arguments"]) is None
        if self._is_open and self._item["type"] == "tool_search_call":
            return JsonScanner().end(self._search) is None
        if self._is_open and self._item["type"] == "custom_tool_call":
            return not self._is_input_whole
        return is_cut

    def _add(self, delta: ReasoningDelta | CallDelta) -> list[Event]:
        return self._add_call(delta) if isinstance(delta, CallDelta) else self._add_reasoning(delta.text)

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        events = self._open("message")
        part = self._item["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        return [*events, self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _add_reasoning(self, text: str) -> list[Event]:
        events = self._open("reasoning")
        self._item["summary" if self._summarizes else "content"][0]["text"] += text
        kind = "summary_text" if self._summarizes else "text"
        return [*events, self._of_reasoning(f"response.reasoning_{kind}.delta", delta=text)]

    def _add_call(self, delta: CallDelta) -> list[Event]:
        events = []
        if delta.name:
            events = self._close("completed") + self._open_call(delta)
        self._is_input_whole = delta.is_whole
        if self._item["type"] == "tool_search_call":
            self._search += delta.arguments
        elif delta.arguments:
            kind = self._item["type"]
            self._item[TEXT_OF_CALLS[kind]] += delta.arguments
            events.append(self._of_item(f"response.{_EVENTS_OF_CALLS[kind]}.delta", delta=delta.arguments))
        return events

    def _open_call(self, delta: CallDelta) -> list[Event]:
        tool = self._tools.get(delta.name)
        if tool is not None and tool.type == SEARCH:
            self._search = ""
            return self._open("tool_search_call", call_id=delta.id, execution="client", arguments={})
        fields = {"name": delta.name if tool is None else tool.name}
        if tool is not None and tool.namespace is not None:
            fields["namespace"] = tool.namespace.name
        kind = "custom_tool_call" if delta.is_custom else "function_call"
        return self._open(kind, call_id=delta.id, **{TEXT_OF_CALLS[kind]: ""}, **fields)

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self.response["output"][-1]
        return item

    def _open(self, kind: str, **fields: Any) -> list[Event]:
        """Begin an item, unless an item of this kind is open. Return the events."""
        if self._is_open and self._item["type"] == kind:
            return []
        events = self._close("completed")
        output = self.response["output"]
        item: dict[str, Any] = {
            "id": item_id(ID_PREFIXES[kind], self.response["id"], len(output)),
            "type": kind,
            "status": "in_progress",
        }
        if kind == "message":
            shown = {**item, "role": "assistant", "content": []}
            output.append(
                {**shown, "content": [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]}
            )
        elif kind == "reasoning":
            shown = {**item, "summary": [], "content": []}
            text = {"type": "summary_text" if self._summarizes else "reasoning_text", "text": ""}
            output.append({**shown, "summary" if self._summarizes else "content": [text]})
        else:
            shown = {**item, **fields}
            output.append(dict(shown))
        self._is_open = True
        events.append(self._event("response.output_item.added", output_index=self._index, item=shown))
        if kind == "message":
            part = dict(self._item["content"][0], logprobs=[])
            events.append(self._of_part("response.content_part.added", part=part))
        elif kind == "reasoning" and self._summarizes:
            part = {"type": "summary_text", "text": ""}
            events.append(self._of_reasoning("response.reasoning_summary_part.added", part=part))
        return events

    def _close(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._item
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "message":
            part = item["content"][0]
            text, logprobs = part["text"], part["logprobs"]
            events.append(self._of_part("response.output_text.done", text=text, logprobs=logprobs))
            events.append(self._of_part("response.content_part.done", part=part))
        elif (kind := item["type"]) in TEXT_OF_CALLS:
            field = TEXT_OF_CALLS[kind]
            done = self._of_item(f"response.{_EVENTS_OF_CALLS[kind]}.done", **{field: item[field]})
            events.append({**done, "name": item["name"]} if kind == "function_call" else done)
        elif kind == "tool_search_call":
            found = read_arguments(self._search)
            item["arguments"] = found if isinstance(found, dict) else {}
        else:
            part = (item["summary"] or item["content"])[0]
            if self._packs_reasoning:
                item["encrypted_content"] = base64.b64encode(part["text"].encode()).decode()
            kind = "summary_text" if self._summarizes else "text"
            events.append(self._of_reasoning(f"response.reasoning_{kind}.done", text=part["text"]))
            if self._summarizes:
                events.append(self._of_reasoning("response.reasoning_summary_part.done", part=part))
        return [*events, self._event("response.output_item.done", output_index=self._index, item=item)]

    def _end(self, status: str) -> list[Event]:
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return [self._event(f"response.{status}", response=self.response)]

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)

    def _of_reasoning(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, **{"summary_index" if self._summarizes else "content_index": 0}, **fields)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": []}

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Return `deltas` with adjacent texts merged into one."""
    merged = list[Delta]()
    for delta in deltas:
        if isinstance(delta, TextDelta) and merged and isinstance(last := merged[-1], TextDelta):
            merged[-1] = TextDelta(last.text + delta.text)
        else:
            merged.append(delta)
    return merged


def tokens_of(text: str, tokens: list[dict[str, Any]], *, from_start: bool) -> tuple[int, int]:
    """Return which of `tokens` (log-probabilities with bytes) make `text`: the index of the first, and the index after
    the last. Tokens at the text's edges may reach beyond it. With `from_start` they are the first tokens, else the last
    ones that have the text. If no tokens have it (a text replaces wrong bytes), as many as are of its length."""
    wanted, joined = text.encode(), b"".join(bytes(token["bytes"]) for token in tokens)
    ends = [0, *accumulate(len(token["bytes"]) for token in tokens)]
    if from_start and joined.startswith(wanted):
        return 0, bisect_left(ends, len(wanted))
    for end in reversed(ends):
        at = end - len(wanted)
        # Readers leave out line breaks before a text; any other characters before it in a token are another text.
        if at >= 0 and joined.startswith(wanted, at) and not joined[ends[bisect_right(ends, at) - 1] : at].strip():
            return bisect_right(ends, at) - 1, bisect_left(ends, end)
    if (at := joined.rfind(wanted)) < 0:
        at = 0 if from_start else max(0, len(joined) - len(wanted))
    return bisect_right(ends, at) - 1, min(bisect_left(ends, at + len(wanted)), len(tokens))


def _empty_response(body: ResponsesRequest, response_id: str, model: str) -> dict[str, Any]:
    """Return the fields of a response that its request decides."""
    reasoning, text = body.reasoning, body.text
    wanted = {"type": "text"} if text is None or text.format is None else text.format.model_dump(exclude_none=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()) if body.resume is None else body.resume.created,
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "conversation": body.conversation_id and {"id": body.conversation_id},
        "error": None,
        "frequency_penalty": 0.0,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": 0.0,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and (reasoning.summary or reasoning.generate_summary),
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.is_stored,
        "temperature": body.temperature,
        "text": {"format": wanted, "verbosity": (text and text.verbosity) or "medium"},
        "tool_choice": flat(body.tool_choice),
        "tools": shown_tools(body.tools or ()),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _usage(part: AnswerPart) -> dict[str, Any]:
    return {
        "input_tokens": part.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": part.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": part.num_tokens,
        "output_tokens_details": {"reasoning_tokens": part.num_reasoning_tokens},
        "total_tokens": part.num_prompt_tokens + part.num_tokens,
    }
