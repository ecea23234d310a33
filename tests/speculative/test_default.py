"""Speculation where no flag asks for it: which models and flags have it, that no answer changes, and that draft tokens
are verified only while few sequences run and where they pay."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineArgs
from octavo.config.speculation_flags import settled_speculation
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError
from octavo.models.registry import describe
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.speculation import Speculation
from octavo.speculative_config import DEFAULT
from octavo.step_cost import StepCostModel
from octavo.step_plan import PlannedRow
from tests.execution.test_runner import EOS, config_of, model
from tests.speculative.test_same_answers import save_recurrent
from tests.untimed import without_time

__all__ = ["model"]

# Seconds for each of `StepWork.features`: a row more costs next to nothing, or as much as a step.
ROWS_ARE_CHEAP = StepCostModel((10e-3, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 0, 0))
ROWS_ARE_DEAR = StepCostModel((1e-6, 10e-3, 10e-3, 10e-3, 1e-6, 1e-6, 0, 0))
NUM_RUNNING = 4  # of the default


@pytest.mark.parametrize(
    ("flags", "has_it"),
    [
        ({}, True),
        ({"speculative_config": {}}, True),
        ({"speculative_config": {"method": None}}, True),
        ({"speculative_config": {"method": None, "disable_by_batch_size": None}}, True),
        ({"speculative_config": {"method": "none"}}, False),
        ({"speculative_config": {"method": "none", "model": None}}, False),
        ({"tensor_parallel_size": 2}, True),
        ({"pipeline_parallel_size": 2}, False),
        ({"model_impl": "transformers"}, False),
        ({"runner": "pooling"}, False),
    ],
    ids=str,
)
def test_it_is_on_where_it_goes_with_the_flags(model: Path, flags: dict[str, Any], has_it: bool) -> None:
    config = config_of(model, **({"speculative_config": None} | flags))
    assert config.speculative == (DEFAULT if has_it else None)


def test_a_model_that_pools_still_refuses_what_is_asked_for(model: Path) -> None:
    with pytest.raises(ConfigError, match="pools and samples no tokens; leave speculation out"):
        config_of(model, runner="pooling", speculative_config={"method": "ngram"})


def test_it_is_off_for_models_with_states_and_on_gpus(model: Path, tmp_path: Path, tiny_tokenizer: Path) -> None:
    hybrid = save_recurrent("granite hybrid, rope", tmp_path, tiny_tokenizer)
    assert config_of(hybrid, speculative_config=None).speculative is None
    description = describe(config_of(model).model.checkpoint.config)
    found = {
        device: settled_speculation(EngineArgs(model=str(model)), description, "m", device, pools=False)
        for device in ("cpu", "cuda")
    }
    assert found == {"cpu": DEFAULT, "cuda": None}


def requests(seed: int) -> list[EngineRequest]:
    """Prompts that repeat themselves or not, with greedy, sampled and forked answers of up to 60 tokens."""
    rng = random.Random(seed)
    found = []
    for i in range(24):
        phrase = [rng.randrange(3, 300) for _ in range(rng.randrange(2, 9))]
        prompt = [rng.randrange(3, 300) for _ in range(rng.randrange(1, 12))] + phrase * rng.randrange(1, 4)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.2, 1.0]), n=rng.choice([1, 1, 1, 2]), seed=i, ignore_eos=True,
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]), logprobs=rng.choice([None, 2]),
        )  # fmt: skip
        found.append(EngineRequest(f"r{i}", Prompt(prompt), params, [EOS], rng.randrange(1, 60), 0.0))
    return found


def answers(model: Path, seed: int, speculative: dict[str, Any] | None) -> tuple[dict[str, Any], dict[bool, int]]:
    """Each completion's tokens and log-probabilities; and the draft tokens of the steps in which more than four
    sequences ran, as in the two before, and of the others. Requests come at random, a few or many at once."""
    config = config_of(model, speculative_config=speculative, max_num_seqs=8, max_num_batched_tokens=48)
    core, rng, todo = without_time(EngineCore(config)), random.Random(seed), requests(seed)
    found: dict[str, Any] = {}
    num_drafted: Counter[bool] = Counter()
    num_many = 0  # steps in a row; forks come when those that run have been counted
    while todo or core.has_work:
        while todo and rng.random() < 0.1:
            core.add(todo.pop())
        stepped = core.step()
        num_many = num_many + 1 if len(core.scheduler.queues.running) > NUM_RUNNING else 0
        num_drafted[num_many > 2] += stepped.stats.num_draft_tokens
        for output in stepped.outputs:
            told = found.setdefault(f"{output.request_id} {output.index}", ([], []))
            told[0].extend(output.token_ids)
            told[1].extend((one.token_ids, one.logprobs) for one in output.logprobs or [])
    return found, num_drafted


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_every_answer_is_as_without(model: Path, seed: int) -> None:
    expected, num_drafted = answers(model, seed, {"method": "none"})
    assert num_drafted == {False: 0, True: 0}, "few run, and many"
    found, num_drafted = answers(model, seed, None)
    assert found == expected
    assert num_drafted[False] > 20 and num_drafted[True] == 0


class Followed:
    """Sequences that speculation follows, as the scheduler has it do."""

    def __init__(self, cost: StepCostModel, num_sequences: int = 1) -> None:
        self.speculation = Speculation(NgramProposer(3, 5), 16, cost, max_running=NUM_RUNNING)
        prompt = [*range(100, 400), 1, 2]
        request = EngineRequest("a", Prompt(prompt), SamplingParams(), [], 5000, 0.0)
        self.sequences = [Sequence(request, (0.0, i), 0, token_ids=list(prompt)) for i in range(num_sequences)]

    def add(self, *tokens: int, num_running: int = 1) -> None:
        """A step brings `tokens` to each sequence, of `num_running` that run."""
        self.speculation.count_running(num_running)
        for seq in self.sequences:
            seq.token_ids.extend(tokens)
            seq.num_computed_tokens = len(seq.token_ids) - 1
            if self.speculation.needs_every_token:
                self.speculation.accept(seq, list(tokens), None)

    def drafted(self) -> list[tuple[int, ...]]:
        rows = [PlannedRow(i, seq.num_computed_tokens, 1, 1) for i, seq in enumerate(self.sequences)]
        return self.speculation.choose([(seq, 100) for seq in self.sequences], rows)


def test_a_quote_is_drafted_where_rows_are_cheap_and_not_where_they_cost_a_step_each() -> None:
    for cost, least, most in ((ROWS_ARE_CHEAP, 8, 16), (ROWS_ARE_DEAR, 0, 0)):
        followed = Followed(cost)
        for token in range(100, 120):
            followed.add(token)
        (draft_tokens,) = followed.drafted()
        assert least <= len(draft_tokens) <= most
        assert draft_tokens == tuple(range(120, 120 + len(draft_tokens)))


def test_drafts_that_are_rejected_end_soon_and_come_back_with_what_repeats() -> None:
    """Three tokens as in the prompt, and then another than there, over and over: lookups find much, all of it wrong."""
    cost = StepCostModel((10e-3, 1e-3, 1e-3, 1e-3, 5e-4, 1e-6, 0, 0))
    followed, rng = Followed(cost), random.Random(0)
    tried = []
    for i in range(100):
        begin = 100 + 113 * i % 290  # far from the last one
        for token in (*range(begin, begin + 3), rng.randrange(1000, 5000)):
            followed.add(token)
            tried.append(bool(followed.drafted()[0]))
    assert sum(tried[:40]) > 0, "they are tried"
    assert sum(tried[100:]) == 0, "and then no more"
    for token in range(100, 140):
        followed.add(token)
    assert len(followed.drafted()[0]) > 4


def test_while_more_run_nothing_is_proposed_and_old_proposals_are_not_verified() -> None:
    followed = Followed(ROWS_ARE_CHEAP, 2)
    for token in range(100, 110):
        followed.add(token)
    assert all(followed.drafted()) and not followed.speculation.is_idle
    followed.add(110, num_running=NUM_RUNNING + 1)
    assert not followed.speculation.needs_every_token and followed.speculation.is_idle
    assert not any(followed.drafted()), "what was proposed is for the token that has come"
    rates = list(followed.speculation._acceptance.rates)
    followed.add(111, num_running=NUM_RUNNING)
    assert followed.speculation._acceptance.rates == rates, "nor is it compared with later ones"
    assert [tokens[:4] for tokens in followed.drafted()] == [(112, 113, 114, 115)] * 2


def test_a_prediction_is_followed_however_many_run() -> None:
    followed = Followed(ROWS_ARE_CHEAP)
    (seq,) = followed.sequences
    seq.request.prediction = list(range(500, 540))
    followed.speculation.count_running(100)
    seq.token_ids.append(500)
    followed.speculation.accept(seq, [500], None)
    assert followed.drafted()[0][:2] == (501, 502) and not followed.speculation.is_idle
    followed.speculation.end(seq)
    assert followed.speculation.is_idle
