"""Structured output where the model runs: which tokens a sequence's grammar allows next.

`GrammarCompiler` turns grammars (see `octavo.structured_output.grammar_builder`) into matchers, in a thread, before
their requests are scheduled. `GrammarTable` keeps one matcher for each row that has a grammar. Another thread computes
its masks as soon as a step's tokens are known, so that they are ready when the next step's logits are. The sampler
waits for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.loading.checkpoint import Checkpoint
from octavo.sampling_params import SamplingParams
from octavo.structured_output.trial import STACK_BYTES, limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

_NUM_COMPILING = 4  # grammars compiled at once, so that a slow one does not delay others
_NUM_IDLE = 256  # compiled grammars that are kept without a request


class GrammarCompiler:
    """Compiles each grammar once. llguidance and the vocabulary are loaded with the first grammar, or ahead of it."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._checkpoint = checkpoint
        self._vocabulary: Future[LLTokenizer] | None = None
        self._templates: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_holders: Counter[str] = Counter()  # number of requests, by grammar
        self._released: deque[str] = deque()  # grammars released by requests that have ended
        self._pool: ThreadPoolExecutor | None = None

    def load_vocabulary(self) -> Future[LLTokenizer]:
        """Make the vocabulary in a thread, once. The future raises `RequestError` if the tokenizer cannot give it.

        llguidance needs 80 ms for 49,152 tokens, and up to a second for 256,000, in one call that holds the
        interpreter's lock: no step can run meanwhile."""
        made = self._vocabulary
        if made is None or (made.done() and not isinstance(made.exception(), RequestError | None)):  # may be better now
            self._pool = self._pool or _new_pool("grammar-compiler", _NUM_COMPILING)
            self._vocabulary = made = self._pool.submit(self._make_vocabulary)
        return made

    def prepare(self, grammar: str, holder: object) -> Future[None]:
        """Compile a grammar in a thread, and keep it as long as `holder` lives. The future raises `RequestError` if the
        grammar cannot be followed."""
        while self._released:
            gone = self._released.popleft()
            self._num_holders[gone] -= 1
            if not self._num_holders[gone]:
                del self._num_holders[gone]
        self._num_holders[grammar] += 1
        # This runs when the holder is freed, in any thread, so it takes no lock.
        weakref.finalize(holder, self._released.append, grammar).atexit = False
        with contextlib.suppress(KeyError):  # not compiled yet, or being dropped by another thread
            self._templates.move_to_end(grammar)
            done: Future[None] = Future()
            done.set_result(None)
            return done
        vocabulary = self.load_vocabulary()
        assert self._pool is not None

        def compile_it() -> None:
            # This future, not a newer one: a vocabulary that is made again may wait for a thread, as this task does.
            vocabulary.result()
            self._compile(grammar)

        return self._pool.submit(compile_it)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of `grammar`, which has been prepared. Copies share the lexer's states."""
        return self._compile(grammar).deep_copy()

    def renewed(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of `grammar` that shares nothing with others. Copies of a template share a
        lexer; once one copy has made it too large it fails for all, so later matchers get a new template."""
        self._templates.pop(grammar, None)
        return self._matcher(grammar)

    @property
    def num_words(self) -> int:
        """Return the number of 32-bit words in a mask."""
        assert self._vocabulary is not None
        return -(-self._vocabulary.result().vocab_size // 32)

    def _compile(self, grammar: str) -> LLMatcher:
        """Return the template of a grammar; make it if there is none. Other threads may drop it at any time."""
        if (known := self._templates.get(grammar)) is not None:
            return known
        matcher = self._matcher(grammar)
        matcher.compute_bitmask()  # the first mask is by far the slowest
        self._templates[grammar] = matcher
        self._drop_idle()
        return matcher

    def _make_vocabulary(self) -> LLTokenizer:
        from octavo.loading.tokenizer import read_tokenizer  # the tokenizers package takes 10 ms of a start
        from octavo.structured_output.token_bytes import make_vocabulary

        tokenizer = read_tokenizer(self._checkpoint.tokenizer_path, self._checkpoint.trusts_code)
        ends = self._checkpoint.end_token_ids(tokenizer.eos_token_id, self.vocab_size)
        return make_vocabulary(tokenizer.backend_tokenizer, self.vocab_size, ends)

    def _matcher(self, grammar: str) -> LLMatcher:
        import llguidance

        assert self._vocabulary is not None
        matcher = llguidance.LLMatcher(self._vocabulary.result(), grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise RequestError(f"structured_outputs cannot be followed: {matcher.get_error().splitlines()[0]}")
        return matcher

    def _drop_idle(self) -> None:
        """Forget the oldest templates without a request, except the last `_NUM_IDLE`."""
        idle = [grammar for grammar in list(self._templates) if grammar not in self._num_holders]
        for grammar in idle[: max(0, len(idle) - _NUM_IDLE)]:
            self._templates.pop(grammar, None)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Which tokens may come next: the bits of `words` [W] uint32."""

    words: NDArray[np.uint32]

    def allows(self, token: int) -> bool:
        return bool(int(self.words[token >> 5]) >> (token & 31) & 1)


@dataclass(slots=True, eq=False)
class _Row:
    """A sequence's position in its grammar. Once made, only the thread of masks writes to it."""

    grammar: str
    output: list[int]  # tokens that the matcher has not read yet
    end_token_ids: list[int]  # end-of-sequence, and the request's stop tokens
    ignored_token_ids: list[int]  # end tokens that are masked while any other token is allowed
    min_tokens: int
    matcher: LLMatcher | None = None
    mask: TokenMask | None = None
    drafted: list[TokenMask] = field(default_factory=list)  # after each draft token, up to one not allowed
    error: str | None = None
    index: int = field(default=0)  # its line in the array of masks
    read: list[int] = field(default_factory=list)  # tokens that the matcher has read
    renewed_at: int = -1  # tokens that were read when the matcher was last renewed


class GrammarTable:
    """The matchers of running sequences, by row. All calls come from the thread that runs the model."""

    def __init__(self, compiler: GrammarCompiler, max_num_seqs: int) -> None:
        self._compiler = compiler
        self._rows: dict[int, _Row] = {}
        self._max_num_seqs = max_num_seqs
        self._words: NDArray[np.uint32] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._parallel: Any = None
        self._pending: Future[None] | None = None

    def has_any(self, rows: Iterable[int]) -> bool:
        """Return whether a sequence of `rows` follows a grammar. The row of an aborted sequence, or of one that has
        reached its maximum length, keeps its grammar until another sequence takes the row."""
        return not self._rows.keys().isdisjoint(rows)

    def admit(self, row: int, params: SamplingParams, output: list[int], end_token_ids: list[int]) -> None:
        """Note that a sequence takes `row`, with its `output` tokens so far. Without a grammar the row is forgotten.

        `end_token_ids` are end-of-sequence and the request's stop tokens.
        """
        if params.grammar is None:
            self._rows.pop(row, None)
            return
        ignored = [t for t in end_token_ids if t not in params.stop_token_ids] if params.ignore_eos else []
        state = _Row(params.grammar, output, end_token_ids, ignored, params.min_tokens, index=row)
        self._rows[row] = state
        self._submit([state], partial(self._compute, [state]))

    def advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Note that `tokens` [N] were sampled for `rows` [N], and start to compute the next masks."""
        changed: dict[int, _Row] = {}  # a row has several tokens if draft tokens were accepted
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if (state := self._rows.get(row)) is None:
                continue
            if token in state.end_token_ids:  # the sequence has ended
                del self._rows[row]
                changed.pop(row, None)
            else:
                state.output.append(token)
                changed[row] = state
        if changed:
            self._submit(list(changed.values()), partial(self._compute, list(changed.values())))

    def look_ahead(self, row: int, draft_tokens: Sequence[int]) -> None:
        """Start to compute the masks after each of `draft_tokens`, which the next step computes for `row`."""
        if (state := self._rows.get(row)) is not None:
            self._submit([state], partial(self._look_ahead, state, list(draft_tokens)))

    def masks(
        self, rows: NDArray[np.int64], firsts: Mapping[int, int]
    ) -> tuple[list[tuple[int, TokenMask]], dict[int, str]]:
        """Wait for the masks of the samples of `rows` [N]. Returns (sample, mask) for each sample with a grammar, and
        errors by sample. `firsts` has the first sample of each row with draft tokens; a sample after each draft token
        follows. Samples after a draft token that is not allowed are invalid and need no mask."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        masks: list[tuple[int, TokenMask]] = []
        errors: dict[int, str] = {}
        for n, row in enumerate(rows.tolist()):
            if (state := self._rows.get(row)) is None:
                continue
            num_draft_tokens = n - firsts.get(row, n)
            if state.error is not None:
                errors[n] = state.error
            elif state.mask is not None and num_draft_tokens <= len(state.drafted):
                masks.append((n, state.drafted[num_draft_tokens - 1] if num_draft_tokens else state.mask))
        return masks, errors

    def _submit(self, rows: list[_Row], work: Callable[[], None]) -> None:
        """Have the thread of masks do `work` for `rows`. Work is done in order, so that waiting for the last piece is
        enough."""
        if self._pool is None:
            self._pool = _new_pool("grammar-masks")

        def run() -> None:
            try:
                work()
            except Exception as e:  # a bug, ours or llguidance's, fails only these requests
                logger.exception("masks of structured outputs could not be computed")
                for state in rows:
                    state.error = f"structured output failed: {type(e).__name__}."

        self._pending = self._pool.submit(run)

    def _compute(self, changed: list[_Row]) -> None:
        running = [state for state in changed if state.error is None and self._read(state)]
        if not running:
            return
        if self._words is None:
            from llguidance import LLExecutor

            self._words = np.zeros((self._max_num_seqs, self._compiler.num_words), np.uint32)
            self._parallel = LLExecutor(max(1, (os.cpu_count() or 1) // 2))
        words = self._words
        # Releases the interpreter's lock.
        self._parallel.unsafe_compute_mask_ptr(
            [(state.matcher, state.index) for state in running], words.ctypes.data, words.strides[0], len(words)
        )
        for state in running:
            if state.matcher is not None and state.matcher.is_error() and self._renew(state, state.matcher):
                state.matcher.unsafe_compute_mask_ptr(words[state.index].ctypes.data, words.strides[0])
                if state.matcher.is_error():
                    state.error = _explain(state.matcher)
            if state.error is None:
                state.mask = self._mask(state, words[state.index])

    def _look_ahead(self, state: _Row, draft_tokens: list[int]) -> None:
        """In the thread of masks: follow draft tokens as far as they are allowed, keep the masks, and go back."""
        state.drafted = []
        matcher, mask = state.matcher, state.mask
        if matcher is None or mask is None or state.error is not None:
            return
        for draft_token in draft_tokens:
            # No token follows one that ends the sequence.
            if (
                not mask.allows(draft_token)
                or draft_token in state.end_token_ids
                or not matcher.consume_tokens([draft_token])
            ):
                break
            words = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self._compiler.num_words]
            mask = self._mask(state, words, len(state.drafted) + 1)
            state.drafted.append(mask)
        if matcher.is_error() or (state.drafted and not matcher.rollback(len(state.drafted))):
            self._renew(state, matcher)

    def _read(self, state: _Row) -> bool:
        """Have the matcher read the new tokens. Returns False, and sets the row's error, if it fails."""
        if state.matcher is None:
            state.matcher = self._compiler.matcher(state.grammar)
        tokens, state.output = state.output, []
        state.read += tokens
        if tokens and not state.matcher.consume_tokens(tokens):
            self._renew(state, state.matcher)
        return state.error is None

    def _renew(self, state: _Row, matcher: LLMatcher) -> bool:
        """Replace a matcher that fails, perhaps because of others that share its lexer, by a new one. Returns False,
        and sets the row's error, if the new one fails too."""
        reason = _explain(matcher)
        if state.renewed_at < len(state.read):
            state.renewed_at = len(state.read)
            state.matcher = self._compiler.renewed(state.grammar)
            if not state.read or state.matcher.consume_tokens(state.read):
                return True
            reason = _explain(state.matcher)
        state.error = reason
        return False

    def _mask(self, state: _Row, words: NDArray[np.uint32], num_draft_tokens: int = 0) -> TokenMask:
        is_short = len(state.read) + num_draft_tokens < state.min_tokens
        held = state.end_token_ids if is_short else state.ignored_token_ids
        if held:  # the sequence may not end yet, unless the grammar allows nothing else
            going_on = words.copy()
            for token in held:
                going_on[token >> 5] &= ~np.uint32(1 << (token & 31))
            words = going_on if going_on.any() else words
        # A view is enough: its line is overwritten only after this sequence, or the row's next one, has a new token.
        return TokenMask(words)


def _new_pool(name: str, num_threads: int = 1) -> ThreadPoolExecutor:
    """Return threads with more stack than a trial of a grammar has. A single thread works in order."""
    usual = threading.stack_size(4 * STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        started = threading.Barrier(num_threads + 1)
        for _ in range(num_threads):
            pool.submit(started.wait)  # this starts the threads
        started.wait()
    finally:
        threading.stack_size(usual)
    return pool


def _explain(matcher: LLMatcher) -> str:
    [reason, *_] = matcher.get_error().splitlines() or ["unknown reason"]
    if "NoExtension" in reason:  # llguidance's name for this
        reason = "the grammar allows no further token, but the answer is not complete."
    return f"the grammar of structured_outputs cannot be followed any further: {reason}"
