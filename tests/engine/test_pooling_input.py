"""Texts that are too long are cut to what is asked for, and templates are filled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.engine.pooling_input import PoolingInput, _filled, num_cut
from octavo.errors import RequestError
from octavo.pooling_params import PoolingParams


@pytest.mark.parametrize("first", range(6))
def test_of_two_texts_the_longer_is_cut_first(first: int) -> None:
    for second in range(6):
        left = [first, second]
        for excess in range(first + second + 1):
            assert num_cut(first, second, excess) == (first - left[0], second - left[1])
            left[0 if left[0] >= left[1] else 1] -= 1


@pytest.mark.parametrize(
    ("side", "kept"), [("left", [0, 12, 13, 100, 21, 22, 101]), ("right", [0, 10, 11, 100, 20, 21, 101])]
)
def test_special_tokens_stay_and_each_text_is_cut_at_one_side(side: Any, kept: list[int]) -> None:
    ids, owners = [0, 10, 11, 12, 13, 100, 20, 21, 22, 101], [None, 0, 0, 0, 0, None, 1, 1, 1, None]
    encoding = SimpleNamespace(ids=ids, type_ids=[0] * 6 + [1] * 4, sequence_ids=owners)
    model = SimpleNamespace(max_model_len=50, checkpoint=SimpleNamespace(config={}))
    inputs = cast(PoolingInput, SimpleNamespace(_model=model, _limit=lambda params: params.truncate_prompt_tokens))
    params = PoolingParams(truncate_prompt_tokens=7, truncation_side=side)
    assert PoolingInput._cut(inputs, cast(Any, encoding), params) == (kept, 4)


@pytest.mark.parametrize(
    ("name", "value"), [("dimensions", "5"), ("dimensions", 2.5), ("truncate_prompt_tokens", "5"), ("normalize", "no")]
)
def test_values_of_a_wrong_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name.replace('normalize', 'use_activation')} must be .+, got {value!r}"):
        PoolingParams(**{name: value})


def test_a_template_is_filled_with_texts_as_they_are() -> None:
    texts = {"query": "a{document}", "document": "{query}"}
    assert _filled("<{query}>, <{document}>", texts) == ("<a{document}>, <{query}>", (16, 23))
