"""Recalls the server's own answers in one conversation, and remembers the new ones (`answer_memory.py`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.chat.answer_memory import (
    MAX_ANSWERS,
    AnswerMemory,
    AnswerReading,
    Recalled,
    message_keys,
    recall,
    remembered,
    text_digest,
)
from octavo.entrypoints.chat.media_parts import embeds_of
from octavo.entrypoints.http.server_state import ServerState, num_body_bytes
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.errors import RequestError
from octavo.outputs import RequestOutput
from octavo.request import Prompt

logger = logging.getLogger("octavo.server")

_LENGTH_TOKENS = 16  # remembering so many tokens takes as long as tokenizing one


def can_recall(body: ChatCompletionRequest) -> bool:
    """Return whether a prompt without media may have tokens of earlier answers, and its answers be remembered. The
    prompt must be whole text, and the answer a new message, all of which the client sees."""
    return (
        body.reuse_answers is not False
        and body.messages[-1].role != "assistant"
        and body.add_generation_prompt is not False
        and body.include_reasoning is not False
        and not body.continue_final_message
        and not body.add_special_tokens
        and body.truncate_prompt_tokens is None
        and not embeds_of([message.content for message in body.messages])
    )


class AnswerRecall:
    """The answers in one conversation. `load` makes it; `recall` comes before `remember_outputs`."""

    def __init__(
        self, memory: AnswerMemory, body: ChatCompletionRequest, state: ServerState, keys: list[bytes]
    ) -> None:
        self._memory, self._body, self._state = memory, body, state
        self._message_keys = keys  # by number of messages, from one on
        self._prompt_text: tuple[int, bytes] | None = None  # length and digest of the rendered prompt; set by `recall`
        self.recalled: Recalled | None = None  # the prompt with the tokens of an earlier answer; set by `recall`

    @classmethod
    async def load(cls, memory: AnswerMemory, body: ChatCompletionRequest, state: ServerState) -> AnswerRecall:
        """Read the answers in the history that only the store has. If this fails they are not recalled."""
        keys = await run_off_loop(lambda: message_keys(body.messages, body.cache_salt), length=num_body_bytes())
        if memory.is_kept:
            # An answer is found by the messages before it.
            before = zip(keys, body.messages[1:], strict=False)
            try:
                await memory.load([key for key, message in before if message.role == "assistant"])
            except RequestError as error:
                logger.warning("answers in a history are not recalled: %s", error)
        return cls(memory, body, state, keys)

    def recall(self, prompt: str) -> Recalled | None:
        """Return the tokens of a rendered prompt that begins with an earlier answer, or None. An answer that another
        server has begun goes on with that server's prompt. May run in a thread."""
        state, resume = self._state, self._body.resume
        has_answers = any(message.role == "assistant" for message in self._body.messages)
        if has_answers and (resume is None or not (resume.tokens or resume.prompt)):
            schemas = {tool.function.name: tool.function.schema_of_arguments for tool in self._body.tools or ()}
            encode = partial(state.engine.inputs.encode, add_special_tokens=False)
            reading = AnswerReading(state.engine.tokenizer, state.formats, schemas, encode)
            self.recalled = recall(self._memory, self._message_keys, self._body.messages, prompt, reading)
        self._prompt_text = len(prompt), text_digest(prompt)
        return self.recalled

    async def remember_outputs(
        self, prompt: Prompt, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield `outputs`. Remember the first `MAX_ANSWERS` choices, each when it ends."""
        num_known = 0 if self.recalled is None else self.recalled.num_known
        try:
            async for output in outputs:
                for choice in output.outputs:
                    is_whole = choice.finish_reason in ("stop", "length")
                    if choice.index < MAX_ANSWERS and is_whole and choice.all_token_ids:
                        num_new = len(prompt.token_ids) - num_known + len(choice.all_token_ids)
                        work = partial(self._remember, prompt.token_ids, choice.all_token_ids)
                        await run_off_loop(work, length=num_new // _LENGTH_TOKENS)
                yield output
        finally:
            await outputs.aclose()

    def _remember(self, prompt: Sequence[int], answer: list[int]) -> None:
        assert self._prompt_text is not None, "`recall` comes first"
        engine, formats = self._state.engine, self._state.formats
        about = prompt, answer, engine.inputs.eos_token_ids, self._prompt_text, engine.tokenizer, formats
        self._memory.add(remembered(self._message_keys[-1], self.recalled, *about))
