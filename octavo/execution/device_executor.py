"""The executor of a device that computes on its own: weights on the device, a KV cache of the memory that is left.

What is left is measured, not guessed: once the weights are there, the step that takes the most memory is run, and the
cache gets the rest of `--gpu-memory-utilization`. Then the decode steps are captured.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from importlib import import_module
from typing import cast

import torch

from octavo.config import EngineConfig
from octavo.execution import capacity
from octavo.execution.block_mover import BlockMover
from octavo.execution.device import Device
from octavo.execution.device_runner import DeviceRunner, DeviceStep, graph_sizes
from octavo.execution.step_batch import SequenceTable
from octavo.loading.placed_weights import PlacedWeights
from octavo.loading.weights import check_fits, open_weights
from octavo.models.decoder import Decoder
from octavo.models.decoder_config import DecoderConfig
from octavo.ops import DeviceOps, LayerKVCache
from octavo.ops.attention_choice import AttentionShape, with_attention
from octavo.phases import Phases
from octavo.plan import StepPlan
from octavo.sampling.structured import GrammarCompiler

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def load_ops() -> DeviceOps:
    """The CUDA backend."""
    return cast(DeviceOps, import_module("octavo.ops.cuda"))


class DeviceExecutor:
    """One device, this process."""

    runs_ahead = True

    def __init__(self, config: EngineConfig, device: Device, ops: DeviceOps) -> None:
        phases = Phases()
        checkpoint, quantization = config.model.checkpoint, config.model.quantization
        decoder = DecoderConfig.from_hf(checkpoint.config)
        dtype = getattr(torch, config.model.dtype)
        cache_dtype = getattr(torch, config.cache.dtype)
        phases.end("kernels")
        free, total = device.memory_bytes()
        check_fits(checkpoint, decoder, dtype, quantization, free)
        logger.info("device: %s, %.1f of %.1f GiB free", device.name, free / _GIB, total / _GIB)
        if device.torch_device.type == "cuda":
            shape = AttentionShape(
                decoder.num_heads, decoder.num_kv_heads, decoder.head_size, config.cache.block_size,
                decoder.sliding_window, dtype, cache_dtype, device.torch_device,
            )  # fmt: skip
            ops = with_attention(ops, config.attention_backend, shape, device.time_s)
            phases.end("attention chosen")
        weights = PlacedWeights(
            open_weights(checkpoint, dtype, config.model.seed, quantization, device.torch_device), device.torch_device
        )
        phases.end("weights opened")
        model = Decoder(decoder, weights, ops, config.model.max_model_len, dtype, device.torch_device)
        weights.check_all_taken()
        weights.close()
        phases.end("weights placed")
        self.weight_bytes = model.num_weight_bytes()
        table = SequenceTable(
            config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, config.model.max_model_len,
            config.cache.block_size,
        )  # fmt: skip
        self._grammars = GrammarCompiler(checkpoint, decoder.vocab_size)

        def allocate(num_blocks: int) -> list[LayerKVCache]:
            shape = (num_blocks, config.cache.block_size, decoder.num_kv_heads, decoder.head_size)
            return [ops.allocate_kv_cache(*shape, cache_dtype, device.torch_device) for _ in range(decoder.num_layers)]

        sizes = [] if config.enforce_eager else graph_sizes(config.scheduler.max_num_seqs)
        self.runner = DeviceRunner(model, ops, device, table, sizes, self._grammars)
        small = allocate(1)
        block_bytes = sum(cache.key.nbytes + cache.value.nbytes for cache in small)
        self.runner.use_caches(small, BlockMover(ops, device, small, 0))
        step_bytes = device.peak_bytes(self.runner.run_largest_step)
        del small
        phases.end("largest step")
        self.num_blocks = self._num_blocks(config, device, block_bytes, step_bytes, self.runner.graph_bytes)
        self.num_host_blocks = capacity.num_host_blocks(config, block_bytes, 0)
        self.cache_bytes = self.num_blocks * block_bytes
        caches = allocate(self.num_blocks)
        self.runner.use_caches(caches, BlockMover(ops, device, caches, self.num_host_blocks))
        phases.end("KV cache")
        self.runner.capture()
        phases.end("graphs")
        self.startup = phases.seconds
        logger.info(
            "%s: %d layers, %s, %.2f GiB of weights, placed in %.2f s; steps of up to %d decodes are captured",
            checkpoint.name, decoder.num_layers, config.model.dtype, self.weight_bytes / _GIB,
            phases.seconds["weights opened"] + phases.seconds["weights placed"], max(sizes, default=0),
        )  # fmt: skip
        capacity.log_capacity(config, block_bytes, self.num_blocks, self.num_host_blocks)

    @staticmethod
    def _num_blocks(config: EngineConfig, device: Device, block_bytes: int, step_bytes: int, graph_bytes: int) -> int:
        """What `--gpu-memory-utilization` leaves beside what anybody uses, the largest step and the graphs."""
        free, total = device.memory_bytes()
        share = config.cache.gpu_memory_utilization
        budget = int(total * share) - (total - free) - step_bytes - graph_bytes
        source = (
            f"--gpu-memory-utilization {share} of {total / _GIB:.2f} GiB, less {(total - free) / _GIB:.2f} GiB in use "
            f"and {(step_bytes + graph_bytes) / _GIB:.2f} GiB for the largest step and the graphs,"
        )
        return capacity.num_blocks(config, block_bytes, budget, source)

    def submit(self, plan: StepPlan) -> DeviceStep:
        return self.runner.submit(plan)

    def prepare_grammar(self, grammar: str, eos_token_ids: list[int]) -> Future[None]:
        return self._grammars.prepare(grammar, eos_token_ids)
