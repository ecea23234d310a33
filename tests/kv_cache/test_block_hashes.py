"""The chain of hashes: equal only where keys and values are."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from octavo.kv_cache import block_hashes
from octavo.kv_cache.block_hashes import extend_block_hashes, prompt_hashes, split_hashes
from octavo.request import EngineRequest, MediaItem, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence

SIZE = 4


def sequence(tokens: list[int], **prompt: Any) -> Sequence:
    request = EngineRequest("r", Prompt(tokens, **prompt), SamplingParams(), [0], 16, 0.0)
    return Sequence(request=request, key=(0, 0), seed=0, token_ids=array("i", tokens))


def hashes(tokens: list[int], **prompt: Any) -> list[bytes]:
    seq = sequence(tokens, **prompt)
    extend_block_hashes(seq, SIZE)
    return seq.block_hashes


def test_hashes_depend_on_tokens_and_parents_and_grow_with_the_tokens() -> None:
    long = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(long) == 2
    assert long[:1] == hashes([1, 2, 3, 4])
    assert hashes([5, 6, 7, 8, 5, 6, 7, 8])[0] != hashes([5, 6, 7, 8, 5, 6, 7, 8])[1]
    seq = sequence([1, 2, 3, 4, 5, 6, 7])
    extend_block_hashes(seq, SIZE)
    seq.token_ids.extend([8, 9])
    extend_block_hashes(seq, SIZE)
    assert seq.block_hashes == long


def test_hashes_that_a_request_brings_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, salted = list(range(11)), {"cache_salt": "x"}
    seq, expected = sequence(tokens, **salted), hashes(tokens, **salted)
    seq.block_hashes = split_hashes(prompt_hashes(seq.request.prompt, SIZE))
    assert seq.block_hashes == expected
    monkeypatch.setattr(block_hashes, "_digest", None)
    extend_block_hashes(seq, SIZE)
    assert seq.block_hashes == expected


def test_salt_and_adapter_are_part_of_every_hash_and_are_not_mistaken_for_each_other() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    plain = hashes(tokens)
    assert hashes(tokens, cache_salt="") == plain, "no salt and an empty one are the same"
    others = [hashes(tokens, cache_salt="x"), hashes(tokens, adapter="x"), hashes(tokens, cache_salt="x", adapter="x")]
    assert len({tuple(found) for found in [plain, *others]}) == 4
    assert all(found[1] != plain[1] for found in others)


def test_blocks_under_media_depend_on_its_content_and_on_which_part_of_it_they_hold() -> None:
    tokens = [1, 2, 9, 9, 9, 9, 9, 9, 3, 4, 5, 6]

    def picture(content: bytes, position: int = 2, num_tokens: int = 6) -> list[bytes]:
        return hashes(tokens, media=(MediaItem(position, num_tokens, content),))

    plain, cat, dog = hashes(tokens), picture(b"cat"), picture(b"dog")
    assert picture(b"cat") == cat
    assert all(len({a, b, c}) == 3 for a, b, c in zip(plain, cat, dog, strict=True)), "and all blocks behind it"
    late = hashes(tokens, media=(MediaItem(4, 4, b"cat"),))
    assert late[0] == plain[0], "a block before the media does not depend on it"
    assert late[1] != picture(b"cat", position=5, num_tokens=3)[1], "it begins elsewhere"
