"""When a sequence ends: at a stop token ("stop") or at its maximum length ("length").

Stop strings are the front end's: `octavo.engine.output_processor`.
"""

from functools import lru_cache

from octavo.request import EngineRequest
from octavo.sequence import Sequence


def stop_reasons(request: EngineRequest) -> dict[int, int | None]:
    """Return the tokens that end a request, each with the `stop_reason` to report; None for end-of-sequence tokens.
    Requests without stop tokens of their own share the result, so that it stays in the processor's caches.

    A request with a grammar ends where its masks allow it, so `ignore_eos` does not apply to it.
    """
    ignores_eos = request.params.ignore_eos and request.params.grammar is None
    end_of_sequence = [] if ignores_eos else request.eos_token_ids
    shared = _end_of_sequence_only(tuple(end_of_sequence))
    if stop_token_ids := request.params.stop_token_ids:
        return shared | dict(zip(stop_token_ids, stop_token_ids, strict=True))
    return shared


@lru_cache(maxsize=16)
def _end_of_sequence_only(tokens: tuple[int, ...]) -> dict[int, int | None]:
    return dict.fromkeys(tokens)


def finish_reason(seq: Sequence) -> str | None:
    """Return why a sequence ends with its last token, or None if it goes on."""
    token_ids = seq.token_ids
    if token_ids[-1] in seq.stop_reasons:
        params = seq.params
        if seq.num_output_tokens >= params.min_tokens or params.grammar is not None:
            return "stop"
    return "length" if len(token_ids) >= seq.max_tokens else None
