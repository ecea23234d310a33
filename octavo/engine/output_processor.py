"""Makes `RequestOutput`s of the core's outputs: text, stop strings, the best of `best_of`. A request keeps the output
that its caller has not got yet, so that a late caller gets it in one piece."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.engine.detokenizer import Detokenizer, make_detokenizer
from octavo.engine.stop_strings import StopStrings
from octavo.engine.wire import Abort
from octavo.errors import OctavoError, RequestError
from octavo.loading.token_texts import decode
from octavo.outputs import (
    CompletionOutput,
    Logprob,
    Output,
    PoolingOutput,
    PoolingRequestOutput,
    PositionLogprobs,
    Positions,
    RequestMetrics,
    RequestOutput,
)
from octavo.request import EngineRequest, SequenceOutput, TokenLogprobs
from octavo.sampling_params import RequestOutputKind
from octavo.structured_output.final_check import MISMATCH, UNCHECKED, FinalCheck

if TYPE_CHECKING:
    from octavo.engine.request_stream import RequestStream
    from octavo.loading.tokenizer import ModelTokenizer
    from octavo.metrics.prometheus import EngineMetrics

logger = logging.getLogger(__name__)

MakePosition = Callable[..., PositionLogprobs]  # `OutputProcessor.position`


class _Completion:
    """One sequence of a request: its tokens, and its text as far as it is still needed."""

    __slots__ = (
        "_detokenizer", "_final_check", "_has_ranks", "_min_tokens", "_num_hidden", "_num_kept", "_num_read",
        "_shows_stop_token", "_stop", "cumulative_logprob", "error", "finish_reason", "index", "is_end_sent",
        "last_token_time", "logprobs", "num_accepted_prediction_tokens", "num_held_back",
        "num_rejected_prediction_tokens", "num_sent_chars", "num_sent_tokens", "stop_reason", "text", "token_ids",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, index: int, tokenizer: ModelTokenizer) -> None:
        params = request.params
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""  # includes text held back; a stream of deltas drops the text that it has sent
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._has_ranks = not params.logprob_token_ids
        self.cumulative_logprob: float | None = 0.0 if params.wants_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_held_back = 0
        self.num_sent_chars = 0  # of `text`
        self.num_sent_tokens = 0
        self._num_read = 0  # tokens that are in `text`
        self._num_hidden = 0  # tokens at the end that are not part of the text
        self.is_end_sent = False
        self.last_token_time: float | None = None
        self._final_check = request.final_check
        self.error: str | None = None
        self._stop = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._num_kept: int | None = None  # sent characters of `text` to keep; None: all
        if params.output_kind is RequestOutputKind.DELTA and self._final_check is None:
            self._num_kept = max([len(stop) - 1 for stop in params.stop], default=0)
        self.num_accepted_prediction_tokens = self.num_rejected_prediction_tokens = 0
        self._min_tokens = params.min_tokens
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            self._detokenizer = make_detokenizer(
                tokenizer.backend_tokenizer,
                request.prompt.token_ids,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
            )
        # A stop token is in token_ids, but not in the text, unless include_stop_str_in_output.
        self._shows_stop_token = params.include_stop_str_in_output

    def add(self, output: SequenceOutput) -> bool:
        """Add new tokens. Returns True if a stop string ends the sequence; the core does not know this yet."""
        if self._stop is None and output.finish_reason is None and output.logprobs is None:
            self.token_ids += output.token_ids  # the text is made when it is needed
            return False
        num_before = len(self.token_ids)
        is_stopped = self._take(output)
        if output.logprobs is not None:
            entries = output.logprobs[: len(self.token_ids) - num_before]  # a stop string may end it earlier
            for entry in entries:
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry.logprobs[0]
            if self.logprobs is not None:
                self.logprobs += entries
        return is_stopped

    def _take(self, output: SequenceOutput) -> bool:
        if output.finish_reason == "stop" and not self._shows_stop_token:
            self._num_hidden = 1
        if self._stop is None:
            self.token_ids += output.token_ids
        else:
            end = len(self.token_ids) + len(output.token_ids) - self._num_hidden
            for token in output.token_ids:
                self.token_ids.append(token)
                if self._cut_at_stop(self._read(min(len(self.token_ids), end))):
                    return output.finish_reason is None
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self.num_held_back = 0
            self._read()
            if self._detokenizer is not None:
                rest = self._detokenizer.flush()
                self.text += rest
                self._cut_at_stop(len(rest))
            if self._final_check is not None and self.finish_reason == "stop":
                self._check(self._final_check)
        elif self._stop is not None:
            self.num_held_back = self._stop.num_held_back(self.text)
        return False

    def _check(self, check: FinalCheck) -> None:
        """Compare the whole answer with its schema."""
        from octavo.structured_output.schema_validation import NotChecked  # imported late: few answers need the check

        try:
            if (problem := check.problem(self.text)) is None:
                return
            self.stop_reason, error = MISMATCH, f"the answer does not satisfy its schema: {problem}"
        except NotChecked as reason:
            self.stop_reason, error = UNCHECKED, f"the answer could not be compared with its schema: {reason}"
        except Exception:  # an error here would end the step of all requests
            logger.exception("the comparison of an answer with its schema failed")
            self.stop_reason, error = UNCHECKED, "the answer could not be compared with its schema"
        if check.mode == "error":
            self.error = error

    def _read(self, end: int | None = None) -> int:
        """Add the tokens before `end` (default: all) to the text. Returns the number of new characters."""
        end = len(self.token_ids) - self._num_hidden if end is None else end
        if self._detokenizer is None or self._num_read >= end:
            return 0
        new = self._detokenizer.add(self.token_ids[self._num_read : end])
        self._num_read = end
        self.text += new
        return len(new)

    def _cut_at_stop(self, num_new: int) -> bool:
        """End the text at a stop string in its last `num_new` characters. Returns whether there is one."""
        if self._stop is None or not num_new or len(self.token_ids) < self._min_tokens:
            return False
        if (found := self._stop.find(self.text, num_new)) is None:
            return False
        self.stop_reason, cut = found
        self.text = self.text[:cut]
        self.finish_reason = "stop"
        self.num_held_back = 0
        return True

    def take_text(self) -> tuple[str, int]:
        """Return the text that may be shown and has not been, and the number of tokens since the last call."""
        self._read()
        text, num_tokens = self.text, len(self.token_ids)
        num_new = num_tokens - self.num_sent_tokens
        shown = len(text) - self.num_held_back
        new = text[self.num_sent_chars : shown]
        if self._num_kept is not None and (dropped := shown - self._num_kept) > 0:
            self.text = text[dropped:]
            shown -= dropped
        self.num_sent_chars, self.num_sent_tokens = shown, num_tokens
        return new, num_new

    def output(self, is_delta: bool, make_position: MakePosition, *, makes_later: bool) -> CompletionOutput:
        """Return the completion so far, with the text that may be shown; if `is_delta`, only the new part."""
        tokens = self.num_sent_tokens if is_delta else 0
        new, _ = self.take_text()
        text = new if is_delta else self.text[: self.num_sent_chars]
        self.is_end_sent = self.finish_reason is not None
        positions: Sequence[Any] | None = None
        if self.logprobs is not None:
            make = make_position if self._has_ranks else partial(make_position, has_ranks=False)
            positions = Positions(self.logprobs[tokens:], make)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[tokens:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=positions if makes_later or positions is None else list(positions),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            all_token_ids=None if self.finish_reason is None else self.token_ids,
        )


class RequestState:
    """A running request, whichever core computes it: its completions, its times, and the outputs that its caller has
    not got yet."""

    __slots__ = (
        "_processor", "alignment", "completions", "error", "external_id", "has_new_output", "has_prediction",
        "is_delta", "is_final_only", "is_over", "is_ranked", "last_token_time", "metrics", "num_cached_tokens",
        "num_predicted", "num_running", "num_steps_at_death", "num_tokens_at_death", "pooled", "prompt_logprobs",
        "request", "stream",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, external_id: str, processor: OutputProcessor) -> None:
        self.request = request
        self.external_id = external_id
        self._processor = processor
        num_completions = 0 if request.pooling is not None else request.params.num_completions
        self.completions = [_Completion(request, i, processor.tokenizer) for i in range(num_completions)]
        self.prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
        self.alignment: bytes | None = None
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.last_token_time: float | None = None  # for `metrics`
        self.stream: RequestStream | None = None  # of an asynchronous engine
        self.num_cached_tokens = 0
        self.error: OctavoError | None = None
        self.pooled: PoolingRequestOutput[PoolingOutput] | None = None
        self.has_new_output = False  # for `take`
        self.is_over = False
        self.num_tokens_at_death: int | None = None  # set if the last core died with the request in its step
        self.num_steps_at_death = 0  # finished steps of that core that had the request
        self.num_predicted = (0, 0)  # tokens of its prediction that earlier cores accepted and rejected
        params = request.params
        self.has_prediction = bool(request.prediction)
        self.is_delta = params.output_kind is RequestOutputKind.DELTA
        self.num_running = num_completions
        # The best completions are known only at the end.
        self.is_ranked = params.num_completions > params.n
        self.is_final_only = self.is_ranked or params.output_kind is RequestOutputKind.FINAL_ONLY

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def finish_reason(self) -> str | None:
        """The reason for its end, for the metrics and the log."""
        if self.error is not None:
            return "error"
        pooled = "abort" if self.pooled is None else "stop"
        reasons = [completion.finish_reason for completion in self.completions] or [pooled]
        return "abort" if "abort" in reasons else reasons[0]

    @property
    def num_prediction_tokens(self) -> tuple[int, int]:
        """Return the numbers of accepted and rejected tokens of its prediction, summed over all completions."""
        accepted, rejected = self.num_predicted
        accepted += sum(completion.num_accepted_prediction_tokens for completion in self.completions)
        return accepted, rejected + sum(completion.num_rejected_prediction_tokens for completion in self.completions)

    def remainder(self) -> EngineRequest:
        """Return the request for a new core, with the tokens of its running completions. A beam search has none, and
        begins anew."""
        if self.has_prediction:
            self.num_predicted = self.num_prediction_tokens
        output_token_ids = {}
        for index, completion in enumerate(self.completions):
            completion.num_accepted_prediction_tokens = completion.num_rejected_prediction_tokens = 0
            if completion.token_ids and completion.finish_reason is None:
                output_token_ids[index] = completion.token_ids
        if not output_token_ids and not self.request.already_sent_token_ids:
            return self.request
        return msgspec.structs.replace(self.request, output_token_ids=output_token_ids, already_sent_token_ids=[])

    def take_text(self) -> tuple[str, int]:
        """Return the new text of the only completion, and the number of new tokens."""
        self.has_new_output = False
        return self.completions[0].take_text()

    def take(self) -> Output:
        """Return the request's output, or its new part. Call this if it `has_new_output`; a late caller gets several
        steps in one output."""
        self.has_new_output = False
        if self.pooled is not None:
            return self.pooled
        completions = self.completions
        if self.is_ranked:
            ranked = sorted(completions, key=lambda c: c.cumulative_logprob or 0.0, reverse=True)
            completions = ranked[: self.request.params.n]
            for index, completion in enumerate(completions):
                completion.index = index
        elif self.is_delta and len(completions) > 1:
            completions = [
                c
                for c in completions
                if len(c.token_ids) > c.num_sent_tokens or (c.finish_reason is not None and not c.is_end_sent)
            ]
        self.metrics.last_token_time = self.last_token_time
        prompt, processor = self.request.prompt, self._processor
        make, makes_later = processor.position, processor.makes_logprobs_later
        output = RequestOutput(
            request_id=self.external_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[completion.output(self.is_delta, make, makes_later=makes_later) for completion in completions],
            finished=self.is_over and self.error is None,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            alignment=self.alignment,
        )
        if self.has_prediction:
            accepted, rejected = self.num_prediction_tokens
            output.num_accepted_prediction_tokens, output.num_rejected_prediction_tokens = accepted, rejected
        if self.error is not None:  # the request did not end with this output
            for shown in output.outputs:
                shown.finish_reason = None
        return output


class RequestFailed:
    """Takes the place of a `RequestOutput` if the core has refused the request or could not go on with it."""

    def __init__(self, request_id: str, error: OctavoError) -> None:
        self.request_id, self.error = request_id, error


Result = Output | RequestFailed


class OutputProcessor:
    """The running requests, by id."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        metrics: EngineMetrics | None = None,
        *,
        makes_logprobs_later: bool = False,
        stream_interval: int = 1,
        log_end: Callable[[RequestState], None] | None = None,
    ) -> None:
        """`makes_logprobs_later`: log-probabilities stay as the core sent them until they are read, and callers make
        the vectors of tokens, by calling `outputs` of their result. Each output of a request has at least
        `stream_interval` new tokens, except the first and the last one. `log_end` is called with each request for
        text that has ended."""
        self.tokenizer = tokenizer
        self.makes_logprobs_later = makes_logprobs_later
        self._interval, self._log_end = stream_interval, log_end
        self.metrics = metrics
        self.requests: dict[str, RequestState] = {}

    def add(
        self, request: EngineRequest, external_id: str | None = None,
        first_completion_token_ids: list[int] | None = None,
    ) -> RequestState:  # fmt: skip
        """Expect outputs of a request. Its results have `external_id`, if given, instead of the core's id. The tokens
        of its first completion are put into `first_completion_token_ids`, if given."""
        state = RequestState(request, external_id or request.request_id, self)
        if first_completion_token_ids is not None and state.completions:
            state.completions[0].token_ids = first_completion_token_ids
        self.requests[request.request_id] = state
        return state

    def adopt(self, state: RequestState) -> None:
        """Expect further outputs of a request that another processor has released."""
        state._processor = self
        self.requests[state.request.request_id] = state

    def release(self, request_id: str) -> None:
        """Expect no further outputs of a request, which has not ended."""
        del self.requests[request_id]

    def replay(self, state: RequestState, token_ids: list[int]) -> Output:
        """Return the output for tokens of the only completion, which another server has sent. Raises `RequestError` if
        they end it."""
        if state.completions[0].add(SequenceOutput(state.request.request_id, 0, token_ids)):
            raise RequestError("the tokens of resume end the answer: nothing is left to generate.", param="resume")
        return state.take()

    def abort(self, request_id: str, stop_reason: str | None = None) -> RequestState | None:
        """Remove a request. Returns it, marked as aborted, or None if it is not running."""
        state = self.requests.get(request_id)
        if state is None:
            return None
        for completion in state.completions:
            if completion.finish_reason is None:
                completion.finish_reason, completion.stop_reason = "abort", stop_reason
                completion.num_held_back = 0
        state.has_new_output = True
        self._end(state, time.monotonic())
        return state

    def drop(self, request_id: str, error: OctavoError) -> None:
        """Remove a request that has failed with `error`, if it is running."""
        if (state := self.requests.get(request_id)) is not None:
            state.error = error
            self._end(state, time.monotonic())

    def process(self, outputs: list[SequenceOutput]) -> tuple[list[Result], list[Abort]]:
        """Do the same as `update`, and return the results for callers, at most one a request."""
        changed, aborts = self.update(outputs)
        results: list[Result] = [
            state.take() if state.error is None else RequestFailed(state.external_id, state.error) for state in changed
        ]
        return results, aborts

    def update(self, outputs: list[SequenceOutput]) -> tuple[list[RequestState], list[Abort]]:
        """Add a step's outputs to their requests. Returns the requests with new output or an error, and aborts of
        sequences that stop strings have ended, to be sent to the core."""
        touched: dict[str, RequestState] = {}
        aborts: list[Abort] = []
        first_latencies_s: list[float] = []
        last_times: dict[float, int] = {}  # by time: number of sequences whose last tokens came at that time
        now = time.monotonic()
        requests = self.requests
        for output in outputs:
            state = requests.get(output.request_id)
            if state is None:
                continue  # aborted while the step ran
            if output.finish_reason == "error":
                touched[output.request_id] = state
                message = output.error or "the engine could not process the request"
                state.error = RequestError(message, param=output.error_param, status=output.error_status)
                continue
            if output.vectors is not None:
                touched[output.request_id] = state
                first_latencies_s.append(now - state.metrics.arrival_time)
                self._take_vectors(state, output, now)
                continue
            completion = state.completions[output.index]
            if completion.finish_reason is not None:
                continue  # a stop string has ended it; the core does not know this yet
            touched[output.request_id] = state
            last = completion.last_token_time
            if last is not None:
                last_times[last] = last_times.get(last, 0) + 1
            elif state.metrics.first_token_time is None:
                first_latencies_s.append(now - state.metrics.arrival_time)
                self._record_first_token(state, output, now)
            completion.last_token_time = now
            if output.num_preemptions:
                state.metrics.num_preemptions = max(state.metrics.num_preemptions, output.num_preemptions)
            if state.has_prediction:
                completion.num_accepted_prediction_tokens = output.num_accepted_prediction_tokens
                completion.num_rejected_prediction_tokens = output.num_rejected_prediction_tokens
            if completion.add(output):
                aborts.append(Abort(output.request_id, output.index))
            if completion.finish_reason is not None:
                state.num_running -= 1
                if completion.error is not None:
                    state.error = RequestError(completion.error, status=422, code=str(completion.stop_reason))
        if self.metrics is not None:
            self.metrics.ttft_s.observe_all(first_latencies_s)
            for last, count in last_times.items():
                self.metrics.inter_token_latency_s.observe(now - last, count)
        return self._changed(touched, aborts, now), aborts

    def _changed(self, touched: dict[str, RequestState], aborts: list[Abort], now: float) -> list[RequestState]:
        """Return which of the requests that a step has touched have new output or an error. Requests that have ended
        are removed, and those with an error are added to `aborts`."""
        changed: list[RequestState] = []
        for request_id, state in touched.items():
            state.last_token_time = now
            if state.error is not None:
                aborts.append(Abort(request_id))
                self._end(state, now)
            elif not state.num_running:
                state.has_new_output = True
                self._end(state, now)
            elif state.is_final_only or (self._interval > 1 and self._is_too_soon(state)):
                continue
            else:
                state.has_new_output = True
            changed.append(state)
        return changed

    def _is_too_soon(self, state: RequestState) -> bool:
        num_sent = sum(completion.num_sent_tokens for completion in state.completions)
        return num_sent > 0 and state.num_tokens - num_sent < self._interval

    def _end(self, state: RequestState, now: float) -> None:
        state.metrics.last_token_time, state.metrics.finished_time = state.last_token_time, now
        state.is_over = True
        del self.requests[state.request.request_id]
        self._record_finished(state)
        if self._log_end is not None and state.request.pooling is None:
            self._log_end(state)

    def _take_vectors(self, state: RequestState, output: SequenceOutput, now: float) -> None:
        """Make the result of a pooling request."""
        from octavo.pooling.vectors import finished  # imports numpy, which generating models' servers lack

        request = state.request
        assert request.pooling is not None and output.vectors is not None
        self._record_first_token(state, output, now)
        make = partial(finished, output.vectors, len(request.prompt.token_ids), request.pooling)
        is_later = self.makes_logprobs_later and request.pooling.is_by_token  # may be millions of numbers
        pooled: Any = make if is_later else PoolingOutput(make())
        state.pooled = PoolingRequestOutput(
            state.external_id, pooled, request.prompt.token_ids, metrics=state.metrics,
            num_cached_tokens=state.num_cached_tokens,
        )  # fmt: skip

    def _record_first_token(self, state: RequestState, output: SequenceOutput, now: float) -> None:
        """Record the times and the prompt's figures that come with the first token of a request."""
        state.metrics.first_token_time = now
        state.metrics.first_scheduled_time = output.first_scheduled_time
        state.num_cached_tokens = output.num_cached_tokens
        state.alignment = output.alignment
        if state.request.params.prompt_logprobs is not None:
            made = Positions([None, *(output.prompt_logprobs or ())], self.position)
            state.prompt_logprobs = made if self.makes_logprobs_later else list(made)

    def _record_finished(self, state: RequestState) -> None:
        if self.metrics is None:
            return
        num_generated = [len(completion.token_ids) for completion in state.completions]
        self.metrics.record_finished(
            state.metrics,
            len(state.request.prompt.token_ids),
            num_generated,
            state.request.params if state.request.pooling is None else None,
            state.finish_reason,
            state.num_cached_tokens,
        )

    def position(self, entry: TokenLogprobs, has_ranks: bool = True) -> PositionLogprobs:
        """Return a position's log-probabilities, the sampled token first. Top tokens have the ranks 1, 2, …; the
        sampled token has its measured rank. Without `has_ranks` the other tokens are not the top ones and have no
        rank."""
        tokenizer = self.tokenizer.backend_tokenizer
        position: PositionLogprobs = {}
        for i, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            if token not in position:
                rank = entry.chosen_rank if i == 0 else i if has_ranks else None
                position[token] = Logprob(logprob, rank, decode(tokenizer, [token], skip_special_tokens=False))
        return position
