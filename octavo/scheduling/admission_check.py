"""Refuses requests that can never run, before they are queued, with the numbers in the message."""

from octavo.config import SchedulerConfig
from octavo.errors import RequestError
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import EngineRequest


def check_request(request: EngineRequest, config: SchedulerConfig, cache: KVCacheManager) -> None:
    """Raise `RequestError` if the request could not run even alone."""
    num_prompt, num_sequences = len(request.prompt.token_ids), request.params.num_sequences
    if config.whole_images:
        largest = max((item.num_tokens for item in request.prompt.media), default=0)
        # Each running sequence keeps a token of a step's budget.
        if largest > (room := config.max_num_batched_tokens - config.max_num_seqs):
            raise RequestError(
                f"a picture of {largest} tokens is computed in one step, which has room for {room} of them: "
                "--max-num-batched-tokens less --max-num-seqs."
            )
    longest = num_prompt + max(0, request.max_tokens - 1)  # the last token that is sampled is never computed
    needed = cache.most_blocks(longest, config.max_num_batched_tokens)
    if any(count > pool.num_usable for count, pool in zip(needed, cache.pools, strict=True)):
        capacity = cache.capacity(config.max_num_batched_tokens)
        raise RequestError(
            f"the request needs {longest} tokens of KV cache ({num_prompt} of prompt and up to {longest - num_prompt} "
            f"of output: its last token takes none) and the cache holds {capacity}."
        )
    if request.params.use_beam_search:  # one beam cannot end before the others: they must fit side by side
        for count, pool in zip(needed, cache.pools, strict=True):
            if num_sequences * count > pool.num_usable:
                raise RequestError(
                    f"{num_sequences} beams of up to {longest} tokens need {num_sequences * count} blocks of KV cache "
                    f"at once and it has {pool.num_usable}.",
                    param="n",
                )
    if num_sequences > config.max_num_seqs:
        raise RequestError(
            f"the request needs {num_sequences} sequences at once and --max-num-seqs is {config.max_num_seqs}.",
            param="n",
        )
