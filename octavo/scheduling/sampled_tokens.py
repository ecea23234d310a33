"""The effects of a step's result on a sequence. With sampled tokens it goes on, forks, is held for its beam search, or
ends. A sequence of a model that pools ends with its vectors."""

import numpy as np
from numpy.typing import NDArray

from octavo.request import SequenceOutput, TokenLogprobs
from octavo.scheduling.sequence_queues import SequenceQueues
from octavo.scheduling.stop_tokens import finish_reason
from octavo.sequence import Sequence
from octavo.step_plan import StepResult

Logprobs = list[TokenLogprobs | None] | None  # parallel to tokens


def keep_prompt_results(seq: Sequence, row: int, first: int, result: StepResult) -> None:
    """Keep the log-probabilities and the alignment of a prompt from position `first` on, until they are reported. If
    the prompt was preempted and is computed again, equal values replace the earlier ones."""
    if seq.has_reported:
        return
    if row in result.prompt_logprobs:
        seq.prompt_logprobs[first:] = result.prompt_logprobs[row]
    if row in result.alignment:
        seq.alignment[first:] = result.alignment[row]


def hold_for_beam_search(seq: Sequence, logprobs: Logprobs) -> list[SequenceOutput]:
    """Hold a sequence until beam search has chosen its next token. Returns the request's new outputs."""
    found = logprobs[0] if logprobs is not None else None
    assert seq.beam_search is not None and found is not None, "there are no tokens to choose from"
    seq.is_held = True
    seq.num_pending_forks = 0  # beam search forks beams into the rows kept for them
    return seq.beam_search.propose(seq, found)


def start_forks(queues: SequenceQueues, seq: Sequence, tokens: list[int], logprobs: Logprobs) -> list[SequenceOutput]:
    """Start the siblings of a sequence whose prompt is computed, each with its own first token."""
    seq.num_pending_forks = 0
    siblings = [seq, *[queues.fork(seq, index) for index in range(1, len(tokens))]]
    return [
        extend(queues, sibling, tokens[i : i + 1], logprobs[i : i + 1] if logprobs is not None else None)
        for i, sibling in enumerate(siblings)
    ]


def accept_drafts(
    queues: SequenceQueues, seq: Sequence, num_valid: int, tokens: list[int], logprobs: Logprobs
) -> SequenceOutput:
    """Add the first `num_valid` tokens, and undo the computation of rejected draft tokens."""
    if seq.row is None:  # it was preempted meanwhile: nothing computed is left
        return extend(queues, seq, tokens[:num_valid], logprobs)
    seq.num_computed_tokens += num_valid - 1  # the accepted draft tokens; the token after them was not computed
    output = extend(queues, seq, tokens[:num_valid], logprobs)
    if not seq.has_ended:
        queues.cache.register_computed(seq, seq.num_computed_tokens)
        queues.cache.roll_back(seq, num_valid - 1)
    return output


def end_with_vectors(queues: SequenceQueues, seq: Sequence, vectors: NDArray[np.float32]) -> SequenceOutput:
    """End a sequence of a model that pools with its result, vectors [num_vectors, size]."""
    output = seq.output([], "stop")
    output.vectors = vectors.tobytes()
    queues.drop(seq)
    return output


def extend(queues: SequenceQueues, seq: Sequence, tokens: list[int], logprobs: Logprobs) -> SequenceOutput:
    """Add sampled tokens, up to the one that ends the sequence."""
    reason: str | None = None
    stop_reason: int | None = None
    token_ids, stops, most = seq.token_ids, seq.stop_reasons, seq.max_tokens
    num_before = len(token_ids)
    for token in tokens:
        token_ids.append(token)
        # This happens for every token, and few may be the last one.
        if (token in stops or len(token_ids) >= most) and (reason := finish_reason(seq)) is not None:
            stop_reason = seq.stop_reasons[token] if reason == "stop" else None
            tokens = tokens[: len(token_ids) - num_before]
            break
    output = seq.output(tokens, reason, stop_reason)
    if logprobs is not None:
        output.logprobs = [entry for entry in logprobs[: len(tokens)] if entry is not None] or None
    if reason is not None:
        queues.drop(seq)
    return output
