"""How many tokens of a prompt a step computes: block boundaries, images and the step's time limit cut its chunks."""

from octavo.config import SchedulerConfig
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import Prompt
from octavo.scheduling.time_limit import TimeLimit
from octavo.sequence import Sequence


class PromptChunks:
    """Cuts prompts into chunks. Without chunked prefill only the start of an image (`starts_at_images`) cuts a prompt,
    and callers must give a `max_tokens` that holds the whole prompt."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self._config, self._cache = config, cache

    def length(self, seq: Sequence, num_computed: int, max_tokens: int, time_limit: TimeLimit | None) -> int:
        """Return the number of tokens to compute after `num_computed`: 1 to `max_tokens`, fewer where the time limit, a
        block boundary or an image cuts the chunk. If the model has `whole_images`, no chunk cuts an image: a chunk that
        starts with an image contains all of it, even past the time limit. Returns 0 only if this image has more than
        `max_tokens` tokens left."""
        num_tokens = min(seq.num_tokens - num_computed, max_tokens)
        if num_tokens > 1 and self._config.starts_at_images:
            distances = [item.position - num_computed for item in seq.request.prompt.media]
            num_tokens = min([num_tokens, *(distance for distance in distances if distance > 0)])
        if not self._config.enable_chunked_prefill or (num_tokens == 1 and not self._config.whole_images):
            return num_tokens
        if time_limit is not None:
            num_tokens = time_limit.chunk(num_computed, num_tokens)
        end = self._cache.chunk_end(num_computed, num_computed + num_tokens)
        if self._config.whole_images:
            end = _end_outside_images(seq.request.prompt, num_computed, end, max_tokens)
        return end - num_computed


def _end_outside_images(prompt: Prompt, start: int, end: int, max_tokens: int) -> int:
    """Return the end of a chunk start .. end that cuts no image. A chunk that would end within an image ends before it.
    If it begins with the image it has all of it, or is empty if the image has more than `max_tokens` tokens."""
    for item in prompt.media:
        image_end = item.position + item.num_tokens
        if item.position < end < image_end:
            if item.position > start:
                return item.position
            return image_end if image_end - start <= max_tokens else start
    return end
