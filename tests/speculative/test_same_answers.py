"""With speculation every request is answered as without: the same tokens, log-probabilities and text, bit for bit.

Both sides are whole engine cores on one small random model, with a cache that is too small for all requests, prompts
that begin alike and chunks of 48 tokens. Whatever is guessed is verified, so that nothing depends on time. Models whose
layers keep states have fewer requests, and so few states that guesses have to do without at times.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.output_processor import OutputProcessor, RequestFailed
from octavo.errors import ConfigError
from octavo.loading.tokenizer import load_tokenizer
from octavo.outputs import RequestOutput
from octavo.request import EngineRequest, Prompt
from octavo.sampling.draft_verification import count_valid_tokens
from octavo.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from octavo.sequence import Sequence
from octavo.speculative.methods import make_speculation
from octavo.speculative.speculation import Speculation
from octavo.stats import EngineStats
from octavo.step_plan import DRAFT_PLACEHOLDER, StepPlan
from tests.execution.late_device import LateDevice
from tests.execution.test_runner import EOS, VOCAB, config_of, late_executor, model
from tests.models.small_recurrent import RECURRENT_MODELS
from tests.speculation import guessing
from tests.structured_output.grammars import make_grammar
from tests.untimed import without_time

__all__ = ["model"]

NUM_REQUESTS = 200
NUM_ON_LATE_DEVICE = 24
NUM_WITH_STATES = 40
FLAGS: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "num_gpu_blocks_override": 23}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 4},
    {"temperature": 0.3},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "top_k": 40, "logprobs": 0},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 0.3, "repetition_penalty": 1.3},
    {"min_tokens": 6, "bad_words_token_ids": [[7], [8, 9]], "stop_token_ids": list(range(3, 40))},
    {"n": 3, "temperature": 0.8, "logprobs": 1},
    {"logit_bias": {5: 4.0, 6: -2.0}, "temperature": 0.7},
    {"stop": ["e", "th"], "logprobs": 1},
    {"prompt_logprobs": 2, "ignore_eos": True},
    {"n": 2, "use_beam_search": True, "logprobs": 1},
]  # fmt: skip
GRAMMARS = [
    make_grammar(StructuredOutputsParams(regex=r"[0-9]{3,12}(, [a-z]{1,4}){0,4}")),
    make_grammar(StructuredOutputsParams(choice=["no", "nothing", "never"])),
]


def requests(num: int, predicted: dict[str, list[int]]) -> list[EngineRequest]:
    """Prompts that begin alike or repeat themselves. Some bring a prediction, more or less the right one."""
    rng = random.Random(1)
    document = [rng.randrange(3, VOCAB) for _ in range(50)]
    found = []
    for i in range(num):
        phrase = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 5))]
        prompt = document[: rng.randrange(1, 50)] + phrase * rng.randrange(1, 4)
        settings = rng.choice(SETTINGS)
        max_tokens = rng.randrange(settings.get("min_tokens", 1), 28)
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "seed": i} | settings))
        if i % 9 == 0 and not params.use_beam_search and "stop" not in settings:
            params.grammar = rng.choice(GRAMMARS)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        request = EngineRequest(f"r{i}", Prompt(prompt), params, [EOS], max_tokens, 0.0)
        if i % 3 == 0 and (right := predicted.get(request.request_id)):
            wrong = i % (len(right) + 1)
            request.prediction = right[:wrong] + phrase + right[wrong + i % 4 :]
        found.append(request)
    return found


def run(core: EngineCore, model: Path, todo: list[EngineRequest]) -> tuple[dict[str, RequestOutput], EngineStats]:
    """What callers are told at the end, and the sums of guesses and preemptions. Requests come at random."""
    rng, todo = random.Random(2), list(todo)
    without_time(core)
    front = OutputProcessor(load_tokenizer(config_of(model).model.checkpoint))
    answers: dict[str, RequestOutput] = {}
    sums = EngineStats()
    while todo or core.has_work:
        while todo and rng.random() < 0.5:
            request = todo.pop(0)
            front.add(request)
            core.add(request)
        stepped = core.step()
        results, aborts = front.process(stepped.outputs)
        for abort in aborts:
            core.abort(abort.request_id, abort.index)
        for result in results:
            assert not isinstance(result, RequestFailed), result.error
            answers[result.request_id] = result
        for name in ("num_draft_tokens", "num_accepted_tokens", "num_preemptions", "num_prefix_hits"):
            setattr(sums, name, getattr(sums, name) + getattr(stepped.stats, name))
    assert all(pool.num_used == 0 for pool in core.scheduler.cache.pools)
    return answers, sums


def told(answer: RequestOutput) -> list[Any]:
    """Everything in an answer but its times and what its prediction came to."""
    return [answer.prompt_logprobs, answer.prompt_token_ids, answer.outputs]


def noise(most: int) -> Callable[[Sequence, int], tuple[int, ...]]:
    rng = random.Random(3)

    def propose(seq: Sequence, room: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(min(most, room) + 1)))

    return propose


def speculation(config: EngineConfig, method: str) -> Speculation:
    if method == "noise":
        return guessing(noise(8))
    return make_speculation(config.speculative, None, config.model.max_model_len)


def method_config(model: Path, method: str, **flags: Any) -> EngineConfig:
    if method in ("ngram", "suffix"):
        flags["speculative_config"] = {"method": method} | (
            {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}
        )
    if method == "draft_model":  # which the model is to itself, unless another one is named
        flags["speculative_config"] = {"model": flags.pop("draft", str(model)), "num_speculative_tokens": 3}
    return config_of(model, **(FLAGS | flags))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, RequestOutput]:
    answers, sums = run(EngineCore(config_of(model, **FLAGS)), model, requests(NUM_REQUESTS, {}))
    assert sums.num_draft_tokens == 0
    assert sums.num_preemptions > 5
    assert sums.num_prefix_hits > 100
    return answers


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("ngram", {}),
        ("suffix", {}),
        ("prediction", {}),
        ("noise", {}),
        pytest.param("ngram", {"preemption_mode": "swap"}, marks=pytest.mark.long),
        pytest.param("draft_model", {}, marks=pytest.mark.long),
        ("draft_model", {"preemption_mode": "swap"}),
    ],
    ids=str,
)
def test_every_answer_is_the_same(
    model: Path, expected: dict[str, RequestOutput], method: str, flags: dict[str, Any]
) -> None:
    config = method_config(model, method, **flags)
    predicted = {name: answer.outputs[0].token_ids for name, answer in expected.items()}
    core = EngineCore(config, None, speculation(config, method))
    found, sums = run(core, model, requests(NUM_REQUESTS, predicted if method == "prediction" else {}))
    assert found.keys() == expected.keys()
    for name, answer in found.items():
        assert told(answer) == told(expected[name]), name
    assert sums.num_draft_tokens > 300
    assert sums.num_accepted_tokens > 100 or method == "noise"
    assert sums.num_preemptions > 0
    accepted = sum(answer.num_accepted_prediction_tokens for answer in found.values())
    assert (accepted > 100) == (method == "prediction")


@pytest.mark.parametrize(
    "method", [*(pytest.param(method, marks=pytest.mark.long) for method in ("suffix", "prediction")), "noise"]
)
def test_every_answer_is_the_same_on_a_device_that_runs_ahead(
    model: Path, expected: dict[str, RequestOutput], method: str
) -> None:
    config = method_config(model, method)
    predicted = {name: answer.outputs[0].token_ids for name, answer in expected.items()}
    core = EngineCore(config, late_executor(config, LateDevice(1)), speculation(config, method))
    found, sums = run(core, model, requests(NUM_ON_LATE_DEVICE, predicted if method == "prediction" else {}))
    assert len(found) == NUM_ON_LATE_DEVICE
    assert sums.num_draft_tokens > 0
    for name, answer in found.items():
        for was, should_be in zip(answer.outputs, expected[name].outputs, strict=True):
            assert (was.token_ids, was.finish_reason) == (should_be.token_ids, should_be.finish_reason), name
            # The operations behind the late device round otherwise than the native ones.
            assert was.cumulative_logprob == pytest.approx(should_be.cumulative_logprob, abs=2e-3)


# Of each kind of state, alone and beside attention.
STATES = [
    "mamba", "granite hybrid, rope", "qwen3 next",
    *(pytest.param(name, marks=pytest.mark.long)
      for name in ("mamba 2", "lfm 2", "jamba", "recurrent gemma", "minimax", "kimi linear")),
]  # fmt: skip
Answers = dict[str, RequestOutput]


def flags_for(name: str) -> dict[str, Any]:
    """Too few blocks; of models that only keep states, of those."""
    return {"num_gpu_blocks_override": 6} if name.startswith("mamba") else {"num_gpu_blocks_override": 22}


@pytest.fixture(scope="module", params=STATES)
def stateful(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path
) -> tuple[Path, dict[str, Any], Answers]:
    """A model whose layers keep states, its flags, and its answers."""
    name = request.param
    model = save_recurrent(name, tmp_path_factory.mktemp("states"), tiny_tokenizer)
    flags = FLAGS | flags_for(name)
    answers, sums = run(EngineCore(config_of(model, **flags)), model, requests(NUM_WITH_STATES, {}))
    assert sums.num_draft_tokens == 0
    assert sums.num_preemptions > 0 and sums.num_prefix_hits > 0
    return model, flags, answers


def save_recurrent(name: str, folder: Path, tokenizer: Path) -> Path:
    small = RECURRENT_MODELS[name]
    config = small._replace(settings=small.settings | {"vocab_size": VOCAB}).config()
    config.architectures = [small.architecture]
    config.save_pretrained(folder)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def is_windowed(model: Path) -> bool:
    """Whether a model's attention, beside its states, is to the last tokens only."""
    return "attention_window_size" in (model / "config.json").read_text()


FEW_AND_SWAPPED = {"preemption_mode": "swap"}
ENOUGH = {"num_gpu_blocks_override": 100, "speculative_config": {"method": "ngram", "num_speculative_tokens": 8}}


@pytest.mark.parametrize(
    ("method", "changed"),
    [("ngram", {}), ("prediction", {}), ("noise", FEW_AND_SWAPPED), ("noise", ENOUGH)],
    ids=["ngram", "prediction", "noise-swap", "noise"],
)
def test_every_answer_of_a_model_with_states_is_the_same(
    stateful: tuple[Path, dict[str, Any], Answers], method: str, changed: dict[str, Any]
) -> None:
    model, flags, expected = stateful
    config = method_config(model, method, **(flags | changed))
    predicted = {name: answer.outputs[0].token_ids for name, answer in expected.items()}
    core = EngineCore(config, None, speculation(config, method))
    found, sums = run(core, model, requests(NUM_WITH_STATES, predicted if method == "prediction" else {}))
    assert found.keys() == expected.keys()
    for name, answer in found.items():
        assert told(answer) == told(expected[name]), name
    assert sums.num_draft_tokens > 20
    assert sums.num_accepted_tokens > 0 or method == "noise"
    # Where all the states there are may be guesses' none may be left of a prompt.
    assert sums.num_prefix_hits > 0 or changed is FEW_AND_SWAPPED


@pytest.mark.parametrize("changed", [{}, FEW_AND_SWAPPED], ids=["few", "few-swap"])
def test_every_answer_is_the_same_with_a_draft_that_keeps_states(
    stateful: tuple[Path, dict[str, Any], Answers], changed: dict[str, Any]
) -> None:
    """The model guesses for itself. It begins anew with what is found in the cache, and each time it is preempted."""
    model, flags, expected = stateful
    config = method_config(model, "draft_model", **(flags | changed))
    if is_windowed(model):
        with pytest.raises(ConfigError, match="it reads further back than the window of"):
            EngineCore(config)
        return
    core = EngineCore(config, None, speculation(config, "draft_model"))
    found, sums = run(core, model, requests(NUM_WITH_STATES, {}))
    assert found.keys() == expected.keys()
    for name, answer in found.items():
        assert told(answer) == told(expected[name]), name
    assert sums.num_draft_tokens > 20
    assert sums.num_accepted_tokens > sums.num_draft_tokens / 3


def test_every_answer_is_the_same_with_a_draft_of_another_kind(
    model: Path, expected: dict[str, RequestOutput], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    draft = save_recurrent("granite hybrid, rope", tmp_path, tiny_tokenizer)
    config = method_config(model, "draft_model", draft=str(draft))
    found, sums = run(EngineCore(config, None, speculation(config, "draft_model")), model, requests(NUM_REQUESTS, {}))
    for name, answer in found.items():
        assert told(answer) == told(expected[name]), name
    assert sums.num_draft_tokens > 300
    assert sums.num_preemptions > 0


@pytest.mark.parametrize("place", ["cpu", "late device"])
def test_a_draft_goes_on_from_the_state_after_the_last_right_token(
    stateful: tuple[Path, dict[str, Any], Answers], place: str
) -> None:
    """The model guesses for itself: each of its guesses is right, or its state were another one. Whatever was guessed
    otherwise, or not at all, is no part of the state."""
    model, _, _ = stateful
    if is_windowed(model):
        pytest.skip("a draft with states needs all keys")
    config = method_config(model, "draft_model", num_gpu_blocks_override=100)
    rng = random.Random(0)
    draft_tokens = guessing(
        lambda seq, most: rng.choice([(), (7, 8)[:most], *[(DRAFT_PLACEHOLDER,) * min(most, 3)] * 3])
    )
    core = EngineCore(config, None if place == "cpu" else late_executor(config, LateDevice(1)), draft_tokens)
    submit, num_drafted = core.executor.submit, 0

    def watched(plan: StepPlan) -> Any:
        nonlocal num_drafted
        result, first = submit(plan).result(), 0
        for planned in plan.rows:
            tokens = result.tokens[first : first + planned.num_samples]
            first += planned.num_samples
            if guessed := result.draft_tokens.get(planned.row):
                assert count_valid_tokens(guessed, tokens) == 1 + len(guessed)
                num_drafted += len(guessed)
        return SimpleNamespace(result=lambda: result)

    core.executor.submit = watched  # type: ignore[method-assign]
    without_time(core)
    for i in range(4):
        params = SamplingParams(temperature=i % 2, max_tokens=24, ignore_eos=True, seed=i)
        core.add(EngineRequest(f"r{i}", Prompt([5, 6 + i, 7] * (3 + 6 * i)), params, [EOS], 24, 0.0))
    while core.has_work:
        core.step()
    assert num_drafted > 30


@pytest.mark.parametrize(
    "method",
    [pytest.param("prediction", marks=pytest.mark.long), "noise", pytest.param("draft_model", marks=pytest.mark.long)],
)
def test_every_answer_of_a_model_with_states_is_the_same_on_a_device_that_runs_ahead(
    stateful: tuple[Path, dict[str, Any], Answers], method: str
) -> None:
    model, flags, expected = stateful
    if method == "draft_model" and is_windowed(model):
        pytest.skip("a draft with states needs all keys")
    config = method_config(model, method, **flags)
    predicted = {name: answer.outputs[0].token_ids for name, answer in expected.items()}
    device = LateDevice(1)
    core = EngineCore(config, late_executor(config, device), speculation(config, method))
    todo = requests(NUM_WITH_STATES, predicted if method == "prediction" else {})[:NUM_ON_LATE_DEVICE]
    found, sums = run(core, model, todo)
    assert len(found) == NUM_ON_LATE_DEVICE
    assert sums.num_draft_tokens > 0
    assert device.num_replays > 0
    for name, answer in found.items():
        for was, should_be in zip(answer.outputs, expected[name].outputs, strict=True):
            assert (was.token_ids, was.finish_reason) == (should_be.token_ids, should_be.finish_reason), name
            assert was.cumulative_logprob == pytest.approx(should_be.cumulative_logprob, abs=2e-3)
