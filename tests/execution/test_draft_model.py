"""A draft model changes no answer: one that is the model itself, one of other weights, and one that is noise.

Both sides are whole engine cores; the answers, with their log-probabilities, are those of the core without a draft.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.engine.core import EngineCore
from octavo.errors import ConfigError, DeviceMemoryError
from octavo.execution.draft_model import group_for
from octavo.execution.drafting_runner import DraftingRunner
from octavo.execution.executor import PendingStep
from octavo.kv_cache import host_tier
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.request import EngineRequest, Prompt, SequenceOutput
from octavo.sampling.draft_verification import count_valid_tokens
from octavo.sampling_params import SamplingParams
from octavo.speculative.proposer import ToBeDrafted
from octavo.speculative.speculation import Speculation
from octavo.step_plan import DRAFT_PLACEHOLDER, PlannedRow, StepPlan
from tests.execution.late_device import LateDevice
from tests.execution.small_overrides import BAMBA, CUT
from tests.execution.test_draft_tokens import guessed_requests
from tests.execution.test_host_tier import kept
from tests.execution.test_runner import EOS, FLAGS, VOCAB, config_of, late_executor, model, requests, run, told
from tests.speculation import guessing

__all__ = ["model"]


def other_model(model: Path, folder: Path, **settings: Any) -> Path:
    """A draft of another shape, whose random weights have nothing to do with the model's."""
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_attention_heads": 2, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.fixture(scope="module")
def drafts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model itself, and smaller ones with as many numbers of tokens, fewer or more."""
    sizes = {"small": VOCAB, "narrow": VOCAB - 40, "wide": VOCAB + 40}
    folders = {name: tmp_path_factory.mktemp(name) for name in sizes}
    return {"the model": model} | {
        name: other_model(model, folder, vocab_size=sizes[name]) for name, folder in folders.items()
    }


Outputs = dict[tuple[str, int], list[SequenceOutput]]


def assert_same(found: Outputs, expected: Outputs, place: str) -> None:
    """Of whole runs. The operations of the late device round log-probabilities otherwise than the native ones."""
    assert found.keys() == expected.keys()
    for key, outputs in found.items():
        was, should_be = told(outputs), told(expected[key])
        if place == "late device":
            assert was.pop("values") == pytest.approx(should_be.pop("values"), abs=2e-3)
        assert was == should_be


@pytest.mark.parametrize(
    ("place", "draft", "flags"),
    [
        ("cpu", "small", "graphs"),
        ("cpu", "the model", "few blocks"),
        ("cpu", "narrow", "few blocks, swapped"),
        ("cpu", "wide", "graphs"),
        ("late device", "the model", "few blocks, swapped"),
        pytest.param("late device", "small", "call by call", marks=pytest.mark.long),
    ],
)
def test_a_draft_changes_no_answer(model: Path, drafts: dict[str, Path], draft: str, flags: str, place: str) -> None:
    expected = run(EngineCore(config_of(model, **FLAGS[flags])), guessed_requests(1), 1)
    speculative = {"model": str(drafts[draft]), "num_speculative_tokens": 3}
    config = config_of(model, speculative_config=speculative, **FLAGS[flags])
    executor = None if place == "cpu" else late_executor(config, LateDevice(1))
    core = EngineCore(config, executor, Speculation(ToBeDrafted(96), 3))
    found = run(core, guessed_requests(1), 1)
    assert_same(found, expected, place)


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {VOCAB - 1: 5.0, 7: 3.0}},
        {"allowed_token_ids": [7, VOCAB - 1]},
        {"allowed_token_ids": [VOCAB - 2, VOCAB - 1]},
    ],
    ids=str,
)
def test_settings_may_name_tokens_that_the_draft_lacks(
    model: Path, drafts: dict[str, Path], settings: dict[str, Any]
) -> None:
    def asked() -> list[EngineRequest]:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, **settings)
        return [EngineRequest("r", Prompt([5, 6, 7]), params, [EOS], 6, 0.0)]

    speculative = {"model": str(drafts["narrow"]), "num_speculative_tokens": 3}
    core = EngineCore(config_of(model, speculative_config=speculative), None, Speculation(ToBeDrafted(96), 3))
    assert_same(run(core, asked()), run(EngineCore(config_of(model)), asked()), "cpu")


def is_followed(request: EngineRequest) -> bool:
    """Whether a draft knows all that the sampler does."""
    params = request.params
    return not (params.follows_output or params.grammar)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_draft_that_lags_catches_up_whatever_became_of_its_blocks(model: Path, flags: dict[str, Any]) -> None:
    """The model guesses for itself: where its keys were lost, guesses would be wrong."""
    config = config_of(model, speculative_config={"model": str(model), "num_speculative_tokens": 3}, **flags)
    rng = random.Random(0)
    found, num_drafted = run_with_right_guesses(EngineCore(config, None, sometimes(rng)), rng)
    assert num_drafted > 50
    num_preemptions = sum(outputs[-1].num_preemptions for outputs in found.values())
    assert num_preemptions or "num_gpu_blocks_override" not in flags


def test_blocks_that_come_back_from_the_host_have_the_drafts_part(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_LOAD_S_PER_BYTE", 0.0)
    flags = FLAGS["few blocks"] | {"speculative_config": {"model": str(model), "num_speculative_tokens": 3}}
    config, rng, loaded = kept(config_of(model, **flags)), random.Random(0), list[bytes]()
    core = EngineCore(config, late_executor(config, LateDevice(1)), sometimes(rng))
    load = core.scheduler.cache.load_from_host
    monkeypatch.setattr(core.scheduler.cache, "load_from_host", lambda pool, key: (loaded.append(key), load(pool, key)))
    _, num_drafted = run_with_right_guesses(core, rng)
    assert loaded and num_drafted > 30


def test_a_draft_that_finds_no_memory_loses_no_block(model: Path) -> None:
    """Of sequences that were admitted with a step, when it found none for others of that."""
    config = config_of(model, speculative_config={"model": str(model), "num_speculative_tokens": 3})
    rng, device = random.Random(0), LateDevice(0)
    core = EngineCore(config, late_executor(config, device), sometimes(rng))
    drafter: Any = core.executor.worker._draft.runner  # type: ignore[attr-defined]
    apply_updates, submit_rows, admitted = drafter.apply_updates, drafter.submit_rows, set[int]()

    def noting_admissions(plan: StepPlan) -> None:
        admitted.update(admission.row for admission in plan.admissions)
        apply_updates(plan)

    def without_memory(plan: StepPlan) -> Any:
        device.memory_failures = 1.0 if admitted - {planned.row for planned in plan.rows} else 0.0
        admitted.clear()
        try:
            return submit_rows(plan)
        finally:
            device.memory_failures = 0.0

    drafter.apply_updates, drafter.submit_rows = noting_admissions, without_memory
    _, num_drafted = run_with_right_guesses(core, rng)
    assert device.num_failures > 3 and num_drafted > 30


def sometimes(rng: random.Random) -> Speculation:
    """Leaves some guesses to a model, at times."""
    return guessing(lambda seq, most: (DRAFT_PLACEHOLDER,) * min(most, rng.choice([0, 0, 0, 1, 3])))


def run_with_right_guesses(core: EngineCore, rng: random.Random) -> tuple[Outputs, int]:
    """Every guess of a model that guesses for itself must be right, but for those that were made up. How many were."""
    submit, num_drafted = core.executor.submit, 0

    def watched(plan: StepPlan) -> PendingStep:
        nonlocal num_drafted
        plan.drafts_prompts = rng.random() < 0.5
        result, first = submit(plan).result(), 0
        for planned in plan.rows:
            tokens = result.tokens[first : first + planned.num_samples]
            first += planned.num_samples
            draft_tokens = result.draft_tokens.get(planned.row, ())
            if any(draft_tokens):  # not made up because more was lacking than fits a step
                assert count_valid_tokens(draft_tokens, tokens) == 1 + len(draft_tokens)
                num_drafted += len(draft_tokens)
        return SimpleNamespace(result=lambda: result)

    core.executor.submit = watched  # type: ignore[method-assign]
    found = run(core, [request for request in requests(2, 40) if is_followed(request)], 2)
    return found, num_drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", ["cpu", "late device"])
def test_the_model_itself_guesses_right(model: Path, temperature: float, place: str) -> None:
    config = config_of(model, speculative_config={"model": str(model), "num_speculative_tokens": 3})
    executor = None if place == "cpu" else late_executor(config, LateDevice(1))
    core = EngineCore(config, executor, Speculation(ToBeDrafted(96), 3))
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, seed=5)
    core.add(EngineRequest("r", Prompt([5, 6, 7] * 7), params, [EOS], 24, 0.0))
    num_steps = 0
    while core.has_work:
        core.step()
        num_steps += 1
    # A prompt, then four tokens a step; a device that runs ahead has given out two steps before it knows of guesses.
    assert num_steps <= (1 + -(-23 // 4) if place == "cpu" else 4 + -(-21 // 4))


def test_a_draft_as_large_as_the_model_gets_a_warning(
    model: Path, drafts: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for draft, is_warned in (("small", False), ("the model", True)):
        caplog.clear()
        EngineCore(config_of(model, speculative_config={"model": str(drafts[draft])}))
        assert ("choose a smaller one" in caplog.text) == is_warned, draft


def test_a_draft_of_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    folder = other_model(model, tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"token \d+ is '[ab]' in the model's vocabulary and '[ab]' in the draft's"):
        EngineCore(config_of(model, speculative_config={"model": str(folder)}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"draft_tensor_parallel_size": 2}, "is not built yet"),
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab is not built yet"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype of --speculative-config is not built yet"),
        ({"method": "mtp"}, "leave its model out"),
    ],
)
def test_what_a_draft_cannot_do_is_refused(model: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(model, speculative_config={"model": str(model)} | settings)


def test_a_draft_shares_blocks_that_hold_what_it_reads() -> None:
    full = LayerCacheSpec("full", num_kv_heads=1, key_size=8, value_size=8)
    narrow, wide = (
        LayerCacheSpec("window", num_kv_heads=1, key_size=8, value_size=8, window=window) for window in (16, 64)
    )
    assert group_for(group_layers([narrow, full]), [full, narrow], "draft") == 1
    assert group_for(group_layers([narrow, wide]), [wide], "draft") == 1
    assert group_for(group_layers([narrow, wide]), [narrow], "draft") == 0
    with pytest.raises(
        ConfigError, match=r"draft cannot draft for this model: it reads further back than .* 64 tokens"
    ):
        group_for(group_layers([narrow, wide]), [full], "draft")
    state = LayerCacheSpec("state", num_bytes=64)
    assert group_for(group_layers([state, full]), [full], "draft") == 1
    assert group_for(group_layers([state]), [], "medusa, which keeps nothing") == 0
    assert group_for(group_layers([narrow, full]), [state, full], "draft") == 1
    assert group_for(group_layers([narrow]), [state], "draft, which keeps nothing in blocks") == 0
    with pytest.raises(ConfigError, match=r"all layers of the model keep a state"):
        group_for(group_layers([state]), [full], "draft")
    with pytest.raises(ConfigError, match=r"draft cannot draft for this model: it reads further back"):
        group_for(group_layers([narrow]), [state, narrow], "draft")


def test_what_a_draft_cannot_guess_yet_is_not_judged(model: Path) -> None:
    """It lacks more than a step computes, as it had not computed prompts. What it has guessed for itself was right."""
    speculation, lacking = Speculation(ToBeDrafted(96), 3), 0
    wrong: list[int] = []
    speculation._acceptance.observe = lambda level, right, count: wrong.append(count)  # type: ignore[method-assign]
    core = EngineCore(config_of(model, speculative_config={"model": str(model)}), None, speculation)
    submit = core.executor.submit

    def watched(plan: StepPlan) -> PendingStep:
        nonlocal lacking
        plan.drafts_prompts = False
        result = submit(plan).result()
        lacking += sum(not made for made in result.num_drafted.values())
        return SimpleNamespace(result=lambda: result)

    core.executor.submit = watched  # type: ignore[method-assign]
    run(core, [request for request in requests(2, 40) if is_followed(request)], 2)
    assert lacking > 5 and len(wrong) > 20 and not any(wrong)


@pytest.mark.parametrize("kind", ["the model", "a recurrent one"])
def test_what_a_draft_keeps_is_freed_with_the_cache(model: Path, tmp_path: Path, kind: str) -> None:
    """As sleeping does. What it guesses after that is right again, as it was."""
    folder = model if kind == "the model" else other_model(model, tmp_path / "recurrent", **CUT, **BAMBA)
    asked = {"speculative_config": {"model": str(folder), "num_speculative_tokens": 3}}
    core = EngineCore(config_of(folder, **asked), None, Speculation(ToBeDrafted(96), 3))
    followed = [request for request in requests(2, 40) if is_followed(request)]
    before = run(core, followed, 2)
    draft = core.executor.worker._draft  # type: ignore[attr-defined]
    kept = [array for cache in draft.runner.submitter.caches for array in cache.arrays]
    assert all(array.any() for array in kept)
    core.reset_prefix_cache(frees_memory=True)
    for array in kept:  # but for what shares a page with others
        assert not array.reshape(-1).view(np.uint8)[PAGESIZE : array.nbytes - PAGESIZE].any()
    after, num_drafted = run_with_right_guesses(core, random.Random(1))
    assert_same(after, before, "cpu")
    assert num_drafted > 100


def test_the_drafter_sees_what_precedes_a_step_that_is_withdrawn_for_want_of_memory() -> None:
    """Later plans do not repeat admissions and new blocks."""
    seen: list[StepPlan] = []

    def refuse(plan: StepPlan) -> None:
        raise DeviceMemoryError("no memory")

    runner: Any = SimpleNamespace(apply_updates=refuse)
    drafter: Any = SimpleNamespace(draft=seen.append)
    worker_group: Any = SimpleNamespace(worker_rank=SimpleNamespace(num_stages=1))
    drafting = DraftingRunner(runner, drafter, worker_group)
    plan = StepPlan(new_tokens=[(0, 1, 2)], rows=[PlannedRow(0, 1, 1, 1)])
    with pytest.raises(DeviceMemoryError):
        drafting.submit(plan)
    assert seen == [replace(plan, rows=[])]
