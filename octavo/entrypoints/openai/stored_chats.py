"""Stores chat completions on request: the answer, and the messages of the request."""

from __future__ import annotations

import logging

from octavo.entrypoints.http.server_state import ServerState
from octavo.entrypoints.http.streaming import encode_json
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.entrypoints.openai.response_bodies import ChatCompletionResponse
from octavo.errors import RequestError

logger = logging.getLogger("octavo.server")

KIND = "chat"


async def keep_chat(state: ServerState, body: ChatCompletionRequest, response: ChatCompletionResponse) -> None:
    """Store an answer. If the store has no room, the client still gets the answer, and the log has the error."""
    fields = response.model_dump(mode="json")
    chat = {**fields, "metadata": body.metadata or {}, "request_id": response.id}
    messages = [
        {"content": None, **message.model_dump(mode="json", exclude_none=True), "id": f"{response.id}-{i}"}
        for i, message in enumerate(body.messages)
    ]
    chat_json, messages_json = encode_json(chat), encode_json(messages)
    try:
        await state.store.run(lambda database: database.put(KIND, response.id, chat_json, messages_json))
    except RequestError as error:
        logger.error("chat %s is not stored: %s", response.id, error)
