"""What `SamplingParams` accepts, normalises and refuses."""

from __future__ import annotations

import inspect
import math
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from octavo import SamplingParams
from octavo.errors import OctavoError, RequestError
from octavo.sampling_params import _RANGES, GuidedDecodingParams, RequestOutputKind, StructuredOutputsParams

# The names that users of vLLM know.
NAMES = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "bad_words", "include_stop_str_in_output", "ignore_eos", "max_tokens",
    "min_tokens", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "logit_bias", "allowed_token_ids", "structured_outputs", "logits_processors", "truncate_prompt_tokens",
)  # fmt: skip


def test_seed_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1).seed is None and SamplingParams(seed=-2).seed == -2


def test_every_promised_name_is_a_keyword() -> None:
    assert set(NAMES) <= set(inspect.signature(SamplingParams).parameters)


def test_the_defaults_are_those_that_users_of_vllm_know() -> None:
    params = SamplingParams()
    defaults = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 16, "repetition_penalty": 1.0}
    assert {name: getattr(params, name) for name in defaults} == defaults
    assert params.detokenize
    assert params.skip_special_tokens
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert (params.stop, params.stop_token_ids, params.seed, params.best_of) == ([], [], None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 129), ("n", 1.0), ("n", True), ("n", None), ("best_of", 0), ("best_of", 200),
        ("presence_penalty", -2.1), ("presence_penalty", 2.1), ("frequency_penalty", 3), ("frequency_penalty", "1"),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", 10**400),
        ("temperature", None), ("temperature", True),
        ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("top_k", -2), ("top_k", 1.5), ("top_k", 2**63),
        ("min_p", -0.1), ("min_p", 1.1), ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.0),
        ("stop", 5), ("stop", [""]), ("stop", ["a", 5]), ("stop", ""), ("stop", ["\ud800"]),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["1"]), ("stop_token_ids", [True]), ("stop_token_ids", 5),
        ("bad_words", [""]), ("bad_words", "word"), ("bad_words", ["\udfff"]),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**63), ("max_tokens", "5"),
        ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", None),
        ("logprobs", -2), ("logprobs", 1.5), ("logprobs", True), ("prompt_logprobs", -2),
        ("logit_bias", {"a": 1}), ("logit_bias", {1: "x"}), ("logit_bias", [1]), ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: 10**400}),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", "1"),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncation_side", None),
        ("truncation_side", "middle"), ("structured_outputs", {"jason": {}}),
        ("extra_args", 5), ("repetition_penalty", 1e-50), ("repetition_penalty", 1e50),
        ("logit_bias", {1.5: 1}), ("ignore_eos", "no"), ("detokenize", None), ("skip_special_tokens", 0),
        ("spaces_between_special_tokens", []), ("include_stop_str_in_output", 1.0), ("output_kind", "DELTA"),
        ("output_kind", 3), ("output_kind", True), ("logits_processors", len), ("logits_processors", [1]),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be .+, got ") as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    assert refused.value.status == 400
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, OctavoError)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "values",
    [
        {"n": 128}, {"n": 2, "best_of": 5}, {"temperature": 0}, {"temperature": 1e9}, {"top_p": 1e-9}, {"top_k": -1},
        {"min_p": 1}, {"seed": -(2**63)}, {"seed": 2**64 - 1}, {"max_tokens": None, "min_tokens": 10**6},
        {"logprobs": 0, "prompt_logprobs": 20}, {"logprobs": -1, "prompt_logprobs": 21}, {"logit_bias": {}},
        {"logit_bias": None}, {"stop": None},
        {"stop_token_ids": None, "bad_words": None}, {"truncate_prompt_tokens": -1}, {"repetition_penalty": 1e-3},
        {"extra_args": None}, {"extra_args": {}},
    ],
)  # fmt: skip
def test_values_at_the_edge_are_accepted(values: dict[str, Any]) -> None:
    SamplingParams(**values)


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("thinking_token_budget", 5, RequestError, "^thinking_token_budget is not built: the server's chats have it.$"),
        ("prompt_logprob_start", 3, RequestError, "prompt_logprobs are those of the whole prompt"),
        ("skip_reading_prefix_cache", True, RequestError, "cache_salt of its own finds nothing"),
        ("max_new_tokens", 5, RequestError, "max_tokens bounds what is generated"),
        ("guided_json", {}, RequestError, r"json=\.\.\.\) as structured_outputs"),
        ("thinking_token_budget", None, None, ""), ("flat_logprobs", False, None, ""),
        ("temprature", 1, TypeError, r"^SamplingParams\(\) has no parameter temprature\. Did you mean temperature"),
        ("colour", None, TypeError, r"^SamplingParams\(\) has no parameter colour.$"),
    ],
)  # fmt: skip
def test_a_name_that_there_is_not_says_what_to_do(
    name: str, value: Any, kind: type[Exception] | None, message: str
) -> None:
    if kind is None:
        assert SamplingParams(max_tokens=3, **{name: value}) == SamplingParams(max_tokens=3), "it asks for nothing"
        return
    with pytest.raises(kind, match=message):
        SamplingParams(max_tokens=3, **{name: value})


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(RequestError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(RequestError, match="stop must be empty when detokenize is false"):
        SamplingParams(stop=["x"], detokenize=False)
    with pytest.raises(RequestError, match="best_of must be equal to n"):
        SamplingParams(n=1, best_of=2, output_kind=RequestOutputKind.DELTA)
    SamplingParams(n=2, best_of=2, output_kind=RequestOutputKind.DELTA)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_one_stop_string_is_a_list_of_one_and_json_keys_become_tokens() -> None:
    params = SamplingParams(stop="END", logit_bias={"50": 1, 51: -2.5})  # type: ignore[arg-type, dict-item]
    assert params.stop == ["END"]
    assert params.logit_bias == {50: 1.0, 51: -2.5}


def test_fields_that_are_changed_later_are_checked_again() -> None:
    params = SamplingParams(max_tokens=5)
    params.stop, params.output_kind, params.temperature = "END", 1, 1  # type: ignore[assignment]
    checked = params.checked()
    assert (checked.stop, checked.output_kind, params.stop) == (["END"], RequestOutputKind.DELTA, "END")
    for name, value in (("ignore_eos", "yes"), ("min_tokens", 6), ("max_tokens", 2.5), ("grammar", "root ::= [a]")):
        wrong = SamplingParams(max_tokens=5)
        setattr(wrong, name, value)
        with pytest.raises(RequestError, match=f"^{name} must be .+, got "):
            wrong.checked()


def test_lists_are_not_shared_between_instances() -> None:
    SamplingParams().stop.append("x")
    assert SamplingParams().stop == []


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(RequestError, match=r"\.\.\.") as refused:
        SamplingParams(stop=["x" * 10_000, ""])
    assert len(str(refused.value)) < 300


def test_how_many_sequences_run_and_whether_their_logprobs_are_needed() -> None:
    def needs(**values: int) -> tuple[int, bool]:
        params = SamplingParams(**values)
        return params.num_sequences, params.wants_logprobs

    assert needs() == (1, False)
    assert needs(n=3) == (3, False)
    assert needs(n=3, best_of=3) == (3, False)
    assert needs(n=1, best_of=3) == (3, True)
    assert needs(logprobs=0) == (1, True)


def test_parameters_survive_the_wire_and_are_checked_again_there() -> None:
    params = SamplingParams(n=2, temperature=1, stop=["a"], logit_bias={3: 1.5}, seed=2**64 - 1)
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    assert msgspec.to_builtins(SamplingParams()) == {}, "defaults are not sent"
    with pytest.raises(msgspec.ValidationError, match="top_p must be"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"top_p": 7.0}), type=SamplingParams)


def test_the_former_name_of_structured_outputs_is_kept_under_the_new_one() -> None:
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a+"))
    assert params == SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))


def test_structured_outputs_are_made_of_optional_fields_and_of_classes() -> None:
    class Car(BaseModel):
        brand: str

    made = GuidedDecodingParams.from_optional(json=Car, regex=None, choice=None, whitespace_pattern=None)
    assert made == StructuredOutputsParams(json=Car.model_json_schema())
    with pytest.raises(RequestError, match="guided_decoding must be left out beside structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"})  # type: ignore[arg-type]


def test_a_clone_shares_only_the_logits_processors() -> None:
    def processor(ids: list[int], logits: object) -> object:
        return logits

    params = SamplingParams(stop=["a"], logits_processors=[processor])
    clone = params.clone()
    clone.stop.append("b")
    assert params.stop == ["a"]
    assert clone.logits_processors == [processor]


def test_optional_parameters_that_are_none_are_left_out() -> None:
    given = {"n": None, "temperature": None, "stop": None, "seed": None, "top_k": 3, "max_tokens": None}
    assert SamplingParams.from_optional(**given) == SamplingParams(top_k=3, max_tokens=None)
    assert SamplingParams.from_optional(max_tokens=5).max_tokens == 5
    with pytest.raises(TypeError, match="nonsense"):
        SamplingParams.from_optional(nonsense=None)


def test_defaults_which_are_not_checked_are_in_their_ranges() -> None:
    params = SamplingParams()
    for name, ranges in _RANGES.items():
        value = getattr(params, name)
        assert value is None or all(is_within(params, value) for is_within, _ in ranges), name


def test_of_several_wrong_values_a_wrong_type_is_named_first() -> None:
    with pytest.raises(RequestError, match=r"^seed must be a 64-bit integer or null, got 'x'\.$"):
        SamplingParams(n=0, seed="x")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^n must be between 1 and 128, got 0\.$"):
        SamplingParams(top_p=0.0, n=0)
    with pytest.raises(RequestError, match=r"^min_tokens must be at most max_tokens \(3\), got 4\.$"):
        SamplingParams(min_tokens=4, max_tokens=3)
