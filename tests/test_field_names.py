"""Errors about a field under another name."""

from __future__ import annotations

import pytest

from octavo.errors import RequestError
from octavo.field_names import FieldNames

NAMES = FieldNames({
    "stop": "stop_sequences",
    "max_tokens": "num_predict",
    "tools[].function.name": "tools[].name",
    "format": "text.format",
    "format.json_schema.schema": "text.format.schema",
})  # fmt: skip


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        ("stop must be texts", "stop_sequences must be texts"),
        ("texts to stop at", "texts to stop at"),
        ("stops", "stops"),
        ("stop_token_ids", "stop_token_ids"),
        ("min_tokens is at most max_tokens (3)", "min_tokens is at most num_predict (3)"),
        ("options.max_tokens, my_max_tokens, max_tokens_2", "options.max_tokens, my_max_tokens, max_tokens_2"),
        ("tools[12].function.name is wrong", "tools[12].name is wrong"),
        ("tools[1].function.names", "tools[1].function.names"),
        ("format is wrong", "text.format is wrong"),
        ("format.json_schema.schema.type is wrong", "text.format.schema.type is wrong"),
        ("the client's max_tokens is 'max_tokens'", "the client's num_predict is 'max_tokens'"),
        (
            'max_tokens: got "don\'t max_tokens", not max_tokens',
            'num_predict: got "don\'t max_tokens", not num_predict',
        ),
        (r"'\' max_tokens', max_tokens", r"'\' max_tokens', num_predict"),
        ("max_tokens: got 'cut off, max_tokens", "num_predict: got 'cut off, max_tokens"),
    ],
)
def test_only_whole_names_are_renamed(text: str, renamed: str) -> None:
    assert NAMES.in_text(text) == renamed
    assert NAMES.in_text(renamed) == renamed


def test_an_error_names_the_other_field_in_text_and_param() -> None:
    error = NAMES.renamed(RequestError("stop must be texts", param="stop"))
    assert (str(error), error.param) == ("stop_sequences must be texts", "stop_sequences")
    assert NAMES.renamed(RequestError("No.")).param is None
