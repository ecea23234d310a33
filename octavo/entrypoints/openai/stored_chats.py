"""Stores chat completions on request: the answer, and the messages of the request."""

from __future__ import annotations

import logging
from typing import Any

from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.entrypoints.chat.media_parts import as_sent
from octavo.entrypoints.http.piecewise_json import encode_in_pieces, is_large, pack
from octavo.entrypoints.http.server_state import ServerState, num_body_bytes
from octavo.entrypoints.http.streaming import encode_json
from octavo.entrypoints.openai.chat_messages import ChatMessage
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.entrypoints.openai.response_bodies import ChatCompletionResponse
from octavo.errors import RequestError

logger = logging.getLogger("octavo.server")

KIND = "chat"


def _stored(message: ChatMessage) -> dict[str, Any]:
    """Return a message of a request as OpenAI lists it: its text, and its parts in a field of their own."""
    fields = message.model_dump(mode="json", exclude_none=True, exclude={"content"})
    fields["content"] = None if message.content is None else message.text
    if isinstance(message.content, list):
        fields["content_parts"] = [as_sent(part) for part in message.content]
    return fields


async def keep_chat(state: ServerState, body: ChatCompletionRequest, response: ChatCompletionResponse) -> None:
    """Store an answer. If the store has no room, the client still gets the answer, and the log has the error."""

    def write() -> tuple[bytes, bytes]:
        about = encode_json({"metadata": body.metadata or {}, "request_id": response.id})
        messages = [{**_stored(message), "id": f"{response.id}-{i}"} for i, message in enumerate(body.messages)]
        return encode_in_pieces(response)[:-1] + b"," + about[1:], pack(messages)

    length = MAX_INLINE_LENGTH + 1 if is_large(response) else num_body_bytes()
    chat_json, messages_json = await run_off_loop(write, length=length)
    try:
        await state.store.run(lambda database: database.put(KIND, response.id, chat_json, messages_json))
    except RequestError as error:
        logger.error("chat %s is not stored: %s", response.id, error)
