"""A worker: one device, which holds (its share of) a model and a KV cache, and the runner that drives both.

What memory is left for the cache is measured, not guessed: where a device has memory of its own, the step that takes
the most of it is run once the weights are there. Then the steps that are worth it are captured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from threading import Thread
from typing import cast

import numpy as np

from octavo.config import EngineArgs, EngineConfig
from octavo.execution import capacity
from octavo.execution.block_mover import BlockMover, block_bytes, layer_cache
from octavo.execution.device import Device
from octavo.execution.runner import Runner
from octavo.execution.sequence_table import SequenceTable
from octavo.kv_cache.groups import NULL_BLOCK, LayerCacheSpec, group_layers
from octavo.layers.attention import AttentionDescription
from octavo.loading.file_weights import open_weights
from octavo.loading.memory import check_fits
from octavo.loading.recording import RecordingWeights
from octavo.loading.weights import Weights
from octavo.models.description import ModelDescription
from octavo.models.inventory import record
from octavo.models.registry import Model, build, describe
from octavo.ops import DeviceOps, LayerKVCache, Ops
from octavo.phases import Phases
from octavo.sampling.grammar_masks import GrammarCompiler

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class Worker:
    """Loads, sizes and captures. `phases` is told how long each took."""

    def __init__(self, config: EngineConfig, device: Device, ops: Ops, phases: Phases) -> None:
        self._config, self._device, self._ops = config, device, ops
        model_config, limits = config.model, config.scheduler
        checkpoint = model_config.checkpoint
        description = describe(checkpoint.config, model_config.impl, model_config.code_folder)
        ops = self._with_attention(description, phases)
        weights = open_weights(
            checkpoint, model_config.dtype, model_config.seed, model_config.quantization,
            description.tie_word_embeddings,
        )  # fmt: skip
        self._check_fits(description, weights)
        phases.end("weights opened")
        compiling = self._compile_ahead(description, weights, ops)
        model = build(description, weights, ops, model_config.max_model_len, model_config.dtype)
        weights.check_all_taken()
        weights.close()
        phases.end("weights packed")
        if compiling is not None:
            compiling.join()
            phases.end("kernels compiled")
        self.weight_bytes = model.num_weight_bytes()
        self.groups = group_layers(model.layer_caches)
        self.grammars = GrammarCompiler(checkpoint, model.vocab_size)
        table = SequenceTable(limits.max_num_seqs, model_config.max_model_len, config.cache.block_size, self.groups)
        self.runner = Runner(model, ops, device, table, limits.max_num_batched_tokens, self.grammars)
        self._allocate(phases)
        if not device.shares_memory:
            self.runner.warm_up()
            phases.end("kernels launched")
        if self._captures(model):
            self.runner.capture()
        phases.end("program")
        logger.info(
            "%s on %s: %d layers, %s, %.2f GiB of weights, loaded in %.2f s",
            checkpoint.name, device.name, len(description.layers), model_config.dtype, self.weight_bytes / _GIB,
            phases.seconds["weights opened"] + phases.seconds["weights packed"],
        )  # fmt: skip

    def _check_fits(self, description: ModelDescription, weights: Weights) -> None:
        """Raise `LoadError` if the model's weights exceed the memory that is free."""
        recorded = RecordingWeights(self._config.model.dtype, weights)
        record(description, recorded)
        needed, kinds = recorded.packed_bytes()
        free = self._device.free_bytes()
        logger.debug("device %s: %.1f GiB free", self._device.name, free / _GIB)
        check_fits(needed, kinds, free)

    def _with_attention(self, description: ModelDescription, phases: Phases) -> Ops:
        """The operations, with the attention that is chosen for this model and device."""
        if self._config.device != "cuda":
            return self._ops
        from octavo.ops.attention_choice import AttentionShape, with_attention

        config = self._config
        layers = [layer.attention for layer in description.layers]
        attentions = [attention for attention in layers if isinstance(attention, AttentionDescription)]
        if not attentions:
            return self._ops
        attention = attentions[0]
        shape = AttentionShape(
            attention.num_heads, attention.num_kv_heads, attention.head_size, config.cache.block_size,
            attention.window, config.model.dtype, config.cache.dtype,
            score_settings=tuple({s: None for one in attentions for s in one.score_settings}),
        )  # fmt: skip
        ops = with_attention(cast(DeviceOps, self._ops), config.attention_backend, shape, self._device.time_s)
        phases.end("attention chosen")
        return ops

    def _compile_ahead(self, description: ModelDescription, weights: Weights, ops: Ops) -> Thread | None:
        """Start to compile what steps are going to launch, beside the loading of weights, where kernels are compiled at
        all. Nothing must be launched until it is done."""
        if self._config.device != "cuda" or description.impl != "octavo":
            return None  # the networks of transformers need memory
        from octavo.execution.rehearsal import rehearse

        thread = Thread(target=rehearse, args=(self._config, description, weights, ops), name="compile", daemon=True)
        thread.start()
        return thread

    def _captures(self, model: Model) -> bool:
        return model.is_recordable and not self._config.enforce_eager

    def _allocate(self, phases: Phases) -> None:
        """Size the cache and allocate it."""
        config, device = self._config, self._device
        small = self._caches([1] * capacity.num_pools(self.groups))
        sizes = [sum(block_bytes(cache) for cache in of_pool) for of_pool in small]
        self._use(small, [0] * len(small))
        captured_bytes = self.runner.captured_bytes if self._captures(self.runner.model) else 0
        budget, source = device.cache_bytes(config.cache, self.runner.run_largest_step, captured_bytes)
        del small
        config = capacity.shortened(config, self.groups, sizes, budget)
        self.max_model_len = config.model.max_model_len
        self.num_blocks = capacity.num_blocks(config, self.groups, sizes, budget, source)
        self.cache_bytes = sum(n * size for n, size in zip(self.num_blocks, sizes, strict=True))
        on_host = self.cache_bytes if device.shares_memory else 0
        self.num_host_blocks = capacity.num_host_blocks(config, self.num_blocks, sizes, on_host)
        self._use(self._caches(self.num_blocks), self.num_host_blocks)
        phases.end("KV cache")
        capacity.log_capacity(config, self.groups, self.cache_bytes, self.num_blocks, self.num_host_blocks)
        if device.shares_memory and config.cache.gpu_memory_utilization != EngineArgs.gpu_memory_utilization:
            logger.warning(
                "--gpu-memory-utilization is for GPUs; on CPU --cpu-memory-utilization (%s) sizes the KV cache.",
                config.cache.cpu_memory_utilization,
            )

    def _caches(self, num_blocks: Sequence[int]) -> list[list[LayerKVCache]]:
        """By pool: memory for as many layers as its largest group has. The layers of its groups share it."""
        caches = []
        for pool, count in enumerate(num_blocks):
            groups = [group for group in self.groups if group.pool == pool]
            num_layers = max(len(group.layers) for group in groups)
            caches.append([self._layer_cache(groups[0].spec, count) for _ in range(num_layers)])
        return caches

    def _layer_cache(self, spec: LayerCacheSpec, num_blocks: int) -> LayerKVCache:
        return layer_cache(self._config.cache, self._device, self._ops, spec, num_blocks)

    def _use(self, caches: list[list[LayerKVCache]], num_host_blocks: Sequence[int]) -> None:
        by_layer: dict[int, LayerKVCache] = {}
        for group in self.groups:
            by_layer.update(zip(group.layers, caches[group.pool], strict=False))
        for pool, of_pool in enumerate(caches):  # what masked attention reads of the null block must be numbers
            if any(group.pool == pool and group.spec.kind == "window" for group in self.groups):
                zeros = self._device.zeros([1, sum(block_bytes(cache) for cache in of_pool)], "uint8")
                self._device.compute.run(partial(self._ops.scatter_blocks, zeros, np.array([NULL_BLOCK]), of_pool))
        mover = BlockMover(self._ops, self._device, caches, num_host_blocks)
        self.runner.use_caches([by_layer[layer] for layer in sorted(by_layer)], mover)
