"""What becomes of a prompt and its parameters before the core sees them, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.input_processor import InputProcessor
from octavo.engine.wire import decode_frontend_message, encode_message
from octavo.errors import RequestError
from octavo.loading.checkpoint import Checkpoint
from octavo.sampling_params import SamplingParams

MAX_LEN = 20
VOCAB_SIZE = 49152
EOS = 2


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> ModelConfig:
    return ModelConfig(checkpoint, ["m"], "bfloat16", MAX_LEN, VOCAB_SIZE, None)


def engine_config(model: ModelConfig) -> EngineConfig:
    cache = CacheConfig(16, None, 0.3, 0.9, 0, True, "bfloat16")
    return EngineConfig(model, cache, SchedulerConfig(8, 256, True, "fcfs", "recompute"), "cpu", False)


@pytest.fixture(scope="module")
def inputs(model: ModelConfig, tokenizer: Any) -> InputProcessor:
    return InputProcessor(engine_config(model), tokenizer)


def ids(count: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(range(100, 100 + count))}


def test_text_is_tokenized_and_kept(inputs: InputProcessor, tokenizer: Any) -> None:
    text, request = inputs.process("Hello world", SamplingParams(max_tokens=5), "r", arrival_time=1.5)
    assert text == "Hello world"
    assert request.prompt.token_ids == tokenizer.encode("Hello world")
    assert (request.request_id, request.arrival_time, request.max_tokens) == ("r", 1.5, 5)
    assert request.eos_token_ids == [EOS]
    assert inputs.process({"prompt": "Hello world"}, SamplingParams(), "r")[1].prompt.token_ids == (
        request.prompt.token_ids
    )


def test_token_ids_go_before_text_and_bring_a_salt(inputs: InputProcessor) -> None:
    prompt = {"prompt": "shown", "prompt_token_ids": (5, 6), "cache_salt": "tenant"}
    text, request = inputs.process(prompt, SamplingParams(), "r")
    assert (text, request.prompt.token_ids, request.prompt.cache_salt) == ("shown", [5, 6], "tenant")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "no tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
        (5, "must be text or a dictionary"),
        ([1, 2], "must be text or a dictionary"),
        ({}, "needs text"),
        ({"prompt": 7}, "needs text"),
        ({"prompt_token_ids": 7}, "must be a list of token ids, got int"),
        ({"prompt_token_ids": "12"}, "must be a list of token ids, got str"),
        ({"prompt_token_ids": [1, -1]}, "token id -1"),
        ({"prompt_token_ids": [1, VOCAB_SIZE]}, f"token id {VOCAB_SIZE} is not an integer from 0 to {VOCAB_SIZE - 1}"),
        ({"prompt_token_ids": [1, "2"]}, "token id '2'"),
        ({"prompt_token_ids": [True]}, "token id True"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt"),
        ("lone \ud800 surrogate", "not valid Unicode"),
        ("x " * (MAX_LEN * 1024), "cannot fit"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(inputs: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        inputs.process(prompt, SamplingParams(), "r")
    assert refused.value.param in ("prompt", "cache_salt")


def test_output_gets_the_room_that_the_prompt_leaves(inputs: InputProcessor) -> None:
    assert inputs.process(ids(15), SamplingParams(max_tokens=3), "r")[1].max_tokens == 3
    assert inputs.process(ids(15), SamplingParams(max_tokens=50), "r")[1].max_tokens == 5
    assert inputs.process(ids(15), SamplingParams(max_tokens=None), "r")[1].max_tokens == 5
    assert inputs.process(ids(19), SamplingParams(), "r")[1].max_tokens == 1
    with pytest.raises(RequestError, match=r"has 20 tokens and the model takes 20") as refused:
        inputs.process(ids(20), SamplingParams(), "r")
    assert (refused.value.code, refused.value.status) == ("context_length_exceeded", 400)


def test_min_tokens_must_fit(inputs: InputProcessor) -> None:
    assert inputs.process(ids(15), SamplingParams(min_tokens=5, max_tokens=None), "r")[1].params.min_tokens == 5
    with pytest.raises(RequestError, match="min_tokens is 6, but a prompt of 15 tokens leaves room for 5"):
        inputs.process(ids(15), SamplingParams(min_tokens=6, max_tokens=None), "r")


@pytest.mark.parametrize(
    ("truncate", "max_tokens", "kept"), [(3, 5, 3), (40, 1, 12), (-1, 5, 12), (-1, 15, 5), (-1, 100, 1), (-1, None, 12)]
)
def test_truncation_keeps_the_last_tokens(
    inputs: InputProcessor, truncate: int, max_tokens: int | None, kept: int
) -> None:
    params = SamplingParams(truncate_prompt_tokens=truncate, max_tokens=max_tokens)
    _, request = inputs.process(ids(12), params, "r")
    assert request.prompt.token_ids == ids(12)["prompt_token_ids"][-kept:]


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(inputs: InputProcessor) -> None:
    for max_tokens, kept in ((5, 15), (None, 19)):
        params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens)
        _, request = inputs.process(ids(1000), params, "r")
        assert len(request.prompt.token_ids) == kept
        assert request.max_tokens == MAX_LEN - kept


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_in_parameters_must_be_the_models(inputs: InputProcessor, name: str) -> None:
    for token, is_valid in ((0, True), (VOCAB_SIZE - 1, True), (VOCAB_SIZE, False)):
        params = SamplingParams(**{name: {token: 1.0} if name == "logit_bias" else [token]})
        if is_valid:
            inputs.process("x", params, "r")
            continue
        with pytest.raises(RequestError, match=f"{name} has token id {VOCAB_SIZE}") as refused:
            inputs.process("x", params, "r")
        assert refused.value.param == name


def test_bad_words_become_tokens_with_and_without_a_space_before(inputs: InputProcessor, tokenizer: Any) -> None:
    params = SamplingParams(bad_words=["cat", " dog", "unimaginable cat"])
    _, request = inputs.process("x", params, "r")
    sequences = request.params.bad_words_token_ids or []
    assert [tokenizer.decode(one) for one in sequences] == [
        "cat", " cat", " dog", "unimaginable cat", " unimaginable cat",
    ]  # fmt: skip
    assert max(map(len, sequences)) > 1


def test_callers_cannot_pass_token_ids_of_bad_words_unchecked(inputs: InputProcessor) -> None:
    params = SamplingParams()
    params.bad_words_token_ids = [[VOCAB_SIZE + 5], []]
    assert inputs.process("x", params, "r")[1].params.bad_words_token_ids is None


def test_the_callers_parameters_are_left_as_they_are(inputs: InputProcessor) -> None:
    params = SamplingParams(bad_words=["cat"], max_tokens=None)
    _, request = inputs.process("x", params, "r")
    request.params.max_tokens = 1
    assert (params.bad_words_token_ids, params.max_tokens) == (None, None)


def test_every_end_token_of_the_model_counts_if_the_model_can_say_it(model: ModelConfig, tokenizer: Any) -> None:
    generation_config = {"eos_token_id": [9, 4, VOCAB_SIZE]}
    other = dataclasses.replace(
        model, checkpoint=dataclasses.replace(model.checkpoint, generation_config=generation_config)
    )
    assert InputProcessor(engine_config(other), tokenizer).eos_token_ids == [EOS, 4, 9]


def test_whatever_is_accepted_can_cross_the_wire(inputs: InputProcessor) -> None:
    params = SamplingParams(
        n=2, best_of=3, temperature=10**30, top_p=0.5, top_k=2**62, seed=2**64 - 1, stop=["\n", "👩"],
        stop_token_ids=[5], bad_words=["x"], logit_bias={1: -3}, allowed_token_ids=[1, 2], max_tokens=2**63 - 1,
        logprobs=0, prompt_logprobs=20, truncate_prompt_tokens=2**63 - 1,
    )  # fmt: skip
    _, request = inputs.process({"prompt": "x", "cache_salt": "é"}, params, "r-é")
    received = decode_frontend_message(encode_message(request))
    assert msgspec.to_builtins(received) == msgspec.to_builtins(request)
    with pytest.raises(RequestError, match="request id"):
        inputs.process("x", params, "\ud800")


def test_requests_that_could_never_be_scheduled_are_refused_at_the_door(inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match="needs 9 sequences at once and --max-num-seqs is 8"):
        inputs.process("hello", SamplingParams(n=9), "r")
    with pytest.raises(RequestError, match="--scheduling-policy priority"):
        inputs.process("hello", SamplingParams(), "r", priority=1)
    with pytest.raises(RequestError, match="64-bit"):
        inputs.process("hello", SamplingParams(), "r", priority=2**70)
    with pytest.raises(RequestError, match="request id 7"):
        inputs.process("hello", SamplingParams(), 7)  # type: ignore[arg-type]


def test_text_whose_tokens_the_model_does_not_have_is_refused(model: ModelConfig, tokenizer: Any) -> None:
    small = InputProcessor(engine_config(dataclasses.replace(model, vocab_size=100)), tokenizer)
    with pytest.raises(RequestError, match="the model's are 0 to 99"):
        small.process("hello", SamplingParams(), "r")
    params = small.process({"prompt_token_ids": [1]}, SamplingParams(bad_words=["hello"]), "r")[1].params
    assert params.bad_words_token_ids == [], "what cannot be generated needs no mask"


def test_no_parameters_are_the_models_defaults(model: ModelConfig, tokenizer: Any) -> None:
    cool = InputProcessor(engine_config(dataclasses.replace(model, default_sampling_params={"top_k": 3})), tokenizer)
    assert cool.process("hello", None, "r")[1].params.top_k == 3
