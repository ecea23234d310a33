"""`LLM` with the default model: forms of prompts, parameters, forks, stops, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from octavo import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from octavo.config import VllmConfig
from octavo.entrypoints.chat.tools.format_detection import ModelFormats
from octavo.entrypoints.chat.tools.tool_formats import FORMATS
from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import GuidedDecodingParams
from octavo.structured_output.answer_parts import ReasoningMarks, ThinkingBudget
from octavo.structured_output.grammar_builder import WantedGrammar
from octavo.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
from octavo.v1.sample import logits_processor
from octavo.v1.sample.logits_processor.builtin import process_dict_updates


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(max_model_len=512, num_gpu_blocks_override=512, max_logprobs=-1, check_invariants=True)
    yield llm
    assert llm.core.scheduler.cache.pools[0].num_used == 0, "blocks are in use when idle"


def greedy(max_tokens: int = 12, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def test_a_prompt_that_is_only_scored_may_be_as_long_as_the_model_takes(llm: LLM) -> None:
    ids = llm.inputs.encode("The capital of France is Paris. " * 100)[:512]
    params = greedy(1, prompt_logprobs=0)
    with pytest.raises(RequestError, match="has 512 tokens and the model takes 512"):
        llm.inputs.process(ids, params)
    request = llm.inputs.process(ids, params, scores_prompt=True, clamps_max_tokens=False)
    assert request.max_tokens == 1
    llm.llm_engine.add(request)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    [output] = outputs
    assert len(output.prompt_logprobs) == 512 and all(output.prompt_logprobs[1:])
    with pytest.raises(RequestError, match="has 513 tokens"):
        llm.inputs.process([*ids, 1], params, scores_prompt=True)


def test_prompts_may_be_text_tokens_or_lists_of_both(llm: LLM) -> None:
    text = "The capital of France is"
    tokens = llm.tokenizer(text).input_ids
    forms = [text, {"prompt": text}, {"prompt_token_ids": tokens}]
    alone = [llm.generate(form, greedy(), use_tqdm=False)[0] for form in forms]
    together = llm.generate(forms, greedy(), use_tqdm=False)
    assert len({output.outputs[0].text for output in alone + together}) == 1
    assert [output.prompt for output in together] == [text, text, None]
    assert all(output.prompt_token_ids == tokens for output in together)
    assert llm.generate([], greedy()) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate(["One", "Two"], [greedy(3, ignore_eos=True), greedy(5, ignore_eos=True)], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(["One"], [greedy(), greedy()])


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (one,) = llm.chat(conversation, greedy(30), use_tqdm=False)
    assert "Paris" in one.outputs[0].text
    assert one.outputs[0].finish_reason == "stop"
    assert one.outputs[0].stop_reason is None
    several = llm.chat([conversation, conversation], greedy(30), use_tqdm=False)
    assert [output.outputs[0].text for output in several] == [one.outputs[0].text] * 2
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]
    (of_parts,) = llm.chat([{"role": "user", "content": parts}], greedy(1), False, None)
    assert of_parts.prompt == one.prompt.replace("capital of", "capital\nof"), "by lines, as the server joins them"


def test_calls_in_a_conversation_have_the_models_format(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "_formats", ModelFormats(FORMATS["kimi_k2"]))
    call = {"id": "a", "type": "function", "function": {"name": "greet", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    conversation = [{"role": "user", "content": "Hi"}, answer, {"role": "tool", "tool_call_id": "a", "content": "."}]
    (output,) = llm.chat(conversation, greedy(1), use_tqdm=False)
    assert "functions.greet:0" in output.prompt


def test_chat_has_a_choice_of_tools(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"polite": {"type": "boolean"}}, "required": ["polite"]}
    named = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("greet", "leave")]
    ask = partial(llm.chat, [{"role": "user", "content": "Hi"}], greedy(60), use_tqdm=False, tools=named)
    for choice, names in (
        ("required", ("greet", "leave")),
        ({"type": "function", "function": {"name": "leave"}}, ("leave",)),
    ):
        (output,) = ask(tool_choice=choice)
        text = output.outputs[0].text
        found = re.match(r'<tool_call>\n{"name": "(\w+)", "arguments": ([^}]*})}\n</tool_call>', text)
        assert found is not None and found[1] in names and isinstance(json.loads(found[2])["polite"], bool)
    told = {choice: ask(tool_choice=choice)[0].prompt for choice in ("auto", "none", None)}
    custom = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    for choice in ("auto", None):
        assert (
            '"parameters": {"type": "object", "properties": {"input"'
            in ask(tools=[custom], tool_choice=choice)[0].prompt
        )
    (output,) = ask(tools=[custom], tool_choice="required")
    assert output.outputs[0].text.startswith('<tool_call>\n{"name": "patch", "arguments": {')
    assert told["auto"] == told[None] and "greet" in told["auto"] and "greet" not in told["none"]
    with pytest.raises(RequestError, match="names 'x', which is not in tools"):
        ask(tool_choice={"type": "function", "function": {"name": "x"}})
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="structured_outputs and tool_choice exclude"):
        llm.chat([{"role": "user", "content": "Hi"}], params, tools=named, tool_choice="required")


@pytest.mark.parametrize("messages", ["What is it?", [["What is it?"]], [7]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(RequestError, match=r"messages must be a list of .*\bgot "):
        llm.chat(messages, greedy(1))
    with pytest.raises(TypeError, match="lora_request must be a LoRARequest or a list of them, got 'mine'"):
        llm.generate("Hi", greedy(1), lora_request="mine")


def test_what_vllm_hands_on_to_others_is_refused_where_it_says_anything(llm: LLM) -> None:
    for name in ("tokenization_kwargs", "mm_processor_kwargs"):
        llm.generate("Hi", greedy(1), use_tqdm=False, **{name: None})
        for ask in (llm.generate, llm.chat):
            with pytest.raises(RequestError, match=f"{name} is not built"):
                ask("Hi", greedy(1), **{name: {"a": 1}})


def test_an_engine_tells_what_it_was_made_of(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    engine = llm.llm_engine
    assert engine.vllm_config is engine.get_vllm_config() is llm.config
    assert engine.model_config.max_model_len == 512 and engine.model_config.hf_text_config.vocab_size > 0
    assert engine.cache_config.num_gpu_blocks == 512 and engine.cache_config.block_size == 16
    assert engine.cache_config.cache_dtype == "bfloat16" and engine.scheduler_config.max_num_seqs > 0
    assert engine.parallel_config.world_size == 1 and engine.lora_config is None
    assert engine.speculative_config.method == "ngram", "the default"
    assert llm.supported_tasks == engine.get_supported_tasks() == ("generate",)
    assert not llm.is_sleeping()
    (output,) = llm.generate("Hello", greedy(2), use_tqdm=False)
    assert output.lora_request is None
    assert output.encoder_prompt is output.encoder_prompt_token_ids is output.kv_transfer_params is None
    caplog.set_level("INFO", "octavo.stats")
    engine.do_log_stats()
    assert "generation" in caplog.messages[-1] and "running 0" in caplog.messages[-1]


def test_arguments_of_a_wrong_type_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="a prompt has no field 'promt'; its fields are cache_salt, multi_modal"):
        llm.generate({"prompt": "Hi", "promt": "Hi"}, greedy(1))
    with pytest.raises(RequestError, match="mm_processor_kwargs is not built: the model's own settings are taken"):
        llm.generate({"prompt": "Hi", "mm_processor_kwargs": {"num_crops": 4}}, greedy(1))
    nothing = {"multi_modal_data": {}, "mm_processor_kwargs": None, "encoder": None}
    assert llm.generate({"prompt": "Hi"} | nothing, greedy(1), use_tqdm=False)[0].finished
    with pytest.raises(RequestError, match="priority must be a list with a number for each of 1 prompts, got 3"):
        llm.generate("Hi", greedy(1), priority=3)
    with pytest.raises(RequestError, match="tools must be a list of dictionaries, got "):
        llm.chat([{"role": "user", "content": "Hi"}], greedy(1), tools=["greet"])
    with pytest.raises(TypeError, match="params must be BeamSearchParams, got SamplingParams"):
        llm.beam_search("Hi", greedy(1))
    wrong = greedy(1)
    wrong.max_tokens = 2.5
    for params in (wrong, [wrong]):
        with pytest.raises(RequestError, match=r"max_tokens must be a 64-bit integer or null, got 2\.5"):
            llm.generate(["Hi"], params)


def test_the_progress_bar_shows_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Hello"] * 3, greedy(4))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tok/s" in shown
    llm.generate(["Hello"] * 2, greedy(1), use_tqdm=partial(tqdm, ascii=" #"))
    assert "##| 2/2" in capsys.readouterr().err


def test_forks_share_the_blocks_of_their_prompt(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(1000, 1200))}  # 12.5 blocks
    used: list[int] = []
    step = llm.core.step

    def watch() -> object:
        outputs = step()
        used.append(outputs.stats.num_blocks_used)
        return outputs

    llm.core.step = watch  # type: ignore[method-assign]
    try:
        params = SamplingParams(n=8, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    finally:
        llm.core.step = step  # type: ignore[method-assign]
    assert [completion.index for completion in output.outputs] == list(range(8))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    # Twelve shared blocks, and the last one copied for each that writes to it.
    assert max(used) == 12 + 8


def test_a_forks_tokens_do_not_depend_on_its_siblings(llm: LLM) -> None:
    def texts(n: int) -> list[str]:
        params = SamplingParams(n=n, temperature=1.0, seed=42, max_tokens=10, ignore_eos=True)
        return [completion.text for completion in llm.generate("Once", params, use_tqdm=False)[0].outputs]

    assert texts(4)[:2] == texts(2)


def test_best_of_returns_the_likeliest(llm: LLM) -> None:
    params = {"temperature": 1.0, "seed": 9, "max_tokens": 8, "ignore_eos": True}
    (all_of_them,) = llm.generate("A", SamplingParams(n=6, logprobs=0, **params), use_tqdm=False)
    (best,) = llm.generate("A", SamplingParams(n=2, best_of=6, **params), use_tqdm=False)
    ranked = sorted(all_of_them.outputs, key=lambda completion: -completion.cumulative_logprob)
    assert [completion.token_ids for completion in best.outputs] == [completion.token_ids for completion in ranked[:2]]
    assert [completion.index for completion in best.outputs] == [0, 1]


def test_seeds_hold_in_any_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=77, max_tokens=16, ignore_eos=True)
    free = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    (alone,) = llm.generate("Yesterday", seeded, use_tqdm=False)
    among = llm.generate(["Yesterday"] * 20, [free] * 7 + [seeded] + [free] * 12, use_tqdm=False)
    assert among[7].outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(output.outputs[0].token_ids) for output in among}) > 10


def test_stops_end_the_text_and_say_why(llm: LLM) -> None:
    (full,) = llm.generate("Count: 1, 2, 3,", greedy(20, ignore_eos=True), use_tqdm=False)
    text = full.outputs[0].text
    stop = text[5:8]
    (cut,) = llm.generate("Count: 1, 2, 3,", greedy(20, stop=[stop]), use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    token = full.outputs[0].token_ids[4]
    (ended,) = llm.generate("Count: 1, 2, 3,", greedy(20, stop_token_ids=[token]), use_tqdm=False)
    assert ended.outputs[0].token_ids == full.outputs[0].token_ids[: full.outputs[0].token_ids.index(token) + 1]
    assert ended.outputs[0].stop_reason == token
    (longer,) = llm.generate("Count: 1, 2, 3,", greedy(20, stop_token_ids=[token], min_tokens=10), use_tqdm=False)
    assert len(longer.outputs[0].token_ids) >= 10


def test_logprobs_are_those_of_the_models_distribution(llm: LLM) -> None:
    raw: list[torch.Tensor] = []

    def keep(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        raw.append(logits.clone())
        return logits

    params = SamplingParams(
        temperature=0.7, seed=4, max_tokens=5, ignore_eos=True, logprobs=3, logits_processors=[keep]
    )
    (output,) = llm.generate("Rain", params, use_tqdm=False)
    completion = output.outputs[0]
    for token, position, logits in zip(completion.token_ids, completion.logprobs, raw, strict=True):
        expected = logits.double().log_softmax(-1)  # torch's sums in float32 may be off by more than the bound
        assert next(iter(position)) == token
        for one, entry in position.items():
            assert entry.logprob == pytest.approx(float(expected[one]), abs=1e-5)
            assert entry.rank == int((expected > expected[one]).sum()) + 1
        assert set(expected.topk(3).indices.tolist()) <= set(position)
    total = sum(next(iter(position.values())).logprob for position in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total)


def test_logprobs_of_all_the_vocabulary_are_those_of_the_likeliest_and_the_rest(llm: LLM) -> None:
    size = llm.model_config.get_vocab_size()
    all_of_them, some = llm.generate(
        ["Two words"] * 2, [greedy(1, logprobs=-1, prompt_logprobs=-1), greedy(1, logprobs=20)], use_tqdm=False
    )
    assert all_of_them.prompt_logprobs is not None and len(all_of_them.prompt_logprobs[1]) == size
    position = all_of_them.outputs[0].logprobs[0]
    assert len(position) == size and sum(math.exp(entry.logprob) for entry in position.values()) == pytest.approx(1)
    assert dict(list(position.items())[:20]) == some.outputs[0].logprobs[0]
    assert [entry.rank for entry in position.values()] == list(range(1, size + 1))


def test_prompt_logprobs_score_the_prompt(llm: LLM) -> None:
    text = "The capital of France is Paris."
    (output,) = llm.generate(text, greedy(1, prompt_logprobs=2), use_tqdm=False)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for i, token in enumerate(output.prompt_token_ids[1:], start=1):
        assert next(iter(output.prompt_logprobs[i])) == token
    # Paris must be the best continuation, as generation finds it too.
    (generated,) = llm.generate("The capital of France is", greedy(1, logprobs=0), use_tqdm=False)
    position = len(llm.tokenizer("The capital of France is").input_ids)
    scored = output.prompt_logprobs[position][generated.outputs[0].token_ids[0]]
    assert scored.rank == 1
    found = generated.outputs[0].logprobs[0][generated.outputs[0].token_ids[0]]
    assert scored.logprob == found.logprob, "bitwise: chunk or decode, the row is the same"


def test_processors_masks_and_biases_reach_the_tokens(llm: LLM) -> None:
    only = llm.tokenizer(" yes").input_ids + llm.tokenizer(" no").input_ids
    (limited,) = llm.generate("Well,", greedy(5, allowed_token_ids=only, ignore_eos=True), use_tqdm=False)
    assert set(limited.outputs[0].token_ids) <= set(only)
    (biased,) = llm.generate("Well,", greedy(3, logit_bias={only[0]: 100.0}, ignore_eos=True), use_tqdm=False)
    assert biased.outputs[0].token_ids == [only[0]] * 3
    (plain,) = llm.generate("The capital of France is", greedy(4), use_tqdm=False)
    assert "Paris" in plain.outputs[0].text
    (without,) = llm.generate("The capital of France is", greedy(4, bad_words=["Paris"]), use_tqdm=False)
    assert "Paris" not in without.outputs[0].text


def test_logits_processors_may_take_the_prompt_or_leave_it(llm: LLM) -> None:
    def long(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits + 5.0 * (torch.arange(len(logits)) == len(prompt) + len(output))

    def short(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[:] = float("-inf")
        logits[1000 + len(output)] = 0.0
        return logits

    params = greedy(3, logits_processors=[long, short], ignore_eos=True)
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    assert output.outputs[0].token_ids == [1000, 1001, 1002]


class Keep(logits_processor.LogitsProcessor):
    """Keeps one token, of the request's `extra_args`, plus the number of tokens so far."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("first", 0), int):
            raise ValueError("first is no token")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.model_config.max_model_len > 0 and device.type == "cpu"
        self.kept: dict[int, tuple[int, list[int]]] = {}
        self.num_steps = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: logits_processor.BatchUpdate | None) -> None:
        changed = process_dict_updates(
            self.kept,
            batch_update,
            lambda params, prompt, output: (params.extra_args["first"], output) if params.extra_args else None,
        )
        assert changed == bool(self.kept and not self.num_steps)
        self.num_steps += 1

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (first, output) in self.kept.items():
            assert len(output) >= self.num_steps - 1  # a fork's first step has a token
            logits[row] = torch.full_like(logits[row], -torch.inf).scatter(0, torch.tensor(first + len(output)), 0.0)
        return logits


class KeepByRequest(logits_processor.AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> logits_processor.RequestLogitsProcessor | None:
        if params.extra_args is None:
            return None
        first = params.extra_args["first"]

        def keep(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            return torch.full_like(logits, -torch.inf).scatter(0, torch.tensor(first + len(output)), 0.0)

        return keep


@pytest.mark.parametrize("cls", [Keep, KeepByRequest])
def test_classes_of_logits_processors_read_the_requests_extra_args(
    cls: type[logits_processor.LogitsProcessor], llm: LLM
) -> None:
    asked = SamplingParams(n=2, max_tokens=3, ignore_eos=True, extra_args={"first": 1000})
    with pytest.raises(RequestError, match="extra_args are read by the classes of LLM"):
        llm.generate("Hello", asked, use_tqdm=False)
    with LLM(max_model_len=256, logits_processors=[cls]) as made:
        outputs = made.generate(["Hello", "World"], [asked, greedy(3)], use_tqdm=False)
        assert [one.token_ids for one in outputs[0].outputs] == [[1000, 1001, 1002]] * 2
        assert outputs[1].outputs[0].token_ids == llm.generate("World", greedy(3))[0].outputs[0].token_ids
    with pytest.raises(TypeError, match=r"must be a list of subclasses of .*functions belong to SamplingParams"):
        LLM(logits_processors=[lambda output, logits: logits])


def test_what_a_class_of_logits_processors_refuses_is_an_error_of_the_request() -> None:
    with (
        LLM(max_model_len=256, logits_processors=[Keep]) as made,
        pytest.raises(RequestError, match="Keep: first is no token"),
    ):
        made.generate("Hello", greedy(3, extra_args={"first": "x"}), use_tqdm=False)


def test_swap_space_must_fit_the_memory() -> None:
    with pytest.raises(ConfigError, match=r"--swap-space 100000 takes .* free RAM"):
        LLM(preemption_mode="swap", swap_space=100000.0, max_model_len=512, num_gpu_blocks_override=64)


def test_the_caches_bytes_may_be_given() -> None:
    """Also those of more blocks than a request can use, which the prefix cache has then."""
    llm = LLM(max_model_len=256, max_num_seqs=1, kv_cache_memory_bytes=10 << 20, cpu_memory_utilization=0.01)
    # 30 layers, 3 heads of 64, keys and values, two bytes, 16 tokens
    assert llm.core.executor.num_blocks == [(10 << 20) // (30 * 3 * 64 * 2 * 2 * 16)]
    for num_bytes, message in (
        (1 << 50, "--kv-cache-memory-bytes asks for 1048576.00 GiB, and .* GiB .* are free beside the weights."),
        (
            1 << 16,
            "--kv-cache-memory-bytes 65536 buys 0 blocks and holds .*, which needs 0.0055 GiB; give more memory.",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(max_model_len=256, kv_cache_memory_bytes=num_bytes)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_reasoning_ends_when_its_budget_is_used_up(llm: LLM, num_tokens: int) -> None:
    """With two tokens of this model in the place of marks, inside of the reasoning and before it."""
    tokenizer = llm.tokenizer.backend_tokenizer
    start, end = (tokenizer.token_to_id(mark) for mark in ("<jupyter_start>", "<reponame>"))
    choice = StructuredOutputsParams(choice=["red", "green"])
    for first, content in ((None, None), (start, None), (None, choice)):
        budget = ThinkingBudget(num_tokens, first, end, tuple(llm.inputs.eos_token_ids), len(llm.tokenizer))
        marks = ReasoningMarks(None, "<reponame>", is_optional=False)
        bias = {} if first is None else {first: 100.0}  # a thought is begun
        params = greedy(12, skip_special_tokens=False, logit_bias=bias)
        request = llm.inputs.process("Colours:", params, grammar=WantedGrammar(content, marks, budget=budget))
        (output,) = llm._run_generation([request], [None], False)
        (found,) = output.outputs
        thought = found.token_ids[first is not None :]
        assert thought[num_tokens] == end and end not in thought[:num_tokens]
        if content is None:
            assert len(thought) > num_tokens + 1
        else:
            assert found.text.partition("<reponame>")[2].strip() in ("red", "green")
    plain = WantedGrammar(None, budget=ThinkingBudget(num_tokens, start, end, (), len(llm.tokenizer)))
    request = llm.inputs.process("Colours:", greedy(8), grammar=plain)
    (free,) = llm.generate("Colours:", greedy(8), use_tqdm=False)
    (found,) = llm._run_generation([request], [None], False)
    assert found.outputs[0].text == free.outputs[0].text, "who does not think is free"


def test_a_budget_ends_no_call(llm: LLM) -> None:
    """A call that is begun within the reasoning ends it; before a structure it has to wait for its end."""
    tokenizer = llm.tokenizer.backend_tokenizer
    call, end = (tokenizer.token_to_id(mark) for mark in ("<file_sep>", "<reponame>"))
    choice = StructuredOutputsParams(choice=["red", "green"])
    for content, count in ((None, 9), (choice, 0)):
        budget = ThinkingBudget(3, None, end, tuple(llm.inputs.eos_token_ids), len(llm.tokenizer), calls=(call,))
        marks = ReasoningMarks(None, "<reponame>", is_optional=False)
        params = greedy(9, skip_special_tokens=False, logit_bias={call: 100.0})
        request = llm.inputs.process("Colours:", params, grammar=WantedGrammar(content, marks, budget=budget))
        (output,) = llm._run_generation([request], [None], False)
        assert output.outputs[0].token_ids.count(call) == count


def test_a_failing_logits_processor_fails_its_request_and_leaves_the_engine_well(llm: LLM) -> None:
    def broken(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(RequestError, match="ZeroDivisionError: on purpose"):
        llm.generate("Hello", greedy(3, logits_processors=[broken]), use_tqdm=False)
    assert llm.generate("Hello", greedy(3, ignore_eos=True), use_tqdm=False)[0].finished


def test_an_interrupt_waits_for_the_end_of_its_step_and_leaves_the_engine_well(llm: LLM) -> None:
    def interrupt(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return logits

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background has not
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello", "World"], greedy(9, logits_processors=[interrupt], ignore_eos=True), use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("Hello", greedy(3, ignore_eos=True), use_tqdm=False)[0].finished


def test_threads_wait_for_each_other(llm: LLM) -> None:
    prompts = ["One", "Two", "Three"]
    alone = [output.outputs[0].text for output in llm.generate(prompts, greedy(5), use_tqdm=False)]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda prompt: llm.generate(prompt, greedy(5), use_tqdm=False)[0].outputs[0].text, prompts)
        assert list(found) == alone


@pytest.mark.parametrize("name", ["sleep", "wake_up", "reset_prefix_cache", "close"])
def test_a_call_that_changes_the_engine_waits_for_other_threads(name: str) -> None:
    llm, was_free = LLM.__new__(LLM), list[bool]()
    llm._runs = threading.RLock()

    def change(*args: object, **more: object) -> None:
        with ThreadPoolExecutor(1) as other_thread:
            was_free.append(other_thread.submit(llm._runs.acquire, blocking=False).result())

    llm.llm_engine = SimpleNamespace(**{name: change})  # type: ignore[assignment]
    getattr(llm, name)()
    assert was_free == [False]


def test_a_second_run_finds_its_prompt_in_the_cache(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(2000, 2100))}
    (first,) = llm.generate(prompt, greedy(4), use_tqdm=False)
    (second,) = llm.generate(prompt, greedy(4), use_tqdm=False)
    (salted,) = llm.generate({**prompt, "cache_salt": "someone else"}, greedy(4), use_tqdm=False)
    assert (first.num_cached_tokens, second.num_cached_tokens, salted.num_cached_tokens) == (0, 96, 0)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == salted.outputs[0].token_ids


def test_prompts_are_truncated_from_the_left_when_asked(llm: LLM) -> None:
    (output,) = llm.generate(
        {"prompt_token_ids": list(range(600))}, greedy(2, truncate_prompt_tokens=5), use_tqdm=False
    )
    assert output.prompt_token_ids == list(range(595, 600))
    with pytest.raises(RequestError, match="the prompt has 600 tokens and the model takes 512"):
        llm.generate({"prompt_token_ids": list(range(600))}, greedy(2))


def test_output_ends_at_the_models_length(llm: LLM) -> None:
    (output,) = llm.generate({"prompt_token_ids": list(range(500))}, greedy(100, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"
    (all_of_it,) = llm.generate(
        {"prompt_token_ids": list(range(500))}, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
        use_tqdm=False,
    )  # fmt: skip
    assert len(all_of_it.outputs[0].token_ids) == 12


def test_metrics_of_a_request_are_in_order(llm: LLM) -> None:
    (output,) = llm.generate("Hello", greedy(5, ignore_eos=True), use_tqdm=False)
    times = output.metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
    assert times.first_token_time < times.last_token_time <= times.finished_time
    assert math.isfinite(times.time_in_queue)


def test_prompts_that_are_none_are_refused_in_one_line(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompts must be one or a list of them, got int"):
        llm.generate(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"a prompt must be text, token ids or a dictionary .* got NoneType"):
        llm.generate([None])  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"^prompts\[1\]: the prompt has 600 tokens"):
        llm.generate([[5], [5] * 600])


def test_token_ids_may_stand_for_a_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    wanted = llm.generate({"prompt_token_ids": [504, 3575]}, params, use_tqdm=False)[0]
    for prompts in ([504, 3575], [[504, 3575]]):
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [(one.prompt_token_ids, one.outputs[0].token_ids) for one in found] == [
            (wanted.prompt_token_ids, wanted.outputs[0].token_ids)
        ]


def test_token_ids_may_be_given_as_earlier_versions_of_vllm_took_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    wanted = llm.generate([[504, 3575], [29]], params, use_tqdm=False)
    found = llm.generate(prompt_token_ids=[[504, 3575], [29]], sampling_params=params, use_tqdm=False)
    shown = llm.generate(["a", "b"], params, use_tqdm=False, prompt_token_ids=[[504, 3575], [29]])
    for outputs, prompts in ((found, [None, None]), (shown, ["a", "b"])):
        assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in wanted]
        assert [one.prompt for one in outputs] == prompts
    assert llm.generate(prompt_token_ids=[29], sampling_params=params, use_tqdm=False)[0].prompt_token_ids == [29]
    with pytest.raises(RequestError, match="1 prompt_token_ids for 2 prompts"):
        llm.generate(["a", "b"], params, prompt_token_ids=[[29]])


def test_metrics_are_vllms_objects(llm: LLM) -> None:
    def counted() -> dict[str, Metric]:
        return {f"{one.name}{''.join(map(str, one.labels.values()))}": one for one in llm.get_metrics()}

    def counter(name: str) -> int:
        (found,) = [one for one in llm.get_metrics() if one.name == name and one.labels.get("finished_reason") != "x"]
        assert isinstance(found, Counter)
        return found.value

    before = counter("vllm:generation_tokens"), counter("vllm:prompt_tokens")
    llm.generate({"prompt_token_ids": [29] * 5}, greedy(7, ignore_eos=True), use_tqdm=False)
    assert (counter("vllm:generation_tokens") - before[0], counter("vllm:prompt_tokens") - before[1]) == (7, 5)
    found = counted()
    assert len(found) == len(llm.get_metrics())
    assert all(one.labels["model_name"] == llm.model_config.served_model_names[0] for one in found.values())
    by_kind = {kind: {one.name for one in found.values() if type(one) is kind} for kind in (Gauge, Histogram, Vector)}
    assert "vllm:num_requests_running" in by_kind[Gauge] and "vllm:e2e_request_latency_seconds" in by_kind[Histogram]
    assert by_kind[Vector] == {"vllm:spec_decode_num_accepted_tokens_per_pos"}
    for one in found.values():
        if isinstance(one, Histogram):
            assert one.count == one.buckets["+Inf"] >= max(one.buckets.values())


def test_the_engine_says_what_its_model_is(llm: LLM) -> None:
    model = llm.llm_engine.model_config
    assert model is llm.llm_engine.get_model_config() is llm.model_config
    assert (model.max_model_len, model.get_vocab_size()) == (512, model.hf_config.vocab_size)
    assert llm.get_tokenizer().encode("Hello") and llm.get_default_sampling_params() == SamplingParams(
        **model.default_sampling_params
    )


@pytest.mark.parametrize(("name", "said"), [("apply_model", "generate and encode"), ("collective_rpc", "no methods")])
def test_a_method_that_only_vllm_has_says_so(llm: LLM, name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=f"LLM has no {name}: .*{said}"):
        getattr(llm, name)
    with pytest.raises(AttributeError, match=r"LLM has no generrate\."):
        llm.generrate  # noqa: B018


def test_arguments_may_be_put_together_before() -> None:
    args = EngineArgs(max_model_len=64, num_gpu_blocks_override=64, dtype=torch.bfloat16)  # type: ignore[arg-type]
    with LLM.from_engine_args(args) as llm:
        assert (llm.model_config.max_model_len, llm.model_config.dtype) == (64, "bfloat16")
        completion = llm.generate("a", greedy(1), use_tqdm=False)[0].outputs[0]
        assert completion.finished()


def test_the_form_of_a_messages_content_may_be_said(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text * 2 }}{% endfor %}"
    for content_format, shown in (("string", "x"), ("openai", "xx"), ("auto", "x")):
        (output,) = llm.chat(
            [{"role": "user", "content": "x"}], greedy(1), use_tqdm=False, chat_template=template,
            chat_template_content_format=content_format,
        )  # fmt: skip
        assert output.prompt == shown


def test_guided_decoding_is_the_former_name_of_structured_outputs(llm: LLM) -> None:
    for asked in (GuidedDecodingParams(choice=["Positive"]), {"choice": ["Positive"]}):
        params = SamplingParams(guided_decoding=asked)  # type: ignore[arg-type]
        assert llm.generate("The mood is", params, use_tqdm=False)[0].outputs[0].text == "Positive"


def test_arguments_that_are_unknown_or_not_built_are_refused() -> None:
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        LLM(tensor_paralel_size=1)
    with pytest.raises(ConfigError, match="--num-scheduler-steps 2 is not built yet"):
        LLM(num_scheduler_steps=2)
    with pytest.raises(RequestError, match=r"stat_loggers is not built: get_metrics\(\) and /metrics have"):
        LLMEngine.from_engine_args(EngineArgs(), stat_loggers=[object])
    with pytest.raises(RequestError, match="stat_loggers is not built"):
        AsyncLLMEngine.from_engine_args(EngineArgs(), stat_loggers=[object])


def test_arguments_of_vllms_methods(llm: LLM) -> None:
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert llm.reset_prefix_cache(reset_connector=False), "there is no cache on disk"
    with pytest.raises(RequestError, match="reset_running_requests is not built: running requests keep"):
        llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(RequestError, match="mode must be one of abort, wait, got 'keep'"):
        llm.sleep(mode="keep")
    with pytest.raises(RequestError, match="chat_template is not built: the model's folder says"):
        llm.score("a", "b", chat_template="{{ query }}")
    talk = [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match="priority must be a list with a number for each of 1 prompts, got 3"):
        llm.chat(talk, greedy(1), priority=3)
    with pytest.raises(RequestError, match="--scheduling-policy priority"):
        llm.chat(talk, greedy(1), priority=[3])
    for name, said in (
        ("update_weights", "sleep at level 2, replace the files"), ("release_kv_cache_memory", "sleep.level=1. frees"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=f"LLM has no {name}: .*{said}"):
            getattr(llm, name)


def test_the_longest_sequence_is_what_the_cache_holds_where_that_is_left_open() -> None:
    llm = LLM(max_model_len="auto", num_gpu_blocks_override=10, max_num_batched_tokens=64, block_size=16)
    assert llm.config.model.max_model_len == 160
    (output,) = llm.generate({"prompt_token_ids": [5] * 150}, greedy(99, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 10


def test_scores_are_of_texts_in_every_form_that_holds_one() -> None:
    with LLM(runner="pooling", max_model_len=64) as llm:
        (as_text,) = llm.score("a cat", "a dog", use_tqdm=False)
        (as_dictionary,) = llm.score({"prompt": "a cat"}, [{"prompt": "a dog"}], use_tqdm=False)
        assert as_dictionary.outputs.score == as_text.outputs.score
        for tokens in ([504, 260], [[504, 260]], {"prompt_token_ids": [504, 260]}):
            with pytest.raises(RequestError, match="data_2 must be a text or a list of them"):
                llm.score("a cat", tokens, use_tqdm=False)


def test_the_end_of_a_request_costs_nothing_for_the_others(llm: LLM) -> None:
    """Ids that are known are taken out one by one, and not written anew."""
    engine = llm.llm_engine
    known = engine._ids
    for i in range(4):
        engine.add_request(f"own {i}", "The sea", SamplingParams(max_tokens=1 + 2 * i, temperature=0, ignore_eos=True))
    while engine.has_unfinished_requests():
        ended = {output.request_id for output in engine.step() if output.finished}
        assert engine._ids is known and not ended & known.keys()
    assert not known
