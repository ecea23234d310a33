"""Executors stand between the engine core and the devices that run a model.

`LocalExecutor` runs it in the core's own process: it loads the weights, sizes the KV cache from the memory there is,
and executes plans. Executors over several devices will take the same calls and send the plan on.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo import ops as ops_module
from octavo.config import EngineArgs, EngineConfig
from octavo.errors import ConfigError
from octavo.execution.graph import StepGraph
from octavo.execution.model_runner import ModelRunner
from octavo.execution.step_batch import SequenceTable
from octavo.loading.weights import available_memory_bytes, check_fits, open_weights
from octavo.models.decoder import Decoder
from octavo.models.decoder_config import DecoderConfig
from octavo.ops import LayerKVCache
from octavo.phases import Phases
from octavo.sampling.sampler import Sampler
from octavo.sampling.structured import GrammarCompiler
from octavo.scheduling.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GIB = 1 << 30


class PendingStep(Protocol):
    """A step that was handed to a device."""

    def result(self) -> StepResult:
        """Wait until it has been computed."""
        ...


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that was computed while it was handed over."""

    done: StepResult

    def result(self) -> StepResult:
        return self.done


class Executor(Protocol):
    """What the engine core needs of whatever runs the model."""

    runs_ahead: bool  # a step may be submitted before the tokens of the last one are known
    num_blocks: int
    num_host_blocks: int
    weight_bytes: int  # of the packed matrices
    cache_bytes: int  # of the KV cache, used or not
    startup: dict[str, float]  # seconds by phase

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step; those submitted before it are computed first. Raises `DeviceMemoryError` if there is too little
        memory for it, with nothing lost but this step."""
        ...

    def prepare_grammar(self, grammar: str, eos_token_ids: list[int]) -> Future[None]:
        """Make ready to follow a grammar. Plans may admit sequences that have it when the future is done; it raises
        `RequestError` if the grammar cannot be followed."""
        ...


def create_executor(config: EngineConfig) -> Executor:
    """The executor of `config.device`. Raises `LoadError` or `ConfigError` when model or cache do not fit."""
    return LocalExecutor(config)


class LocalExecutor:
    """The processors of this machine, in this process."""

    runs_ahead = False  # Python and kernels share the processors: there is nothing to overlap

    def __init__(self, config: EngineConfig) -> None:
        phases = Phases()
        decoder = DecoderConfig.from_hf(config.model.checkpoint.config)
        dtype = _DTYPES[config.model.dtype]
        block_size = config.cache.block_size
        ops = ops_module.load(config.device, config.cpu_threads, config.cpus)
        checkpoint, quantization = config.model.checkpoint, config.model.quantization
        phases.end("kernels")
        check_fits(checkpoint, decoder, dtype, quantization)
        weights = open_weights(checkpoint, dtype, config.model.seed, quantization)
        phases.end("weights opened")
        model = Decoder(decoder, weights, ops, config.model.max_model_len, dtype)
        weights.check_all_taken()
        weights.close()
        phases.end("weights packed")
        self.weight_bytes = model.num_weight_bytes()

        def allocate(num_blocks: int) -> list[LayerKVCache]:
            device = torch.device(config.device)
            shape = (num_blocks, block_size, decoder.num_kv_heads, decoder.head_size)
            return [
                ops.allocate_kv_cache(*shape, dtype, device) for _ in range(decoder.num_layers if num_blocks else 0)
            ]

        block_bytes = sum(cache.key.nbytes + cache.value.nbytes for cache in allocate(1))
        self.num_blocks = _num_blocks(config, block_bytes)
        self.num_host_blocks = 0
        if config.scheduler.preemption_mode == "swap":
            self.num_host_blocks = _num_host_blocks(config, block_bytes, self.num_blocks)
        caches = allocate(self.num_blocks)
        self.cache_bytes = self.num_blocks * block_bytes
        table = SequenceTable(
            config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, config.model.max_model_len,
            block_size,
        )  # fmt: skip
        host_caches = allocate(self.num_host_blocks)
        phases.end("KV cache")
        self._grammars = GrammarCompiler(checkpoint, decoder.vocab_size)
        graph = StepGraph(model, ops, table, caches)
        self.runner = ModelRunner(graph, table, Sampler(ops), caches, host_caches, self._grammars)
        phases.end("program")
        self.startup = phases.seconds
        logger.info(
            "%s: %d layers, %s, %.2f GiB of packed weights, loaded in %.2f s",
            config.model.checkpoint.name, decoder.num_layers, config.model.dtype, self.weight_bytes / _GIB,
            phases.seconds["weights opened"] + phases.seconds["weights packed"],
        )  # fmt: skip
        self._log_capacity(config, block_bytes)

    def _log_capacity(self, config: EngineConfig, block_bytes: int) -> None:
        num_tokens = self.num_blocks * config.cache.block_size
        logger.info(
            "KV cache: %d blocks of %d tokens (%.2f GiB) hold %d tokens: %.1f requests of %d tokens at once%s",
            self.num_blocks, config.cache.block_size, self.num_blocks * block_bytes / _GIB, num_tokens,
            num_tokens / config.model.max_model_len, config.model.max_model_len,
            f"; {self.num_host_blocks} more blocks to swap to" if self.num_host_blocks else "",
        )  # fmt: skip
        if config.cache.gpu_memory_utilization != EngineArgs.gpu_memory_utilization:
            logger.warning(
                "--gpu-memory-utilization is for GPUs; on CPU --cpu-memory-utilization (%s) sizes the KV cache.",
                config.cache.cpu_memory_utilization,
            )

    def submit(self, plan: StepPlan) -> DoneStep:
        return DoneStep(self.runner.execute(plan))

    def prepare_grammar(self, grammar: str, eos_token_ids: list[int]) -> Future[None]:
        return self._grammars.prepare(grammar, eos_token_ids)


def _num_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks that the memory buys: no fewer than one longest request needs, no more than could ever be in use."""
    size = config.cache.block_size
    least = -(-config.model.max_model_len // size)
    if config.cache.num_blocks_override is not None:
        num_blocks = config.cache.num_blocks_override
        found = f"--num-gpu-blocks-override {num_blocks}"
    else:
        share = config.cache.cpu_memory_utilization
        available = available_memory_bytes()
        num_blocks = min(int(available * share) // block_bytes, least * config.scheduler.max_num_seqs)
        found = (
            f"--cpu-memory-utilization {share} of {available / _GIB:.2f} GiB free RAM buys {num_blocks} blocks, which"
        )
    if num_blocks < least:
        raise ConfigError(
            f"{found} holds {num_blocks * size} tokens, less than one request of --max-model-len "
            f"{config.model.max_model_len}; lower --max-model-len to at most {num_blocks * size}, or give more memory."
        )
    return num_blocks


def _num_host_blocks(config: EngineConfig, block_bytes: int, num_blocks: int) -> int:
    """Blocks of the swap tier. On CPU it shares the RAM with the KV cache itself."""
    available = available_memory_bytes()
    wanted = config.cache.swap_space_bytes + num_blocks * block_bytes
    if wanted > available:
        raise ConfigError(
            f"--swap-space {config.cache.swap_space_bytes / _GIB:g} GiB and {num_blocks * block_bytes / _GIB:.2f} GiB "
            f"of KV cache are more than the {available / _GIB:.2f} GiB of free RAM; lower one of them."
        )
    return config.cache.swap_space_bytes // block_bytes
