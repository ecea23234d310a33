"""The table of languages is that of the published tokenizer."""

from __future__ import annotations

import pytest

from octavo.multimodal.languages import CODES, LANGUAGES


def test_languages_are_those_that_transformers_knows() -> None:
    whisper = pytest.importorskip("transformers.models.whisper.tokenization_whisper")
    assert (LANGUAGES, CODES) == (whisper.LANGUAGES, whisper.TO_LANGUAGE_CODE)
