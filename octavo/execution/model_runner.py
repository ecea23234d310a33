"""Carries out a `StepPlan`: moves blocks, gathers the batch, runs the model, samples, and remembers the new tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.batch import StepBatch
from octavo.execution.graph import EagerStep, StepGraph
from octavo.execution.step_batch import SequenceTable
from octavo.ops import LayerKVCache
from octavo.plan import StepPlan, StepResult
from octavo.request import TokenLogprobs
from octavo.sampling.batch import SamplingTable
from octavo.sampling.sampler import Sampler, token_logprobs
from octavo.sampling.structured import GrammarCompiler

# Rows of prompt log-probabilities computed at a time: 256 x 128k vocabulary entries are 128 MiB of float32.
_PROMPT_LOGPROB_ROWS = 256


class ModelRunner:
    """One model on one device, its KV cache, and the tables of the running sequences."""

    def __init__(
        self,
        graph: StepGraph | EagerStep,
        table: SequenceTable,
        sampler: Sampler,
        caches: list[LayerKVCache],
        host_caches: list[LayerKVCache],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.graph = graph
        self.caches = caches
        self.host_caches = host_caches
        self.table = table
        self.sampling = SamplingTable(len(table.tokens), grammars)
        self.sampler = sampler
        self._wants_prompt_logprobs: dict[int, int] = {}  # row -> how many

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. The plan must have at least one row."""
        self._move_blocks(plan)
        self._update_tables(plan)
        batch = self.table.build(plan)
        logits, best = self.graph.run(batch)
        result = self._sample(logits, best)
        result.prompt_logprobs = self._prompt_logprobs(plan, batch)
        return result

    def _move_blocks(self, plan: StepPlan) -> None:
        for pairs, sources, destinations in (
            (plan.moves.swap_out, self.caches, self.host_caches),
            (plan.moves.copy, self.caches, self.caches),
            (plan.moves.swap_in, self.host_caches, self.caches),
        ):
            if not pairs:
                continue
            source_blocks, destination_blocks = torch.tensor(pairs, dtype=torch.int64).unbind(1)
            for source, destination in zip(sources, destinations, strict=True):
                destination.key[destination_blocks] = source.key[source_blocks]
                destination.value[destination_blocks] = source.value[source_blocks]

    def _update_tables(self, plan: StepPlan) -> None:
        self.table.update(plan)
        for admission in plan.admissions:
            self.sampling.admit(admission)
            self._wants_prompt_logprobs.pop(admission.row, None)
            has_output = len(admission.token_ids) > admission.num_prompt_tokens
            if admission.params.prompt_logprobs is not None and not has_output:
                self._wants_prompt_logprobs[admission.row] = admission.params.prompt_logprobs

    def _sample(self, logits: Tensor, best: Tensor) -> StepResult:
        """Draw the plan's samples and append the first of each row to the row's tokens."""
        samples = self.table.samples
        if not len(samples.rows):
            return StepResult(tokens=[])
        settings = self.sampling.build(samples.rows, samples.forks, samples.lengths, self.table.tokens)
        tokens, logprobs, errors = self.sampler.sample(logits, best, settings)
        self.table.append(samples, tokens)
        self.sampling.advance(samples.rows, samples.forks, tokens)
        return StepResult(
            tokens.tolist(), logprobs, errors={int(samples.rows[n]): message for n, message in errors.items()}
        )

    def _prompt_logprobs(self, plan: StepPlan, batch: StepBatch) -> dict[int, list[TokenLogprobs]]:
        """By row that asks for them: the log-probabilities of the prompt tokens that this step's tokens predict."""
        found: dict[int, list[TokenLogprobs]] = {}
        if not self._wants_prompt_logprobs:
            return found
        starts = batch.query_start_loc.tolist()
        for s, row in enumerate(plan.rows):
            settings = self.sampling.settings[row]
            if row not in self._wants_prompt_logprobs or settings is None:
                continue
            computed = plan.num_computed[s]
            end = min(computed + plan.num_tokens[s], settings.num_prompt_tokens - 1)
            entries = found[row] = []
            for position in range(computed, end, _PROMPT_LOGPROB_ROWS):
                count = min(_PROMPT_LOGPROB_ROWS, end - position)
                first = starts[s] + position - computed
                predicted = self.table.tokens[row, position + 1 : position + 1 + count].astype(np.int64)
                entries += token_logprobs(
                    self.graph.logits_of(first, count), predicted, np.full(count, self._wants_prompt_logprobs[row])
                )
        return found
