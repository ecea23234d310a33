"""Verification of draft tokens: a draft token stands if the model samples the same token at its position. The random
number of a position depends on the request's seed alone, so that drafts never change an answer."""

from collections.abc import Sequence


def count_valid_tokens(draft_tokens: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many of `tokens`, one sampled after each position, are valid: the accepted draft tokens and the token
    after them."""
    for i, draft_token in enumerate(draft_tokens):
        if tokens[i] != draft_token:
            return i + 1
    return len(draft_tokens) + 1
