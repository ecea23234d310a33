"""The bytes of tokens, which clients put together to characters that tokens share."""

from __future__ import annotations

import pytest

from octavo.entrypoints.openai.logprobs_format import token_bytes


@pytest.mark.parametrize(
    ("text", "piece", "expected"),
    [
        ("Grüße", "irrelevant", "Grüße".encode()),
        ("\N{REPLACEMENT CHARACTER}", "<0xE2>", b"\xe2"),  # SentencePiece
        ("\N{REPLACEMENT CHARACTER}", "Ã", b"\xc3"),  # GPT-2: one printable character a byte
        (" \N{REPLACEMENT CHARACTER}", "ĠðŁ", b" \xf0\x9f"),
        ("\N{REPLACEMENT CHARACTER}", None, "\N{REPLACEMENT CHARACTER}".encode()),
        ("\N{REPLACEMENT CHARACTER}", "世", "\N{REPLACEMENT CHARACTER}".encode()),  # a vocabulary that we do not know
    ],
)
def test_a_part_of_a_character_has_the_bytes_that_its_piece_stands_for(
    text: str, piece: str | None, expected: bytes
) -> None:
    assert token_bytes(text, lambda: piece) == expected
