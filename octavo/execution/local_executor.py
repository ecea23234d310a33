"""The executor of CPUs: the model runs on the processors of this machine, in the core's own process."""

from __future__ import annotations

import logging
from concurrent.futures import Future

import torch

from octavo import ops as ops_module
from octavo.config import EngineArgs, EngineConfig
from octavo.execution import capacity
from octavo.execution.executor import DoneStep
from octavo.execution.graph import EagerStep, StepGraph
from octavo.execution.model_runner import ModelRunner
from octavo.execution.step_batch import SequenceTable
from octavo.loading.weights import available_memory_bytes, check_fits, open_weights
from octavo.models.decoder import Decoder
from octavo.models.decoder_config import DecoderConfig
from octavo.ops import LayerKVCache
from octavo.phases import Phases
from octavo.plan import StepPlan
from octavo.sampling.sampler import Sampler
from octavo.sampling.structured import GrammarCompiler

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GIB = 1 << 30


class LocalExecutor:
    """The processors of this machine, in this process."""

    runs_ahead = False  # Python and kernels share the processors: there is nothing to overlap

    def __init__(self, config: EngineConfig) -> None:
        phases = Phases()
        decoder = DecoderConfig.from_hf(config.model.checkpoint.config)
        dtype = _DTYPES[config.model.dtype]
        block_size = config.cache.block_size
        ops = ops_module.load(config.cpu_threads, config.cpus)
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
            device = torch.device("cpu")
            shape = (num_blocks, block_size, decoder.num_kv_heads, decoder.head_size)
            return [
                ops.allocate_kv_cache(*shape, dtype, device) for _ in range(decoder.num_layers if num_blocks else 0)
            ]

        block_bytes = sum(cache.key.nbytes + cache.value.nbytes for cache in allocate(1))
        share, available = config.cache.cpu_memory_utilization, available_memory_bytes()
        source = f"--cpu-memory-utilization {share} of {available / _GIB:.2f} GiB free RAM"
        self.num_blocks = capacity.num_blocks(config, block_bytes, int(available * share), source)
        self.num_host_blocks = capacity.num_host_blocks(config, block_bytes, self.num_blocks * block_bytes)
        caches = allocate(self.num_blocks)
        self.cache_bytes = self.num_blocks * block_bytes
        table = SequenceTable(
            config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, config.model.max_model_len,
            block_size,
        )  # fmt: skip
        host_caches = allocate(self.num_host_blocks)
        phases.end("KV cache")
        self._grammars = GrammarCompiler(checkpoint, decoder.vocab_size)
        graph = EagerStep(model, ops, caches) if config.enforce_eager else StepGraph(model, ops, table, caches)
        self.runner = ModelRunner(graph, table, Sampler(ops), caches, host_caches, self._grammars)
        phases.end("program")
        self.startup = phases.seconds
        logger.info(
            "%s: %d layers, %s, %.2f GiB of packed weights, loaded in %.2f s",
            config.model.checkpoint.name, decoder.num_layers, config.model.dtype, self.weight_bytes / _GIB,
            phases.seconds["weights opened"] + phases.seconds["weights packed"],
        )  # fmt: skip
        capacity.log_capacity(config, block_bytes, self.num_blocks, self.num_host_blocks)
        if config.cache.gpu_memory_utilization != EngineArgs.gpu_memory_utilization:
            logger.warning(
                "--gpu-memory-utilization is for GPUs; on CPU --cpu-memory-utilization (%s) sizes the KV cache.",
                config.cache.cpu_memory_utilization,
            )

    def submit(self, plan: StepPlan) -> DoneStep:
        return DoneStep(self.runner.execute(plan))

    def prepare_grammar(self, grammar: str, eos_token_ids: list[int]) -> Future[None]:
        return self._grammars.prepare(grammar, eos_token_ids)
