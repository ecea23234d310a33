"""A request goes on with another core after the death of its own, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from octavo import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.resubmission import Resubmission
from octavo.engine.wire import FrontendMessage, Trials
from octavo.errors import RequestError
from octavo.lora.request import LoRARequest
from octavo.request import AdapterSource, EngineRequest, Prompt, SequenceOutput
from tests.execution.test_runner import save_model
from tests.lora.random_adapters import TINY_SIZES, write_adapter_of

PROMPT = [5, 90, 91, 92, 70, 71, 90, 91, 92, 70, 71, 90, 91, 92, 70, 71, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "seeded": {"seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "several": {"n": 3},
    "several of different lengths": {"n": 3, "stop_token_ids": list(range(3, 60))},
    "best of": {"best_of": 3},
    "beams": {"n": 2, "use_beam_search": True, "temperature": 0.0},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2, "n": 2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "least length": {"min_tokens": 6, "stop_token_ids": list(range(3, 200))},
    "stop strings": {"stop": list("abcdefghijklmnopqrstuvwxyz"), "min_tokens": 3},
    "biased": {"logit_bias": {95: 5.0, 96: 4.0}, "bad_words": ["z"]},
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="(ab|ba|cc){4,6}d"), "n": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_tokenizer)


def load(folder: Path, **flags: Any) -> LLM:
    return LLM(
        model=str(folder), load_format="dummy", dtype="float32", seed=3, max_num_seqs=6, max_num_batched_tokens=24,
        max_model_len=96, block_size=8, num_gpu_blocks_override=40, check_invariants=True, enable_lora=True, **flags,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["plain", "speculating"])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    return load(folder, **({} if request.param == "plain" else {"speculative_config": draft}))


def answer(llm: LLM, request: EngineRequest, deaths: Collection[int]) -> RequestOutput:
    """The answer of a core that dies after so many steps, and is followed by another."""
    outputs = OutputProcessor(llm.tokenizer)
    request = msgspec.structs.replace(request, request_id=llm.inputs.new_id())
    state = outputs.add(request, "r")
    core = llm.core
    core.reset_prefix_cache()
    core.add(state.remainder())
    for number in range(300):
        if number in deaths:  # the next core has nothing of the last one's
            core.abort(request.request_id)
            core.reset_prefix_cache()
            core.add(state.remainder())
        results, aborts = outputs.process(core.step().outputs)
        for abort in aborts:
            core.abort(abort.request_id, abort.index)
        for result in results:
            assert isinstance(result, RequestOutput), result
            if result.finished:
                return result
    raise AssertionError("the request does not come to an end")


def told(output: RequestOutput) -> Any:
    prompt = output.prompt_logprobs
    return output.outputs, None if prompt is None else list(prompt), output.num_cached_tokens, output.prompt_token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_outlives_its_core_has_the_answer_of_one_that_was_not_disturbed(llm: LLM, kind: str) -> None:
    params = SamplingParams(**{"max_tokens": 20, "temperature": 1.0} | KINDS[kind])
    request = llm.inputs.process({"prompt_token_ids": PROMPT, "prediction": PROMPT[6:]}, params)
    expected = told(answer(llm, request, ()))
    for deaths in ([1], [2], [3], [6], [3, 4, 11], range(2, 300, 3)):
        if params.use_beam_search and len(deaths) > 20:
            continue  # it begins anew each time
        assert told(answer(llm, request, deaths)) == expected, deaths
    assert not llm.core.has_work and llm.core.scheduler.cache.pools[0].num_used == 0


def test_an_adapter_goes_with_its_request(llm: LLM, tmp_path: Path) -> None:
    write_adapter_of(tmp_path, 1, 4, TINY_SIZES)
    source = llm.inputs.find_adapter(LoRARequest("a", 1, str(tmp_path)))
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    plain = llm.inputs.process({"prompt_token_ids": PROMPT}, params)
    adapted = llm.inputs.process({"prompt_token_ids": PROMPT}, params, adapter=source)
    expected = told(answer(llm, adapted, ()))
    assert expected != told(answer(llm, plain, ()))
    for deaths in ([2], [5], [4, 8]):
        assert told(answer(llm, adapted, deaths)) == expected


def test_accepted_and_rejected_tokens_of_a_prediction_are_counted_over_all_cores() -> None:
    outputs = OutputProcessor(cast(Any, SimpleNamespace(backend_tokenizer=None)))
    params = SamplingParams(max_tokens=9, detokenize=False)
    state = outputs.add(EngineRequest("a", Prompt([1]), params, [], 9, 0.0, prediction=[5]))
    for _ in range(2):
        state.remainder()
        for accepted, rejected in ((1, 0), (2, 3)):
            token = SequenceOutput(
                "a", 0, [5], num_accepted_prediction_tokens=accepted, num_rejected_prediction_tokens=rejected
            )
            [output], _ = outputs.process([token])
    assert isinstance(output, RequestOutput)
    assert (output.num_accepted_prediction_tokens, output.num_rejected_prediction_tokens) == (4, 6)


class Engine:
    """The requests of a front end, and what its core is sent."""

    def __init__(self) -> None:
        self.outputs = OutputProcessor(cast(Any, SimpleNamespace(backend_tokenizer=None)))
        self.sent: list[tuple[str, int]] = []  # (request, tokens that it has)
        self.num_trials = 0  # that it has told a hub of
        self.resubmission = Resubmission(self.outputs, self._send)
        self.resubmission.core_is_ready()

    def _send(self, message: FrontendMessage) -> None:
        if isinstance(message, EngineRequest):
            self.sent.append((message.request_id, len(message.output_token_ids.get(0, []))))
        elif isinstance(message, Trials):
            self.num_trials = message.number

    def add(self, name: str, **more: Any) -> None:
        params = SamplingParams(max_tokens=100, detokenize=False)
        self.resubmission.submit(self.outputs.add(EngineRequest(name, Prompt([1]), params, [], 100, 0.0, **more)))

    def give(self, *names: str) -> None:
        """A step's outputs: a token for each of these requests."""
        self.outputs.process([SequenceOutput(name, 0, [7]) for name in names])
        self.resubmission.step_ended()

    def die(self, *running: str, is_ready_again: bool = True) -> list[str]:
        """Die with these requests in the step. Returns the requests that are refused."""
        self.resubmission.step_begins([*running])
        refused = list(self.resubmission.core_ended())
        for name in refused:
            self.outputs.drop(name, RequestError("It ends the engine."))
        self.sent.clear()
        if is_ready_again:
            self.resubmission.core_is_ready()
        return refused


def test_all_requests_go_on_in_their_order_with_the_tokens_that_they_have() -> None:
    engine = Engine()
    for name in "abc":
        engine.add(name)
    engine.give("c", "a")
    assert engine.sent == [("a", 0), ("b", 0), ("c", 0)]
    for _ in range(3):  # innocent: they get on between two deaths, or were not in the step
        assert engine.die("a", "c") == []
        assert [name for name, _ in engine.sent] == ["a", "b", "c"]
        engine.give("a", "c")
    assert engine.die("a", "c") == []
    assert engine.sent == [("a", 4), ("b", 0), ("c", 4)]


def test_a_request_that_kills_cores_is_found_and_refused_alone() -> None:
    engine = Engine()
    for name in ("a", "kills", "b", "waits"):
        engine.add(name)
    assert engine.die("a", "kills", "b") == []
    assert engine.die("a", "kills", "b") == []
    assert engine.sent == [("a", 0)], "each is tried before the next"
    engine.add("new")
    assert engine.sent == [("a", 0)], "who comes now waits"
    engine.give("a")
    assert engine.sent == [("a", 0), ("kills", 0)]
    assert engine.die("a", "kills", is_ready_again=False) == ["kills"]
    assert engine.die(is_ready_again=False) == [], "a core that is never ready says nothing of requests"
    engine.resubmission.core_is_ready()
    assert engine.sent == [("b", 0)]
    engine.give("b")
    assert engine.sent == [("b", 0), ("a", 1), ("waits", 0), ("new", 0)]


@pytest.mark.parametrize("end", ["abort", "death before its step"])
def test_a_trial_ends_with_its_request_only(end: str) -> None:
    engine = Engine()
    for name in "ab":
        engine.add(name)
    engine.die("a")
    engine.die("a")
    assert engine.sent == [("a", 0)]
    if end == "abort":
        engine.outputs.abort("a")
        engine.give()
        assert engine.sent == [("a", 0), ("b", 0)]
    else:
        assert engine.die() == []
        assert engine.sent == [("a", 0)], "it is tried again"


def test_the_trial_of_a_request_that_shows_no_token_ends_when_it_gets_further_than_before() -> None:
    engine = Engine()
    for name in ("searches", "b"):
        engine.add(name)
    for _ in range(2):
        engine.resubmission.step_begins(["searches", "b"])
        for _ in range(3):
            engine.give("b")
        engine.die("searches", "b")
    assert engine.sent == [("searches", 0)]
    engine.resubmission.step_begins(["searches"])
    for _ in range(3):
        engine.give()
    assert engine.sent == [("searches", 0)], "it may be its fourth step that kills"
    engine.give()
    assert engine.sent == [("searches", 0), ("b", 6)]


def test_a_request_that_a_core_prepares_may_be_what_kills_it() -> None:
    engine = Engine()
    engine.add("adapted", adapter=AdapterSource("a" * 32, "a", None, "a.gguf"))
    assert engine.die() == engine.die() == []
    assert engine.die() == ["adapted"]
