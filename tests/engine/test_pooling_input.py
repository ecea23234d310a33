"""Texts that are too long are cut to what is asked for, and templates are filled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from octavo.engine.pooling_input import PoolingInput, Text, _filled, num_cut
from octavo.errors import RequestError
from octavo.pooling_params import PoolingConfig, PoolingParams


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
    found, second_start, places = PoolingInput._cut(inputs, cast(Any, encoding), params)
    assert (found, second_start, [ids[place] for place in places]) == (kept, 4, kept)


@pytest.mark.parametrize(
    ("side", "limit", "skipped", "ids"),
    [
        ("right", None, 4, [0, 3, 4, 5, 2, 2, 2, 1]),
        ("right", 6, 4, [0, 3, 4, 5, 2, 1]),
        ("left", 6, 2, [0, 5, 2, 2, 2, 1]),
        ("left", 4, 1, [0, 2, 2, 1]),
    ],
)
def test_pooling_skips_what_is_left_of_an_instruction(
    side: Any, limit: int | None, skipped: int, ids: list[int]
) -> None:
    tokenizer = Tokenizer(WordLevel({"[s]": 0, "[e]": 1, "?": 2, "read": 3, "it": 4, "well": 5}, "?"))
    tokenizer.pre_tokenizer = Split(" ", "removed")
    tokenizer.post_processor = TemplateProcessing("[s] $A [e]", special_tokens=[("[s]", 0), ("[e]", 1)])
    config = PoolingConfig(
        "embed", "MEAN", prompts={"p": "Read-It-Well "}, default_prompt="p", pools_prompts=False, lowers_case=True
    )
    model = SimpleNamespace(pooling=config, max_model_len=50, checkpoint=SimpleNamespace(config={}))
    inputs: Any = SimpleNamespace(model=model, check_priority=id, check_known=id, new_id=str)
    inputs.encode_all = lambda texts, *_, **__: tokenizer.encode_batch([text.replace("-", " ") for text in texts])
    params = PoolingParams(truncate_prompt_tokens=limit, truncation_side=side)
    [request] = PoolingInput(inputs).process([Text("a b c")], params)
    assert request.pooling is not None and request.pooling.num_skipped == skipped
    assert request.prompt.token_ids == ids


@pytest.mark.parametrize(
    ("name", "value"), [("dimensions", "5"), ("dimensions", 2.5), ("truncate_prompt_tokens", "5"), ("normalize", "no")]
)
def test_values_of_a_wrong_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name.replace('normalize', 'use_activation')} must be .+, got {value!r}"):
        PoolingParams(**{name: value})


def test_a_template_is_filled_with_texts_as_they_are() -> None:
    texts = {"query": "a{document}", "document": "{query}"}
    assert _filled("<{query}>, <{document}>", texts) == ("<a{document}>, <{query}>", (16, 23))
