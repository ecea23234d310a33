"""The model's part of a step: from the gathered arrays to hidden states, then to logits or vectors. It is the same
whether a step runs call by call or is captured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from octavo.execution.device import Device, ModelOutputs
from octavo.execution.device_tables import DeviceTables
from octavo.execution.stage_links import StageLinks
from octavo.execution.step_arrays import StepArrays, StepLimits
from octavo.models.registry import CrossModel, Model, PoolingModel, StageModel
from octavo.ops import Array, DeviceOps, LayerKVCache, Ops
from octavo.step_batch import GroupTables, StepBatch

if TYPE_CHECKING:
    from octavo.lora.ops import AdaptedOps
    from octavo.models.draft_heads import AuxHiddenStates


class StepComputation:
    """A `StepModel` (`octavo.execution.device`) for steps within `limits`. `tables` are for devices with
    memory of their own, `adapters` for models that are served with adapters."""

    caches: Sequence[LayerKVCache]  # by layer; set before anything is computed

    def __init__(
        self, model: Model, ops: Ops, device: Device, limits: StepLimits, tables: DeviceTables | None,
        stage_links: StageLinks, adapters: AdaptedOps | None,
    ) -> None:  # fmt: skip
        self._model, self._ops, self._device, self._limits = model, ops, device, limits
        self._tables, self._stage_links, self._adapters = tables, stage_links, adapters
        self._hidden_in_dtype = cast(StageModel, model).residual_dtype if limits.hidden_in_bytes else ""
        self.aux_hidden_states: AuxHiddenStates | None = None  # for draft heads that read other layers than the last

    def hidden(self, inputs: StepArrays[Array]) -> tuple[Array, Array]:
        """`StepModel.hidden`."""
        with self._using_adapters(inputs.adapter_slots):
            hidden = self._model.forward(self._batch(inputs), self.caches)
        features = None if self.aux_hidden_states is None else self.aux_hidden_states.features
        return hidden, hidden if features is None else features

    def logits(self, inputs: StepArrays[Array], hidden: Array) -> tuple[Array, Array]:
        """`StepModel.logits`."""
        if self._stage_links.next is not None:
            return hidden, hidden  # placeholders: only the last stage computes logits
        if self._limits.pools:
            vectors = cast(PoolingModel, self._model).pool(hidden, inputs.pool_starts, inputs.sample_rows)
            return vectors, vectors
        with self._using_adapters(inputs.sample_adapter_slots):
            logits = self._model.logits(self._ops.take_rows(hidden, inputs.sample_rows))
        return logits, self._ops.argmax(logits)

    def logits_after(self, inputs: StepArrays[Array], hidden: Array, begin: int, end: int) -> Array:
        """Return the logits [end - begin, V] float32 after the tokens begin .. end of a step with these `hidden`
        states."""
        with self._using_adapters(inputs.adapter_slots[begin:end]):
            return self._model.logits(hidden[begin:end])

    def outputs(self, inputs: StepArrays[Array], num_samples: int) -> ModelOutputs:
        """Compute the whole step, call by call."""
        hidden, features = self.hidden(inputs)
        if not num_samples or self._stage_links.next is not None:
            return ModelOutputs(hidden, features, hidden[:0], hidden[:0])
        return ModelOutputs(hidden, features, *self.logits(inputs, hidden))

    def write_encoder_kv(
        self, rows: NDArray[Any], slots: NDArray[np.int64], adapter_slots: NDArray[np.int32] | None = None
    ) -> None:
        """Write the cross-attention keys and values of an encoder's output [N, H] into slots [N], with the adapters of
        slots [N]."""
        place, positions = self._ops.place, np.zeros(len(slots), np.int64)
        with nullcontext() if adapter_slots is None else self._using_adapters(place(adapter_slots)):
            cast(CrossModel, self._model).write_encoder_kv(place(rows), place(positions), place(slots), self.caches)

    def _batch(self, inputs: StepArrays[Array]) -> StepBatch:
        """Return the model's input. A device with its own tables adds the last tokens and block tables."""
        token_ids, tables = inputs.token_ids, inputs.block_tables
        if self._tables is not None:
            token_ids, tables = self._tables.resolve(self._ops, inputs)
            cast(DeviceOps, self._ops).begin_step(inputs.query_start_loc, inputs.seq_lens)
        return StepBatch(
            token_ids=token_ids,
            positions=inputs.positions,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            sample_rows=inputs.sample_rows,
            groups=tuple(GroupTables(inputs.slot_mapping[g], tables[g]) for g in range(self._limits.groups)),
            media_rows=inputs.media_rows if self._limits.largest.media else None,
            media_indices=inputs.media_indices if self._limits.largest.media else None,
            cross_lens=inputs.cross_lens,
            cross_mask=inputs.cross_mask,
            token_types=inputs.token_types,
            hidden_in=self._device.view(inputs.hidden_in, self._hidden_in_dtype)
            if self._limits.hidden_in_bytes
            else None,
            axis_positions=inputs.axis_positions if self._limits.axes else None,
            key_ends=inputs.key_ends if self._limits.sees_ahead else None,
        )

    def _using_adapters(self, slots: Array) -> AbstractContextManager[None]:
        """A context in which each row uses the adapter in its slot."""
        return nullcontext() if self._adapters is None or not len(slots) else self._adapters.taking(slots)
