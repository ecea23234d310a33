"""The model of a step's cost: what it learns from steps that a formula has timed, and what does not disturb it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from octavo.step_cost import StepCostModel, StepWork
from octavo.step_plan import PlannedRow

TRUTH = (3.3e-3, 0.25e-3, 0.45e-3, 0.48e-3, 0.12e-3, 0.5e-3, 0.8e-6, 0.05e-6)


def derived() -> StepCostModel:
    """From figures that are far from `TRUTH`."""
    return StepCostModel.derived(weight_bytes=300_000_000, key_bytes=23_040, bytes_per_s=5e9, operations_per_s=100e9)


def random_steps(rng: random.Random, count: int) -> Iterator[StepWork]:
    """Decodes of a batch that comes and goes, with and without a part of a prompt."""
    for i in range(count):
        work = StepWork()
        for _ in range(1 + i // 20 % 12):
            work.add(rng.randrange(2000), 1, 1)
        if rng.random() < 0.3:
            work.add(rng.randrange(4000), rng.randint(2, 500), rng.randint(0, 1))
        yield work


def errors(
    model: StepCostModel, steps: Iterator[StepWork], truth: StepCostModel, factors: Iterator[float]
) -> np.ndarray:
    """Relative errors of the predictions of what steps would take undisturbed, by a model that is told what they take
    times the factors."""
    found = []
    for work, factor in zip(steps, factors, strict=False):
        seconds = truth.seconds(work)
        found.append(abs(model.seconds(work) / seconds - 1))
        model.observe(work, seconds * factor)
    return np.array(found)


def noise(rng: random.Random, slowness: float = 1.0) -> Iterator[float]:
    """Neighbours steal time: steps take a tenth more or less, and one in twenty takes three to ten times as long."""
    while True:
        yield slowness * (rng.uniform(3, 10) if rng.random() < 0.05 else rng.lognormvariate(0, 0.1))


def test_the_work_of_a_step_is_that_of_its_rows() -> None:
    rows = [PlannedRow(0, 100, 1, 1), PlannedRow(1, 7, 3, 0), PlannedRow(2, 0, 2, 2, 1, (5,))]
    expected = StepWork(num_tokens=6, num_samples=3, num_chunks=2, num_keys=107, num_chunk_pairs=3 * 7 + 6 + 3)
    assert StepWork.of(rows) == expected
    assert StepWork.of(rows[:2]).plus(0, 2, 2) == expected


def test_it_learns_a_machine_that_it_knows_nothing_of_and_the_same_steps_give_the_same_numbers() -> None:
    found = []
    for _ in range(2):
        model, rng = derived(), random.Random(0)
        errors(model, random_steps(rng, 400), StepCostModel(TRUTH), iter([1.0] * 400))
        found.append(errors(model, random_steps(rng, 200), StepCostModel(TRUTH), iter([1.0] * 200)))
    assert np.median(found[0]) < 0.02 and np.percentile(found[0], 95) < 0.1
    assert found[0].tolist() == found[1].tolist()


def test_stolen_time_does_not_lead_it_astray() -> None:
    model, rng = derived(), random.Random(1)
    found = errors(model, random_steps(rng, 2000), StepCostModel(TRUTH), noise(rng))[400:]
    assert np.median(found) < 0.06 and np.percentile(found, 95) < 0.2
    assert found.max() < 0.5


def test_it_follows_a_change_of_speed_within_twenty_steps() -> None:
    model, rng = derived(), random.Random(2)
    errors(model, random_steps(rng, 500), StepCostModel(TRUTH), noise(rng))
    slow = StepCostModel([2.5 * seconds for seconds in TRUTH])
    assert np.median(errors(model, random_steps(rng, 300), slow, noise(rng))[20:]) < 0.1
    assert np.median(errors(model, random_steps(rng, 300), StepCostModel(TRUTH), noise(rng))[20:]) < 0.1


def test_hours_of_decoding_do_not_make_it_forget_what_prompts_cost() -> None:
    model, rng, truth = derived(), random.Random(3), StepCostModel(TRUTH)
    errors(model, random_steps(rng, 500), truth, noise(rng))
    for factor, _ in zip(noise(rng), range(5000), strict=False):
        work = StepWork(num_tokens=4, num_samples=4, num_keys=2000)
        model.observe(work, truth.seconds(work) * factor)
    prompt = StepWork().plus(0, 512, 1)
    assert abs(model.seconds(prompt) / truth.seconds(prompt) - 1) < 0.25


def test_more_work_never_costs_less() -> None:
    model, rng = derived(), random.Random(4)
    errors(model, random_steps(rng, 500), StepCostModel(TRUTH), noise(rng))
    for work in random_steps(rng, 50):
        least = model.seconds(work)
        for num_tokens in (1, 2, 50, 500):
            assert model.seconds(work.plus(1000, num_tokens, 1)) >= least


def test_steps_beside_a_tower_are_predicted_at_once_and_teach_nothing_of_others() -> None:
    rng, truth, model = random.Random(5), StepCostModel(TRUTH), derived()
    errors(model, random_steps(rng, 400), truth, noise(rng))

    def beside(factor: float, count: int) -> list[float]:
        model.tower_running, found = True, []
        for work in random_steps(rng, count):
            found.append(model.seconds(work) / truth.seconds(work) / factor - 1)
            model.observe(work, truth.seconds(work) * factor, had_neighbour=True)
        model.tower_running = False
        return found

    work = next(random_steps(rng, 1))
    alone = model.seconds(work)
    beside(1.6, 30)
    assert model.seconds(work) == alone
    again = beside(1.6, 20)
    assert np.abs(again).max() < 0.1  # from the first one on
    model.tower_running = True
    assert model.seconds(work) > 1.4 * alone
    fast = derived()
    fast.tower_running = True
    assert fast.seconds(work) == derived().seconds(work)  # which has not met one
