"""Makes `RequestOutput`s of the core's outputs: text, stop strings, the best of `best_of`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from octavo.engine.detokenizer import Detokenizer, StopStrings, make_detokenizer
from octavo.engine.wire import Abort
from octavo.errors import RequestError
from octavo.outputs import (
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    PositionLogprobs,
    PromptPositions,
    RequestMetrics,
    RequestOutput,
)
from octavo.request import EngineRequest, SequenceOutput, TokenLogprobs
from octavo.sampling_params import RequestOutputKind
from octavo.structured_output.final_check import MISMATCH, FinalCheck

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer
    from octavo.metrics.prometheus import EngineMetrics


class _Completion:
    """One sequence of a request: its tokens and text so far."""

    def __init__(self, request: EngineRequest, index: int, tokenizer: ModelTokenizer) -> None:
        params = request.params
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""  # all of it, with what is held back
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = 0.0 if params.wants_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_held_back = 0
        self.num_sent_chars = 0
        self.num_sent_tokens = 0
        self._num_readable = 0  # tokens that are part of the text
        self._num_read = 0  # tokens that the text has
        self.is_end_sent = False
        self.last_token_time: float | None = None
        self._final_check = request.final_check
        self.error: str | None = None
        self._stop = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
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
        """Add new tokens. Returns True if a stop string ends the sequence, which the core does not know yet."""
        num_before = len(self.token_ids)
        is_stopped = self._take(output)
        if output.logprobs is not None:
            for entry in output.logprobs[: len(self.token_ids) - num_before]:
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry.logprobs[0]
        return is_stopped

    def _take(self, output: SequenceOutput) -> bool:
        num_hidden = int(output.finish_reason == "stop" and not self._shows_stop_token)
        if self._stop is None:  # the text is made when it is needed
            self.token_ids += output.token_ids
            self._num_readable = len(self.token_ids) - num_hidden
        else:
            end = len(self.token_ids) + len(output.token_ids) - num_hidden
            for token in output.token_ids:
                self.token_ids.append(token)
                self._num_readable = min(len(self.token_ids), end)
                if self._is_stopped_by_text(self._read()):
                    return output.finish_reason is None
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self.num_held_back = 0
            self._read()
            if self._detokenizer is not None:
                rest = self._detokenizer.flush()
                self.text += rest
                self._is_stopped_by_text(len(rest))
            if self._final_check is not None and self.finish_reason == "stop":
                self._check(self._final_check)
        elif self._stop is not None:
            self.num_held_back = self._stop.num_held_back(self.text)
        return False

    def _check(self, check: FinalCheck) -> None:
        """Compare the whole answer with its schema."""
        if (problem := check.problem(self.text)) is not None:
            self.stop_reason = MISMATCH
            if check.mode == "error":
                self.error = f"the answer does not satisfy its schema: {problem}"

    def _read(self) -> int:
        """Update the text. Returns how many characters are new."""
        if self._detokenizer is None or self._num_read == self._num_readable:
            return 0
        new = self._detokenizer.add(self.token_ids[self._num_read : self._num_readable])
        self._num_read = self._num_readable
        self.text += new
        return len(new)

    def _is_stopped_by_text(self, num_new: int) -> bool:
        if self._stop is None or not num_new or len(self.token_ids) < self._min_tokens:
            return False
        if (found := self._stop.find(self.text, num_new)) is None:
            return False
        self.stop_reason, cut = found
        self.text = self.text[:cut]
        self.finish_reason = "stop"
        self.num_held_back = 0
        return True

    def output(self, is_delta: bool) -> CompletionOutput:
        """Return the text that may be shown: all of it, or what is new."""
        self._read()
        shown = len(self.text) - self.num_held_back
        chars = self.num_sent_chars if is_delta else 0
        tokens = self.num_sent_tokens if is_delta else 0
        self.num_sent_chars, self.num_sent_tokens = shown, len(self.token_ids)
        self.is_end_sent = self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=self.text[chars:shown],
            token_ids=self.token_ids[tokens:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestState:
    """A running request: its completions and its times, whichever core computes it."""

    def __init__(self, request: EngineRequest, tokenizer: ModelTokenizer, external_id: str) -> None:
        self.request = request
        self.external_id = external_id
        num_completions = 0 if request.pooling is not None else request.params.num_completions
        self.completions = [_Completion(request, i, tokenizer) for i in range(num_completions)]
        self.prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
        self.alignment: bytes | None = None
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.error_status = 400
        self.pooling_end = "abort"  # why a pooling request has ended, until its vectors come
        self.num_tokens_at_death: int | None = None  # if the last core died with it in the step
        self.num_predicted = (0, 0)  # tokens of its prediction that earlier cores accepted and rejected
        params = request.params
        self.is_delta = params.output_kind is RequestOutputKind.DELTA
        # The best completions are known only at the end.
        self.is_ranked = params.num_completions > params.n
        self.is_final_only = self.is_ranked or params.output_kind is RequestOutputKind.FINAL_ONLY

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def num_prediction_tokens(self) -> tuple[int, int]:
        """Return how many tokens of its prediction were accepted and rejected, by all completions."""
        accepted, rejected = self.num_predicted
        accepted += sum(completion.num_accepted_prediction_tokens for completion in self.completions)
        return accepted, rejected + sum(completion.num_rejected_prediction_tokens for completion in self.completions)

    def remainder(self) -> EngineRequest:
        """Return the request for a core that does not know it: with the tokens of the completions that go on. Without
        any, as in a beam search, it begins anew."""
        self.num_predicted = self.num_prediction_tokens
        output_token_ids = {}
        for index, completion in enumerate(self.completions):
            completion.num_accepted_prediction_tokens = completion.num_rejected_prediction_tokens = 0
            if completion.token_ids and completion.finish_reason is None:
                output_token_ids[index] = completion.token_ids
        prompt = msgspec.structs.replace(self.request.prompt, text=None)  # the core does not need it
        return msgspec.structs.replace(self.request, prompt=prompt, output_token_ids=output_token_ids)

    @property
    def is_finished(self) -> bool:
        if self.error is None:
            for completion in self.completions:
                if completion.finish_reason is None:
                    return False
        return True


class RequestFailed:
    """Instead of a `RequestOutput`: the core has refused the request or could not go on with it."""

    def __init__(self, request_id: str, message: str, status: int) -> None:
        self.request_id = request_id
        self.error = RequestError(message, status=status)


Result = RequestOutput | PoolingRequestOutput[PoolingOutput] | RequestFailed


class OutputProcessor:
    """The running requests, by id."""

    def __init__(
        self, tokenizer: ModelTokenizer, metrics: EngineMetrics | None = None, *, makes_prompts_later: bool = False
    ) -> None:
        """`makes_prompts_later`: log-probabilities of prompts are made when they are read, and not in `process`."""
        self.tokenizer = tokenizer
        self._makes_prompts_later = makes_prompts_later
        self.metrics = metrics
        self.requests: dict[str, RequestState] = {}

    def add(self, request: EngineRequest, external_id: str | None = None) -> RequestState:
        """Expect outputs of a request. Its results have `external_id`, if given, instead of the core's id."""
        state = RequestState(request, self.tokenizer, external_id or request.request_id)
        self.requests[request.request_id] = state
        return state

    def abort(self, request_id: str, stop_reason: str | None = None) -> RequestOutput | None:
        """Remove a request. Returns its output so far, marked as aborted, or None if it is not running."""
        state = self.requests.pop(request_id, None)
        if state is None:
            return None
        for completion in state.completions:
            if completion.finish_reason is None:
                completion.finish_reason, completion.stop_reason = "abort", stop_reason
                completion.num_held_back = 0
        state.metrics.finished_time = time.monotonic()
        self._record_finished(state)
        return self._output(state, is_finished=True)

    def drop(self, request_id: str) -> bool:
        """Remove a request that the core has lost; it ends as an error. Returns False if it is not running."""
        state = self.requests.pop(request_id, None)
        if state is None:
            return False
        state.error = "lost"
        state.metrics.finished_time = time.monotonic()
        self._record_finished(state)
        return True

    def process(self, outputs: list[SequenceOutput]) -> tuple[list[Result], list[Abort]]:
        """Process a step's outputs. Returns the results for callers, at most one a request, and aborts of sequences
        that stop strings have ended, to be sent to the core."""
        touched: dict[str, RequestState] = {}
        results: list[Result] = []
        aborts: list[Abort] = []
        first_latencies_s: list[float] = []
        latencies_s: list[float] = []
        now = time.monotonic()
        for output in outputs:
            state = self.requests.get(output.request_id)
            if state is None:
                continue  # aborted while the step ran
            if output.finish_reason == "error":
                touched[output.request_id] = state
                state.error = output.error or "the engine could not process the request"
                state.error_status = output.error_status
                continue
            if output.vectors is not None:
                results.append(self._pooled(state, output, now))
                first_latencies_s.append(now - state.metrics.arrival_time)
                continue
            completion = state.completions[output.index]
            if completion.finish_reason is not None:
                continue  # ended by a stop string; the core does not know yet
            touched[output.request_id] = state
            times = state.metrics
            if times.first_token_time is None:
                first_latencies_s.append(now - times.arrival_time)
                self._begin(state, output, now)
            elif completion.last_token_time is not None:
                latencies_s.append(now - completion.last_token_time)
            completion.last_token_time = times.last_token_time = now
            if output.num_preemptions > times.num_preemptions:
                times.num_preemptions = output.num_preemptions
            completion.num_accepted_prediction_tokens = output.num_accepted_prediction_tokens
            completion.num_rejected_prediction_tokens = output.num_rejected_prediction_tokens
            if completion.add(output):
                aborts.append(Abort(output.request_id, output.index))
            if completion.error is not None:
                state.error, state.error_status = completion.error, 422
            if completion.logprobs is not None and output.logprobs is not None:
                num_taken = len(completion.token_ids) - len(
                    completion.logprobs
                )  # a stop string may end it in the middle
                completion.logprobs += [self._position(entry) for entry in output.logprobs[:num_taken]]
        if self.metrics is not None:
            self.metrics.ttft_s.observe_all(first_latencies_s)
            self.metrics.inter_token_latency_s.observe_all(latencies_s)
        for request_id, state in touched.items():
            is_finished = state.is_finished
            if is_finished:
                state.metrics.finished_time = now
                del self.requests[request_id]
                self._record_finished(state)
            if state.error is not None:
                aborts.append(Abort(request_id))
                results.append(RequestFailed(state.external_id, state.error, state.error_status))
            elif is_finished or not state.is_final_only:
                results.append(self._output(state, is_finished))
        return results, aborts

    def _pooled(self, state: RequestState, output: SequenceOutput, now: float) -> PoolingRequestOutput[PoolingOutput]:
        """Return the result of a pooling request."""
        from octavo.pooling.vectors import finished  # with numpy, which servers of models that generate do without

        request = state.request
        assert request.pooling is not None and output.vectors is not None
        self._begin(state, output, now)
        state.metrics.last_token_time = state.metrics.finished_time = now
        state.pooling_end = "stop"
        del self.requests[output.request_id]
        self._record_finished(state)
        num_tokens = len(request.prompt.token_ids)
        data = finished(output.vectors, num_tokens, request.pooling)
        return PoolingRequestOutput(
            state.external_id, PoolingOutput(data), request.prompt.token_ids, metrics=state.metrics,
            num_cached_tokens=state.num_cached_tokens,
        )  # fmt: skip

    def _begin(self, state: RequestState, output: SequenceOutput, now: float) -> None:
        """Record what comes with the first token of a request: times, and figures of its prompt."""
        state.metrics.first_token_time = now
        state.metrics.first_scheduled_time = output.first_scheduled_time
        state.num_cached_tokens = output.num_cached_tokens
        state.alignment = output.alignment
        if state.request.params.prompt_logprobs is not None:
            entries = output.prompt_logprobs or ()
            made = PromptPositions(1 + len(entries), lambda index: self._position(entries[index - 1]))
            state.prompt_logprobs = made if self._makes_prompts_later else list(made)

    def _record_finished(self, state: RequestState) -> None:
        if self.metrics is None:
            return
        reason: str | None = "error"
        if state.error is None:
            reason = state.completions[0].finish_reason if state.completions else state.pooling_end
        num_generated = [len(completion.token_ids) for completion in state.completions]
        self.metrics.record_finished(
            state.metrics,
            len(state.request.prompt.token_ids),
            num_generated,
            state.request.params,
            reason,
            state.num_cached_tokens,
        )

    def _output(self, state: RequestState, is_finished: bool) -> RequestOutput:
        completions = state.completions
        if state.is_ranked:
            ranked = sorted(completions, key=lambda c: c.cumulative_logprob or 0.0, reverse=True)
            completions = ranked[: state.request.params.n]
            for index, completion in enumerate(completions):
                completion.index = index
        elif state.is_delta:
            completions = [
                c
                for c in completions
                if len(c.token_ids) > c.num_sent_tokens or (c.finish_reason is not None and not c.is_end_sent)
            ]
        accepted, rejected = state.num_prediction_tokens
        return RequestOutput(
            request_id=state.external_id,
            prompt=state.request.prompt.text,
            prompt_token_ids=state.request.prompt.token_ids,
            outputs=[completion.output(state.is_delta) for completion in completions],
            finished=is_finished,
            prompt_logprobs=state.prompt_logprobs,
            metrics=state.metrics,
            num_cached_tokens=state.num_cached_tokens,
            num_accepted_prediction_tokens=accepted,
            num_rejected_prediction_tokens=rejected,
            alignment=state.alignment,
        )

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        """Return a position's log-probabilities, the sampled token first. Top tokens rank 1, 2, …; the sampled one has
        its own rank."""
        decode = self.tokenizer.backend_tokenizer.decode
        position: PositionLogprobs = {}
        for i, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            if token not in position:
                rank = entry.chosen_rank if i == 0 else i
                position[token] = Logprob(logprob, rank, decode([token], skip_special_tokens=False))
        return position
