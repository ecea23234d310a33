"""What guesses runs whole on the first of several workers, and the others verify what it has guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.errors import ConfigError
from octavo.execution.executor import MultiprocExecutor
from octavo.speculative.proposer import ToBeDrafted
from octavo.speculative.speculation import Speculation
from tests.execution.small_overrides import BAMBA, CUT
from tests.execution.test_draft_heads import DEEPSEEK_MODULE, SHAPE, answer_of, heads, settings
from tests.execution.test_draft_heads import model as deep_model
from tests.execution.test_draft_model import other_model
from tests.execution.test_draft_tokens import guessed_requests
from tests.execution.test_runner import config_of, model, requests, run
from tests.execution.test_worker_group import Outputs, told_exactly
from tests.execution.test_worker_group import start_of as start

__all__ = ["deep_model", "heads", "model", "start"]

Start = Callable[..., EngineCore]


def exactly(outputs: Outputs) -> dict[tuple[str, int], Any]:
    """All that is told, to the bit, as these sums are cut alike for any number of workers."""
    return {key: told_exactly(of_one) for key, of_one in outputs.items()}


def always() -> Speculation:
    return Speculation(ToBeDrafted(96), 3)


def workers(size: int, num_stages: int) -> dict[str, Any]:
    return {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}


SWAP = {"num_gpu_blocks_override": 13, "preemption_mode": "swap"}


@pytest.mark.long
@pytest.mark.parametrize("flags", [{}, SWAP, {"enforce_eager": True}], ids=str)
@pytest.mark.parametrize("kind", ["the model", "a recurrent one"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_a_draft_guesses_for_all_workers(
    model: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, flags: dict[str, Any],
    sizes: tuple[int, int],
) -> None:  # fmt: skip
    expected = run(EngineCore(config_of(model, **flags)), guessed_requests(1), 1)
    draft = model if kind == "the model" else other_model(model, tmp_path, **CUT, **BAMBA)
    speculative = {"model": str(draft), "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    speculation, num_drafted = always(), 0

    def count(_rows: Any, draft_tokens: dict[int, tuple[int, ...]], *_how_long: Any) -> None:
        nonlocal num_drafted
        num_drafted += sum(map(len, draft_tokens.values()))

    monkeypatch.setattr(speculation, "note_drafted", count)
    core = start(model, speculation, speculative_config=speculative, **workers(*sizes), **flags)
    assert exactly(run(core, guessed_requests(1), 1)) == exactly(expected)
    assert num_drafted > 100


LAST_LAYERS = {"pipeline_layer_partition": "1,5"}  # that EAGLE-3 reads


@pytest.mark.parametrize(
    ("method", "sizes", "flags"),
    [
        pytest.param("eagle", (2, 1), SWAP, marks=pytest.mark.long),
        ("eagle3", (2, 1), {}),
        ("eagle", (1, 2), {}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("medusa", (2, 1), {}),
                ("medusa", (1, 2), SWAP),
                ("eagle", (1, 3), {"enforce_eager": True}),
                ("eagle3", (1, 2), LAST_LAYERS),
                ("eagle", (2, 2), {"hf_overrides": {"tie_word_embeddings": True}}),
            ]
        ),
    ],
    ids=str,
)
def test_a_head_guesses_for_all_workers(
    deep_model: Path, heads: dict[str, Path], start: Start, method: str, sizes: tuple[int, int], flags: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """What it would guess beside one. No answer is another one. A token takes as long as all stages together."""
    head = settings(method, heads)
    of_one = {name: value for name, value in flags.items() if name != "pipeline_layer_partition"}
    expected = run(EngineCore(config_of(deep_model, **of_one)), guessed_requests(1), 1)
    guessed = answer_of(EngineCore(config_of(deep_model, **of_one, **head), None, always()))
    core = start(deep_model, always(), **workers(*sizes), **flags, **head)
    assert ("choose a smaller one" in caplog.text) == (sizes[0] > 1 and method != "medusa")
    assert answer_of(core) == guessed
    assert exactly(run(core, guessed_requests(1), 1)) == exactly(expected)


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=pytest.mark.long)])
def test_a_module_of_the_model_guesses_for_all_workers(
    tmp_path: Path, tiny_tokenizer: Path, start: Start, sizes: tuple[int, int]
) -> None:
    """Which has all experts, on the first one."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | DEEPSEEK_MODULE))
    for file in tiny_tokenizer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    head = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    expected = run(EngineCore(config_of(tmp_path)), requests(1, 6), 1)
    guessed = answer_of(EngineCore(config_of(tmp_path, **head), None, always()))
    core = start(tmp_path, always(), **workers(*sizes), **head, enable_expert_parallel=sizes[0] > 1)
    assert answer_of(core) == guessed
    assert exactly(run(core, requests(1, 6), 1)) == exactly(expected)


def test_what_cannot_guess_for_several_workers_is_refused(deep_model: Path, heads: dict[str, Path]) -> None:
    """EAGLE-3 where another stage has a layer that it reads."""
    with pytest.raises(ConfigError, match=r"inputs of layers 1, 3, 5, and the last stage .* has those from 3 on"):
        MultiprocExecutor(config_of(deep_model, **workers(1, 2), **settings("eagle3", heads)))


def test_stages_compute_a_step_while_another_is_guessed_for(model: Path, start: Start) -> None:
    """The last one computes its own part after the guesses for the next, where that changes nothing that it reads."""
    speculative = {"model": str(model), "num_speculative_tokens": 3}
    core = start(model, always(), speculative_config=speculative, **workers(1, 2))
    submit, most = core.executor.worker.submit, 0
    waiting = submit.__self__._waiting  # type: ignore[attr-defined]
    for request in requests(2, 4, ignore_eos=True):
        core.add(request)
    while core.has_work:
        core.step()
        most = max(most, sum(not step.is_done for step in waiting))
    assert most == 1, "the one before has not been waited for when a step ends"
