"""Structured outputs of the default model through `LLM`: every answer is what was asked for, whatever else happens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.errors import RequestError
from tests.e2e.driving import run_arriving

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 8}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(max_model_len=1024, max_num_seqs=64, num_gpu_blocks_override=2048, check_invariants=True)
    yield llm
    assert llm.core.scheduler.cache.pools[0].num_used == 0, "blocks are in use when idle"


def structured(temperature: float = 0.0, max_tokens: int = 900, **fields: Any) -> SamplingParams:
    names = StructuredOutputsParams.__struct_fields__
    wanted = StructuredOutputsParams(**{name: fields.pop(name) for name in names if name in fields})
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, structured_outputs=wanted, **fields)


def test_every_kind_of_structure_is_followed_beside_free_text(llm: LLM) -> None:
    prompts = ["The colour of grass is", "Call me:", "Numbers:", "As JSON:", "Once upon a time"]
    kinds = [
        structured(choice=["red", "green", "blau-grün"]),
        structured(temperature=1.0, seed=3, regex=r"\d{3}-\d{4}"),
        structured(grammar='start: NUMBER (", " NUMBER){2}\nNUMBER: /[0-9]{1,3}/'),
        structured(json=PERSON),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]
    texts = [output.outputs[0].text for output in llm.generate(prompts, kinds, use_tqdm=False)]
    assert texts[0] in ("red", "green", "blau-grün")
    assert re.fullmatch(r"\d{3}-\d{4}", texts[1])
    assert re.fullmatch(r"\d{1,3}, \d{1,3}, \d{1,3}", texts[2])
    jsonschema.validate(json.loads(texts[3]), PERSON)
    for prompt, kind, text in zip(prompts, kinds, texts, strict=True):
        assert llm.generate(prompt, kind, use_tqdm=False)[0].outputs[0].text == text


def test_tags_within_free_text(llm: LLM) -> None:
    """Once a trigger has come what follows is a call, even if the model would have gone on in another way."""
    structures = [{"begin": "<call>", "schema": PERSON, "end": "</call>"}]
    tag = {"structures": structures, "triggers": ["<call>"]}
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (text,) = [output.outputs[0].text for output in llm.generate("Once upon", free, use_tqdm=False)]
    same = structured(structural_tag=json.dumps(tag), max_tokens=12, ignore_eos=True)
    assert llm.generate("Once upon", same, use_tqdm=False)[0].outputs[0].text == text
    once = {"type": "triggered_tags", "triggers": ["<call>"], "at_least_one": True, "stop_after_first": True, "tags": [
        {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</call>"},
    ]}  # fmt: skip
    one = structured(structural_tag={"type": "structural_tag", "format": once})
    (called,) = [output.outputs[0].text for output in llm.generate("A person:", one, use_tqdm=False)]
    jsonschema.validate(json.loads(called.removeprefix("<call>").removesuffix("</call>")), PERSON)


def test_a_grammar_holds_with_other_parameters(llm: LLM) -> None:
    params = structured(
        temperature=1.0, seed=1, json=PERSON, n=3, logprobs=2, repetition_penalty=1.1, top_p=0.9, logit_bias={300: 5.0},
        presence_penalty=0.5,
    )  # fmt: skip
    (output,) = llm.generate("A person as JSON:", params, use_tqdm=False)
    assert len({completion.text for completion in output.outputs}) > 1
    for completion in output.outputs:
        jsonschema.validate(json.loads(completion.text), PERSON)
        assert completion.finish_reason == "stop"
        positions = zip(completion.token_ids, completion.logprobs or [], strict=True)
        assert all(-1000 < position[token].logprob <= 0 for token, position in positions)


def test_the_grammar_says_when_an_answer_may_end(llm: LLM) -> None:
    def answer(**fields: Any) -> Any:
        return llm.generate("aaaa", structured(**fields), use_tqdm=False)[0].outputs[0]

    assert len(answer(regex="a{3,40}", ignore_eos=True).text) == 40
    assert len(answer(regex="(?:ab){2}", min_tokens=30).text) == 4  # nothing else may follow: it ends early
    long = answer(regex="(?:[a-z] ){1,40}", min_tokens=20)
    assert len(long.token_ids) >= 20
    assert long.finish_reason == "stop"
    cut = answer(json=PERSON, max_tokens=3)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    stopped = answer(regex="[a-z]{1,30}!", stop=["!"])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "!")


@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
@pytest.mark.long
def test_preempted_requests_follow_their_grammar_to_the_same_answer(mode: str) -> None:
    prompts = [f"Person number {i} as JSON: " for i in range(12)]
    params = [structured(temperature=0.9 * (i % 2), seed=i, json=PERSON, n=1 + (i == 3)) for i in range(12)]
    small = LLM(
        max_model_len=128, num_gpu_blocks_override=8, preemption_mode=mode, swap_space=0.1, check_invariants=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    alone = [small.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    run = run_arriving(small, prompts, params, seed=1)
    assert run.num_preemptions > 0
    for output, expected in zip(run.outputs, alone, strict=True):
        assert [c.text for c in output.outputs] == [c.text for c in expected.outputs]


def test_what_cannot_be_followed_is_refused_and_nothing_else_is_hurt(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.json cannot be followed"):
        llm.generate("x", structured(json={"type": "odd"}), use_tqdm=False)
    with pytest.raises(RequestError, match="no token could be chosen"):
        llm.generate("x", structured(regex="[0-9]+", allowed_token_ids=[300]), use_tqdm=False)
    assert llm.generate("x", structured(choice=["fine"]), use_tqdm=False)[0].outputs[0].text == "fine"
