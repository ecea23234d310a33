"""What becomes of a prompt and its parameters before the core sees them, and what is refused."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from octavo.config import CacheConfig, EngineConfig, ModelConfig, PromptEmbedsConfig, SchedulerConfig
from octavo.engine.engine_calls import length_of
from octavo.engine.input_processor import InputProcessor
from octavo.engine.off_loop import MAX_INLINE_LENGTH
from octavo.engine.wire import decode_frontend_message, encode_message
from octavo.errors import RequestError
from octavo.kv_cache.block_hashes import HASH_BYTES, prompt_hashes
from octavo.loading.checkpoint import Checkpoint
from octavo.request import Prompt
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.structured_output.answer_parts import CallText, Spelling, ToolCalls
from octavo.structured_output.grammar_builder import WantedGrammar

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
    request = inputs.process("Hello world", SamplingParams(max_tokens=5), arrival_time=1.5)
    assert request.prompt.text == "Hello world"
    assert request.prompt.token_ids == tokenizer.encode("Hello world")
    assert (request.arrival_time, request.max_tokens) == (1.5, 5)
    assert request.eos_token_ids == [EOS]
    assert inputs.process({"prompt": "Hello world"}, SamplingParams()).prompt.token_ids == (request.prompt.token_ids)


def test_token_ids_go_before_text_and_bring_a_salt(inputs: InputProcessor) -> None:
    prompt = {"prompt": "shown", "prompt_token_ids": (5, 6), "cache_salt": "tenant"}
    request = inputs.process(prompt, SamplingParams())
    assert request.prompt == Prompt([5, 6], "shown", cache_salt="tenant")


def test_a_prediction_is_text_or_token_ids_and_what_no_answer_can_have_is_left_out(
    inputs: InputProcessor, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prediction(given: Any) -> list[int]:
        return inputs.process({"prompt_token_ids": [5], "prediction": given}, SamplingParams()).prediction

    assert prediction(None) == prediction("") == []
    assert prediction("Hello world") == tokenizer.encode("Hello world", add_special_tokens=False)
    assert prediction([5, 6]) == [5, 6]
    assert len(prediction("Hello " * 5000)) == MAX_LEN
    with pytest.raises(RequestError, match="prediction must be a list of token ids"):
        prediction(3)
    with pytest.raises(RequestError, match="not an integer"):
        prediction([-1])
    hello, world = tokenizer.encode("Hello world", add_special_tokens=False)
    assert hello > world
    monkeypatch.setattr(inputs, "model", dataclasses.replace(inputs.model, vocab_size=hello))
    assert prediction("Hello world") == [world], "the model has fewer tokens than its tokenizer"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "no tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
        (5, "must be text, token ids or a dictionary"),
        ([1, "2"], "token id '2'"),
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
        ("lone \ud800 surrogate" * 200, "not valid Unicode"),
        ("x " * (MAX_LEN * 1024), r"has more than \d+ tokens and the model takes 20"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(inputs: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        inputs.process(prompt, SamplingParams())
    assert refused.value.param in ("prompt", "cache_salt")


def test_output_gets_the_room_that_the_prompt_leaves(inputs: InputProcessor) -> None:
    assert inputs.process(ids(15), SamplingParams(max_tokens=3)).max_tokens == 3
    assert inputs.process(ids(15), SamplingParams(max_tokens=50)).max_tokens == 5
    assert inputs.process(ids(15), SamplingParams(max_tokens=None)).max_tokens == 5
    assert inputs.process(ids(19), SamplingParams()).max_tokens == 1
    bounded = dataclasses.replace(inputs.model, default_max_tokens=4)
    by_default = InputProcessor(engine_config(bounded), inputs.tokenizer)
    for prompt, params, expected in [
        (5, SamplingParams(max_tokens=None), 4),
        (18, SamplingParams(max_tokens=None), 2),
        (5, SamplingParams(max_tokens=9), 9),
        (5, SamplingParams(max_tokens=None, min_tokens=6), 6),
    ]:
        assert by_default.process(ids(prompt), params, clamps_max_tokens=False).max_tokens == expected
    with pytest.raises(RequestError, match=r"has 20 tokens and the model takes 20") as refused:
        inputs.process(ids(20), SamplingParams())
    assert (refused.value.code, refused.value.status) == ("context_length_exceeded", 400)


def test_more_output_than_fits_is_refused_where_it_is_not_clamped(inputs: InputProcessor) -> None:
    assert inputs.process(ids(15), SamplingParams(max_tokens=5), clamps_max_tokens=False).max_tokens == 5
    assert inputs.process(ids(15), SamplingParams(max_tokens=None), clamps_max_tokens=False).max_tokens == 5
    with pytest.raises(RequestError, match="max_tokens is 6, but the prompt has 15 tokens and the model takes 20"):
        inputs.process(ids(15), SamplingParams(max_tokens=6), clamps_max_tokens=False)


@pytest.mark.parametrize("size", [10, MAX_INLINE_LENGTH, MAX_INLINE_LENGTH + 1, 5 * MAX_INLINE_LENGTH])
def test_long_texts_have_the_same_tokens(inputs: InputProcessor, tokenizer: Any, size: int) -> None:
    text = ("Grüße an 世界, 123 times! " * size)[:size]
    assert inputs.encode(text) == tokenizer.backend_tokenizer.encode(text).ids


def test_other_threads_go_on_while_a_long_text_is_tokenized(model: ModelConfig, tokenizer: Any) -> None:
    inputs = InputProcessor(engine_config(dataclasses.replace(model, max_model_len=8192)), tokenizer)
    thread = threading.Thread(target=inputs.encode, args=("The quick brown fox. " * 20_000,))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0)
        num_turns += 1
    assert num_turns > 20


def test_no_two_requests_have_one_id(inputs: InputProcessor) -> None:
    assert len({inputs.process("x", SamplingParams()).request_id for _ in range(3)}) == 3


def test_requests_without_a_seed_get_different_ones_and_a_seeded_engine_repeats_them(
    model: ModelConfig, tokenizer: Any
) -> None:
    def seeds() -> list[int | None]:
        inputs = InputProcessor(engine_config(dataclasses.replace(model, seed=0)), tokenizer)
        return [inputs.process(ids(2), SamplingParams(seed=seed)).params.seed for seed in (None, None, -1, None)]

    assert seeds() == seeds()
    assert len(set(seeds())) == 4, "a seed of -1 is none"
    assert all(float(seed) == seed for seed in seeds() if seed is not None), "as a program reads the log's JSON"


def test_special_tokens_are_added_where_they_are_wanted(model: ModelConfig, tokenizer: Any) -> None:
    with_start = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    with_start.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    about: dict[str, Any] = {"eos_token_id": EOS, "chat_template": None, "special_tokens_map": {}}
    inputs = InputProcessor(engine_config(model), SimpleNamespace(backend_tokenizer=with_start, **about))
    plain = inputs.process("Hello", SamplingParams(), add_special_tokens=False).prompt.token_ids
    assert inputs.process("Hello", SamplingParams()).prompt.token_ids == [1, *plain]


def test_a_grammar_goes_before_what_the_parameters_say(inputs: InputProcessor) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="b"))
    wanted = WantedGrammar(ToolCalls({"f": {}}, Spelling("", "", "", {"f": CallText("", "")})))
    for grammar, kind in ((None, "/b/"), (wanted, '"type": "object"')):
        made = inputs.process("x", params, grammar=grammar).params
        assert made.structured_outputs is None
        assert kind in (made.grammar or "")


def test_min_tokens_must_fit(inputs: InputProcessor) -> None:
    assert inputs.process(ids(15), SamplingParams(min_tokens=5, max_tokens=None)).params.min_tokens == 5
    with pytest.raises(RequestError, match="min_tokens is 6, but a prompt of 15 tokens leaves room for 5"):
        inputs.process(ids(15), SamplingParams(min_tokens=6, max_tokens=None))


@pytest.mark.parametrize(
    ("truncate", "max_tokens", "kept"), [(3, 5, 3), (40, 1, 12), (-1, 5, 12), (-1, 15, 5), (-1, 100, 1), (-1, None, 12)]
)
def test_truncation_keeps_the_last_tokens_or_the_first(
    inputs: InputProcessor, truncate: int, max_tokens: int | None, kept: int
) -> None:
    whole = ids(12)["prompt_token_ids"]
    for side, expected in (("left", whole[-kept:]), ("right", whole[:kept])):
        params = SamplingParams(truncate_prompt_tokens=truncate, max_tokens=max_tokens, truncation_side=side)
        assert inputs.process(ids(12), params).prompt.token_ids == expected


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(inputs: InputProcessor) -> None:
    for max_tokens, kept in ((5, 15), (None, 19)):
        params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens)
        request = inputs.process(ids(1000), params)
        assert len(request.prompt.token_ids) == kept
        assert request.max_tokens == MAX_LEN - kept


def test_a_text_that_is_cut_keeps_what_its_model_begins_with(model: ModelConfig, tokenizer: Any) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    begin = backend.id_to_token(1)
    backend.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 1)])
    inputs = InputProcessor(engine_config(model), SimpleNamespace(backend_tokenizer=backend, eos_token_id=EOS))
    whole = backend.encode("a b c d e f").ids
    for keep, kept in ((3, [1, *whole[-2:]]), (1, whole[-1:]), (99, whole)):
        params = SamplingParams(truncate_prompt_tokens=keep)
        assert inputs.process("a b c d e f", params).prompt.token_ids == kept
    params = SamplingParams(truncate_prompt_tokens=3)
    assert inputs.process({"prompt_token_ids": whole}, params).prompt.token_ids == whole[-3:], "as they are given"


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_in_parameters_must_be_the_models(inputs: InputProcessor, name: str) -> None:
    for token, is_valid in ((0, True), (VOCAB_SIZE - 1, True), (VOCAB_SIZE, False)):
        params = SamplingParams(**{name: {token: 1.0} if name == "logit_bias" else [token]})
        if is_valid:
            inputs.process("x", params)
            continue
        with pytest.raises(RequestError, match=f"{name} has token id {VOCAB_SIZE}") as refused:
            inputs.process("x", params)
        assert refused.value.param == name


def test_bad_words_become_tokens_with_and_without_a_space_before(inputs: InputProcessor, tokenizer: Any) -> None:
    params = SamplingParams(bad_words=["cat", " dog", "unimaginable cat"])
    request = inputs.process("x", params)
    sequences = request.params.bad_words_token_ids or []
    assert [tokenizer.decode(one) for one in sequences] == [
        "cat", " cat", " dog", "unimaginable cat", " unimaginable cat",
    ]  # fmt: skip
    assert max(map(len, sequences)) > 1


def test_callers_cannot_pass_token_ids_of_bad_words_unchecked(inputs: InputProcessor) -> None:
    params = SamplingParams()
    params.bad_words_token_ids = [[VOCAB_SIZE + 5], []]
    assert inputs.process("x", params).params.bad_words_token_ids is None


def test_the_callers_parameters_are_left_as_they_are(inputs: InputProcessor) -> None:
    params = SamplingParams(bad_words=["cat"], max_tokens=None)
    request = inputs.process("x", params)
    request.params.max_tokens = 1
    assert (params.bad_words_token_ids, params.max_tokens) == (None, None)


def test_every_end_token_of_the_model_counts_if_the_model_can_say_it(model: ModelConfig, tokenizer: Any) -> None:
    generation_config = {"eos_token_id": [9, 4, VOCAB_SIZE]}
    other = dataclasses.replace(
        model, checkpoint=dataclasses.replace(model.checkpoint, generation_config=generation_config)
    )
    assert InputProcessor(engine_config(other), tokenizer).eos_token_ids == [EOS, 4, 9]


def test_special_tokens_are_looked_for_once_in_each_text(
    inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(inputs.__dict__, "special_tokens", {"<a>": 1, "[b]": 2})
    texts = ("<a>", "x [b] y", "<b>", "")
    assert [inputs.has_special_token(text) for text in texts] == [True, True, False, False]
    monkeypatch.setitem(inputs.__dict__, "special_tokens", None)
    assert [inputs.has_special_token(text) for text in texts] == [True, True, False, False]


def test_block_hashes_are_made_in_front_of_the_core(inputs: InputProcessor) -> None:
    request = inputs.process({"prompt": "one two three " * 6, "cache_salt": "é"}, SamplingParams())
    size = inputs._hashed_size
    assert size and request.block_hashes == prompt_hashes(request.prompt, size)
    assert len(request.block_hashes) == len(request.prompt.token_ids) // size * HASH_BYTES > 0


def test_whatever_is_accepted_can_cross_the_wire(inputs: InputProcessor) -> None:
    params = SamplingParams(
        n=2, best_of=3, temperature=10**30, top_p=0.5, top_k=2**62, seed=2**64 - 1, stop=["\n", "👩"],
        stop_token_ids=[5], bad_words=["x"], logit_bias={1: -3}, allowed_token_ids=[1, 2], max_tokens=2**63 - 1,
        logprobs=0, prompt_logprobs=20, truncate_prompt_tokens=2**63 - 1,
    )  # fmt: skip
    request = inputs.process({"prompt": "x", "cache_salt": "é"}, params)
    received = decode_frontend_message(encode_message(request))
    assert received.prompt.token_ids.tolist() == request.prompt.token_ids, "an array, which is copied in no time"
    msgspec.structs.force_setattr(received.prompt, "token_ids", request.prompt.token_ids)
    assert received.prompt.text is None, "the core does not need it"
    msgspec.structs.force_setattr(received.prompt, "text", request.prompt.text)
    assert msgspec.to_builtins(received) == msgspec.to_builtins(request)


def test_requests_that_could_never_be_scheduled_are_refused_at_the_door(inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match="needs 9 sequences at once and --max-num-seqs is 8"):
        inputs.process("hello", SamplingParams(n=9))
    with pytest.raises(RequestError, match="--scheduling-policy priority"):
        inputs.process("hello", SamplingParams(), priority=1)
    with pytest.raises(RequestError, match="64-bit"):
        inputs.process("hello", SamplingParams(), priority=2**70)


def test_text_whose_tokens_the_model_does_not_have_is_refused(model: ModelConfig, tokenizer: Any) -> None:
    small = InputProcessor(engine_config(dataclasses.replace(model, vocab_size=100)), tokenizer)
    with pytest.raises(RequestError, match="the model's are 0 to 99"):
        small.process("hello", SamplingParams())
    params = small.process({"prompt_token_ids": [1]}, SamplingParams(bad_words=["hello"])).params
    assert params.bad_words_token_ids == [], "what cannot be generated needs no mask"
    config = dataclasses.replace(engine_config(small.model), prompt_embeds=PromptEmbedsConfig(4, MAX_LEN, 1.0, MAX_LEN))
    between = {"prompt": ["hello", ""], "prompt_embeds": [np.zeros((2, 4), np.float32)]}
    with pytest.raises(RequestError, match="the model's are 0 to 99"):
        InputProcessor(config, tokenizer).process(between, SamplingParams())


def test_no_parameters_are_the_models_defaults(model: ModelConfig, tokenizer: Any) -> None:
    cool = InputProcessor(engine_config(dataclasses.replace(model, default_sampling_params={"top_k": 3})), tokenizer)
    assert cool.process("hello", None).params.top_k == 3


def test_a_prediction_is_part_of_what_is_to_be_tokenized() -> None:
    """A long one must not hold the event loop."""
    assert length_of("abc") == length_of({"prompt": "abc"}) == length_of([1, 2, 3]) == 3
    assert length_of({"prompt_token_ids": [1, 2], "prediction": "x" * 5000}) == 5002
    assert length_of({"prompt": "ab", "prediction": [1] * 3}) == 5
    assert length_of({"prompt": None, "prediction": None}) == 0
