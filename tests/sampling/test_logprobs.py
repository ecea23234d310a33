"""Log-probabilities of sampled tokens and of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import ops
from octavo.config import SchedulerConfig
from octavo.errors import RequestError
from octavo.execution.block_mover import BlockMover
from octavo.execution.cpu_device import CpuDevice
from octavo.execution.runner import Runner
from octavo.execution.sequence_table import SequenceTable
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import EngineRequest, Prompt, TokenLogprobs
from octavo.sampling.logprobs import entries, measure
from octavo.sampling_params import SamplingParams
from octavo.scheduling.scheduler import Scheduler
from octavo.step_batch import StepBatch
from tests.sampling.rows import Row, sample

V = 50


def token_logprobs(logits: Tensor, tokens: np.ndarray, num_top: np.ndarray) -> list[TokenLogprobs]:
    return entries(measure(ops.load(), logits.numpy(), tokens, num_top).arrays, num_top)


def log_softmax(logits: Tensor) -> np.ndarray:
    x = logits.double().numpy()
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 3, 50, 400]),
    is_rounded=st.booleans(),
    wanted=st.lists(st.tuples(st.integers(0, 2**30), st.integers(0, 20)), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_chosen_and_top_tokens_with_ranks_equal_a_sort_of_each_row(
    vocab_size: int, is_rounded: bool, wanted: list[tuple[int, int]], seed: int
) -> None:
    logits = torch.randn(len(wanted), vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.round() if is_rounded else logits
    tokens = np.array([token % vocab_size for token, _ in wanted], np.int64)
    num_top = np.array([min(count, vocab_size) for _, count in wanted], np.int64)
    for row, token, count, entry in zip(
        logits, tokens.tolist(), num_top.tolist(), token_logprobs(logits, tokens, num_top), strict=True
    ):
        expected = log_softmax(row)
        assert len(entry.token_ids) == len(entry.logprobs) == count + 1
        assert entry.token_ids[0] == token
        assert entry.chosen_rank == 1 + int((row > row[token]).sum())
        np.testing.assert_allclose(entry.logprobs, expected[entry.token_ids], rtol=1e-5, atol=1e-5)
        top = entry.token_ids[1:]
        assert len(set(top)) == count
        np.testing.assert_allclose(expected[top], np.sort(expected)[::-1][:count], rtol=1e-6, atol=1e-6)


def test_which_of_equal_tokens_are_reported_does_not_depend_on_what_others_ask_for() -> None:
    logits = torch.zeros(2, 49152)
    one = token_logprobs(logits[:1], np.array([5]), np.array([3]))[0]
    assert token_logprobs(logits, np.array([5, 5]), np.array([3, 20]))[0] == one


def test_logprobs_are_what_the_model_said_before_penalties_masks_and_temperature() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    params = SamplingParams(
        temperature=0.2, top_k=1, logprobs=2, logit_bias={0: -100.0}, repetition_penalty=2.0, allowed_token_ids=[0, 3]
    )
    found = sample([Row(logits, params)])
    assert found.tokens == [3]
    [entry] = found.logprobs
    assert entry is not None
    assert (entry.token_ids, entry.chosen_rank) == ([3, 0, 1], 4)
    np.testing.assert_allclose(entry.logprobs, log_softmax(logits)[[3, 0, 1]], rtol=1e-5)


def test_zero_logprobs_report_the_chosen_token_alone_and_none_report_nothing() -> None:
    logits = torch.tensor([0.0, 40.0])
    found = sample([
        Row(logits, SamplingParams(logprobs=0)), Row(logits, SamplingParams()),
        Row(logits, SamplingParams(n=1, best_of=2)),
    ])  # fmt: skip
    assert [entry and entry.token_ids for entry in found.logprobs] == [[1], None, [1]]
    assert found.logprobs[0] == TokenLogprobs([1], [0.0], 1)


def test_log_probabilities_of_given_tokens_stand_in_the_place_of_the_likeliest() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    found = sample([
        Row(logits, SamplingParams(logprobs=2, logprob_token_ids=[3, 0, 2], temperature=0.0, logit_bias={0: -100.0})),
        Row(logits, SamplingParams(logprobs=2)),
        Row(logits, SamplingParams(logprob_token_ids=[1])),
    ])  # fmt: skip
    exact = log_softmax(logits)
    one, likeliest, other = found.logprobs
    assert one is not None and likeliest is not None and other is not None
    assert (one.token_ids, one.chosen_rank) == ([1, 3, 0, 2], 2)
    np.testing.assert_allclose(one.logprobs, exact[one.token_ids], rtol=1e-5)
    assert len(likeliest.token_ids) == 3
    assert other.token_ids[1:] == [1] and other.logprobs[1] == one.logprobs[0]
    for wrong in ({"logprob_token_ids": list(range(129))}, {"logprob_token_ids": [1], "use_beam_search": True}):
        with pytest.raises(RequestError, match="logprob_token_ids"):
            SamplingParams(**wrong)


class TableModel:
    """A model whose logits after a token are a row of a table: no attention, so that every log-probability is known."""

    vocab_size = V

    def __init__(self) -> None:
        self.table = torch.randn(V, V, generator=torch.Generator().manual_seed(3))

    def forward(self, batch: StepBatch, caches: Sequence[Any]) -> np.ndarray:
        return batch.token_ids.astype(np.float32)[:, None]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return self.table.numpy()[hidden[:, 0].astype(np.int64)]


def run_requests(
    params: dict[str, SamplingParams], prompts: dict[str, list[int]], budget: int, num_blocks: int = 200
) -> tuple[dict[str, dict[int, list[int]]], dict[str, list[TokenLogprobs]], int]:
    """-> tokens by request and completion, prompt log-probabilities by request, and the number of preemptions."""
    config = SchedulerConfig(
        max_num_seqs=min(budget, 8), max_num_batched_tokens=budget, enable_chunked_prefill=True, policy="fcfs",
        preemption_mode="recompute", check_invariants=True,
    )  # fmt: skip
    groups = group_layers([LayerCacheSpec("full", 1, 16, 16)])
    scheduler = Scheduler(config, KVCacheManager(groups, [num_blocks], 4, [0], True))
    table = SequenceTable(config.max_num_seqs, 128, 4, groups)
    device, cpu = CpuDevice(), ops.load()
    runner = Runner(cast(Any, TableModel()), cpu, device, table, budget)
    runner.use_caches([], BlockMover(cpu, device, [[]], [0]))
    for name, one in params.items():
        scheduler.add(EngineRequest(name, Prompt(prompts[name]), one, [], one.max_tokens or 1, 0.0))
    tokens: dict[str, dict[int, list[int]]] = {name: {} for name in params}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    num_preemptions = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        for output in scheduler.apply_result(plan, runner.submit(plan).result()):
            assert output.error is None
            tokens[output.request_id].setdefault(output.index, []).extend(output.token_ids)
            if output.prompt_logprobs is not None:
                assert output.request_id not in prompt_logprobs
                prompt_logprobs[output.request_id] = output.prompt_logprobs
        num_preemptions += scheduler.take_stats().num_preemptions
    return tokens, prompt_logprobs, num_preemptions


@pytest.mark.parametrize(("budget", "num_blocks"), [(64, 200), (7, 200), (3, 200), (9, 14)])
def test_prompt_logprobs_are_whole_and_right_however_the_prompt_is_cut(budget: int, num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    lengths = {"a": 1, "b": 2, "c": 17, "d": 30, "e": 9}
    prompts = {name: torch.randint(V, (length,), generator=generator).tolist() for name, length in lengths.items()}
    params = {
        name: SamplingParams(max_tokens=12, seed=1, prompt_logprobs=count)
        for name, count in zip(prompts, (0, 3, 0, 5, None), strict=True)
    }
    _, found, num_preemptions = run_requests(params, prompts, budget, num_blocks)
    assert (num_preemptions > 0) == (num_blocks < 200)
    assert sorted(found) == ["b", "c", "d"], "a prompt of one token has no position to report"
    model = TableModel()
    for name, of_prompt in found.items():
        prompt, count = prompts[name], params[name].prompt_logprobs or 0
        assert len(of_prompt) == len(prompt) - 1
        for before, token, entry in zip(prompt, prompt[1:], of_prompt, strict=False):
            expected = log_softmax(model.table[before])
            assert entry.token_ids == [token, *np.argsort(-expected)[:count].tolist()]
            np.testing.assert_allclose(entry.logprobs, expected[entry.token_ids], rtol=1e-4, atol=1e-5)
            assert entry.chosen_rank == 1 + int((expected > expected[token]).sum())


def test_seeded_requests_draw_the_same_tokens_alone_forked_preempted_and_in_company() -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = {str(i): torch.randint(V, (i + 3,), generator=generator).tolist() for i in range(10)}
    params = {
        name: SamplingParams(max_tokens=20, seed=i, n=1 + i % 3, temperature=0.8 + i / 10, presence_penalty=i / 10)
        for i, name in enumerate(prompts)
    }
    together, _, num_preemptions = run_requests(params, prompts, budget=16, num_blocks=16)
    assert num_preemptions > 3
    for name in prompts:
        alone, _, _ = run_requests({name: params[name]}, prompts, budget=64)
        assert together[name] == alone[name]
        assert len({tuple(one) for one in alone[name].values()}) == params[name].n, "completions differ"
