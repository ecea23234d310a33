"""A worker: one device with a model, or a shard of it, a KV cache, and the runner that drives both.

The memory left for the cache is measured: on a device with memory of its own, the largest step is run once the weights
are loaded. Then steps are captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import mul
from threading import Thread
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineArgs, EngineConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.execution import capacity
from octavo.execution.block_mover import BlockMover, block_bytes, layer_cache, staging_bytes
from octavo.execution.cross_outputs import CrossOutputs
from octavo.execution.device import Device
from octavo.execution.dummy_steps import DummySteps
from octavo.execution.media_table import MediaRows, MediaTable
from octavo.execution.runner import Runner, RunnerAdapters
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.stage_links import WorkerRank
from octavo.execution.submitted_step import SubmittedStep
from octavo.execution.worker_group import ALONE, WorkerGroup
from octavo.execution.worker_messages import Offer, Sizes
from octavo.kv_cache.groups import NULL_BLOCK, LayerCacheSpec, group_layers
from octavo.loading.file_weights import open_weights
from octavo.loading.memory import check_fits
from octavo.loading.recording import RecordingWeights
from octavo.loading.weights import Weights
from octavo.models.description import ModelDescription
from octavo.models.inventory import adaptable_modules, record
from octavo.models.registry import Model, StageModel, build, describe
from octavo.models.sharding import with_shard, with_stage
from octavo.ops import AdapterOps, Array, LayerKVCache, Ops
from octavo.phases import Phases
from octavo.request import MediaInput
from octavo.speculative.synthetic import SyntheticAcceptance
from octavo.speculative_config import HEAD_METHODS
from octavo.step_plan import BlockMoves, StepPlan
from octavo.structured_output.grammar_matching import GrammarCompiler

if TYPE_CHECKING:
    from octavo.execution.adapter_store import AdapterStore
    from octavo.execution.draft_model import Draft
    from octavo.execution.drafting_runner import DraftedStep, DraftingRunner
    from octavo.lora.ops import AdaptedOps
    from octavo.models.draft_heads import MedusaHeads
    from octavo.multimodal.tower import ReceivedRows, TowerCache

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class Worker:
    """Loads a model, sizes its cache and captures its steps. `phases` records how long each takes."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        ops: Ops,
        phases: Phases,
        worker_group: WorkerGroup = ALONE,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        self._config, self._device, self._ops, self._worker_group = config, device, ops, worker_group
        model_config, limits = config.model, config.scheduler
        description, weights = self._open(model_config, phases, worker_group.worker_rank)
        self._description, self._own_layers = description, description.cache_indices(description.stage)
        weights.on_taken = on_loading
        compiling = self._compile_ahead(description, weights, ops)
        adapted = self._with_adapters(ops)
        model = self._load(description, weights, ops if adapted is None else adapted.as_ops(), phases)
        self._wait_for_kernels(compiling, phases)
        self.weight_bytes = model.num_weight_bytes()
        self.groups = group_layers(model.layer_caches)
        self.grammars = GrammarCompiler(model_config.checkpoint, model.vocab_size)
        self.adapters: AdapterStore | None = None
        runner_adapters = None if adapted is None else self._make_adapter_store(model, adapted, phases)
        self.tower_cache: TowerCache | None = None
        self._largest_media: Callable[[], list[MediaInput]]  # the largest media that the tower may get
        self._received: ReceivedRows | None = None
        self._media_table: MediaTable | None = None
        self._make_tower(phases)
        self._make_encoder(phases)
        self._take_prompt_embeds()
        self._cross = self._make_cross_outputs()
        self.runner = Runner(
            model, ops, device,
            SequenceTable(limits.max_num_seqs, model_config.max_model_len, config.cache.block_size, self.groups),
            limits.max_num_batched_tokens, self.grammars, runner_adapters,
            model_config.pooling, worker_group, self._media_table, self._cross,
        )  # fmt: skip
        self._draft: Draft | None = None
        self._drafting: DraftingRunner | None = None
        if config.draft is not None and worker_group.is_leader:  # the other workers get its draft tokens
            self._draft = self._load_draft(config.draft, phases)
        self.submit: Callable[[StepPlan], SubmittedStep | DraftedStep] = self.runner.submit
        self._set_synthetic_acceptance(model.vocab_size)
        self._allocate(phases)
        self._capture(phases)
        self._log_loaded(phases)

    def _load(self, description: ModelDescription, weights: Weights, ops: Ops, phases: Phases) -> Model:
        """Build the model. It must use every tensor of the checkpoint."""
        config, worker_group = self._config.model, self._worker_group
        model = build(description, weights, ops, config.max_model_len, config.dtype)
        weights.check_all_taken()
        weights.close()
        if worker_group.worker_rank.num_stages > 1:
            _agree_on_stream(cast(StageModel, model), config.dtype, worker_group)
        phases.end("weights packed")
        return model

    def _wait_for_kernels(self, compiling: Thread | None, phases: Phases) -> None:
        """Return when the kernels are compiled; other workers use those that the first one has compiled."""
        if compiling is not None:
            compiling.join()
            phases.end("kernels compiled")
        if self._config.device == "cuda":
            self._worker_group.largest(0)

    def _make_adapter_store(self, model: Model, adapted: AdaptedOps, phases: Phases) -> RunnerAdapters:
        from octavo.execution.adapter_store import AdapterStore

        self.adapters = AdapterStore(
            model.matrices, adapted, self._config, self._device, self._worker_group,
            adaptable_modules(self._description),
        )  # fmt: skip
        phases.end("adapter memory")
        return RunnerAdapters(adapted, self.adapters)

    @property
    def _tower_device(self) -> tuple[str, str]:
        """Return the device and the type in which towers compute."""
        if self._config.device != "cuda":
            return "cpu", "float32"  # CPUs compute fastest in float32
        # The device's number is needed: towers compute in threads, whose default is device 0.
        return f"cuda:{self._worker_group.worker_rank.on_host.rank}", self._config.model.dtype

    def _make_tower(self, phases: Phases) -> None:
        """Make the tower of a model that takes media, on the first worker; the others receive its rows."""
        if (media := self._config.media) is None:
            return
        from octavo.multimodal.tower import ReceivedRows, Tower, TowerCache

        description, worker_group = self._description, self._worker_group
        rows: MediaRows
        if worker_group.is_leader:
            from octavo.multimodal.model_processor import MediaProcessor

            tower = Tower(media.folder, media.kind, media.row_multiplier, *self._tower_device)
            rows = self.tower_cache = TowerCache(tower, media.cache_tokens)
            if worker_group.worker_rank.num_stages > 1:
                # With stages, a step may be computed after its requests have ended, when their rows would be forgotten.
                rows = self._received = ReceivedRows()
            most_rows = description.num_cross_tokens or self._config.model.max_model_len
            self._largest_media = lambda: MediaProcessor(media).largest(most_rows)
        else:
            rows = self._received = ReceivedRows()
        if not description.num_cross_tokens:
            self._media_table = MediaTable(rows, description, self._config.scheduler.max_num_seqs)
        phases.end("tower")

    def _make_encoder(self, phases: Phases) -> None:
        """Make the encoder of a model that takes speech, on the first worker; the others receive its rows."""
        if (sound := self._config.sound) is None:
            return
        from octavo.multimodal.tower import ReceivedRows, TowerCache

        if not self._worker_group.is_leader:
            self._received = ReceivedRows()
            return
        from octavo.multimodal.speech_encoder import SpeechEncoder

        encoder = SpeechEncoder(sound.folder, *self._tower_device)
        self.tower_cache = TowerCache(encoder, sound.cache_tokens)
        self._largest_media = lambda: [encoder.example()]
        phases.end("encoder")

    def _take_prompt_embeds(self) -> None:
        """Make the table of rows for prompts that are embeddings: media without a tower."""
        if (embeds := self._config.prompt_embeds) is None:
            return
        from octavo.multimodal.tower import BroughtRows, ReceivedRows, TowerCache

        rows: MediaRows
        if self._worker_group.is_leader:
            rows = self.tower_cache = TowerCache(BroughtRows(embeds.multiplier), embeds.cache_tokens)
            self._largest_media = lambda: []
        if not self._worker_group.is_leader or self._worker_group.worker_rank.num_stages > 1:
            rows = self._received = ReceivedRows()
        self._media_table = MediaTable(rows, self._description, self._config.scheduler.max_num_seqs)

    def _make_cross_outputs(self) -> CrossOutputs | None:
        """Make the table of encoder outputs, for a model with cross attention; otherwise return None."""
        if not self._description.num_cross_tokens:
            return None
        rows: MediaRows | None = self._received or self.tower_cache
        if rows is None:  # --language-model-only: there is no tower, and there are no rows
            from octavo.multimodal.tower import ReceivedRows

            rows = ReceivedRows()
        limits = self._config.scheduler
        return CrossOutputs(
            rows, self.groups, self._config.cache.block_size, self._config.model.dtype, limits.max_num_seqs,
            limits.max_num_batched_tokens,
        )  # fmt: skip

    def _capture(self, phases: Phases) -> None:
        """Warm up and capture the steps of the model and of a draft model."""
        for runner in self._runners:
            if not self._device.shares_memory:
                DummySteps(runner).warm_up()
                phases.end("kernels launched")
            if self._captures(runner):
                runner.submitter.capture()
        phases.end("program")

    def _log_loaded(self, phases: Phases) -> None:
        config, description = self._config.model, self._description
        logger.info(
            "%s on %s: %d layers, %s, %.2f GiB of weights, loaded in %.2f s",
            config.checkpoint.name, self._device.name,
            len({description.checkpoint_layers[i] for i in description.stage}), config.dtype,
            self.weight_bytes / _GIB, phases.seconds["weights opened"] + phases.seconds["weights packed"],
        )  # fmt: skip

    def _open(self, config: ModelConfig, phases: Phases, worker_rank: WorkerRank) -> tuple[ModelDescription, Weights]:
        """Return a worker's part of a model: its description, and its weights. Checks that they fit in memory."""
        checkpoint = config.checkpoint
        description = describe(checkpoint.config, config.impl, config.code_folder, config.pooling)
        description = with_shard(
            replace(description, num_precise_layers=config.num_precise_layers),
            worker_rank.shard,
            self._config.enable_expert_parallel,
            self._config.reproducible_parallel,
        )
        if worker_rank.num_stages > 1:
            description = with_stage(description, self._config.stages(description)[worker_rank.stage])
        weights = open_weights(
            checkpoint, config.dtype, config.seed, config.quantization, description.tie_word_embeddings
        )
        self._check_fits(description, weights, config)
        phases.end("weights opened")
        return description, weights

    def _load_draft(self, own: ModelConfig, phases: Phases) -> Draft:
        from octavo.execution.draft_model import Draft, build_head, check_vocabulary

        config, target = self._config, self.runner
        assert config.speculative is not None
        model: Model | MedusaHeads
        ops = target.ops
        if config.speculative.method in HEAD_METHODS:
            model = build_head(config, own, target.model, ops, config.speculative.num_speculative_tokens)
        else:
            check_vocabulary(config.model, own)
            description, weights = self._open(own, phases, ALONE.worker_rank)  # drafts are never sharded
            model = build(description, weights, ops, config.model.max_model_len, own.dtype)
            weights.check_all_taken()
            weights.close()
        draft = Draft(config, own, model, target, self.groups, ops, self._device)
        # Medusa's heads are read once for all draft tokens of a step. Stages are read one after the other.
        num_tokens = config.speculative.num_speculative_tokens if config.speculative.method == "medusa" else 1
        draft_bytes = draft.num_weight_bytes / num_tokens
        model_bytes = self.weight_bytes * self._worker_group.worker_rank.num_stages
        if 2 * draft_bytes > model_bytes:
            logger.warning(
                "the draft model reads %.2f GiB of weights a token and the model %.2f GiB. A draft of more than half "
                "the model's size gains little: choose a smaller one, or a smaller format",
                draft_bytes / _GIB, model_bytes / _GIB,
            )  # fmt: skip
        self.weight_bytes += draft.num_weight_bytes
        phases.end("draft")
        return draft

    @property
    def _runners(self) -> list[Runner]:
        own = None if self._draft is None else self._draft.runner
        return [self.runner] if own is None else [self.runner, own]

    def _run_largest_step(self) -> None:
        for runner in self._runners:
            DummySteps(runner).run_largest()

    def _set_synthetic_acceptance(self, vocab_size: int) -> None:
        speculative = self._config.speculative
        rates = None if speculative is None else speculative.synthetic_acceptance_rates
        if rates is not None:
            logger.warning(
                "synthetic_acceptance_rates: draft tokens are accepted at these rates, and answers are WRONG"
            )
            self.runner.synthetic_acceptance = SyntheticAcceptance(rates, vocab_size)

    def _check_fits(self, description: ModelDescription, weights: Weights, config: ModelConfig) -> None:
        """Raise `LoadError` if the model's weights exceed the memory that is free."""
        recorded = RecordingWeights(config.dtype, weights)
        record(description, recorded)
        needed, kinds = recorded.packed_bytes(
            keeps_superblocks=self._config.device != "cuda", num_positions=config.max_model_len
        )
        free = self._device.free_bytes() // self._num_sharing
        logger.debug("device %s: %.1f GiB free", self._device.name, free / _GIB)
        check_fits(needed, kinds, free)

    @property
    def _num_sharing(self) -> int:
        """Return the number of workers that share this memory: all of the host's, or one if each device has its own."""
        return self._worker_group.worker_rank.on_host.size if self._device.shares_memory else 1

    def _compile_ahead(self, description: ModelDescription, weights: Weights, ops: Ops) -> Thread | None:
        """Start to compile the steps' kernels while weights are loaded, on devices that compile kernels. Nothing may be
        launched until it is done."""
        compiles = self._config.device == "cuda" and self._worker_group.worker_rank.compiles
        if not compiles or description.impl != "octavo":  # transformers' models need memory to run
            return None
        from octavo.execution.compile_ahead import start_compile_ahead

        stages = self._worker_group.worker_rank.stages_of_node
        return start_compile_ahead(self._config, description, weights, ops, stages)

    def _with_adapters(self, ops: Ops) -> AdaptedOps | None:
        """Return the operations to build the model with if adapters are served."""
        if self._config.lora is None:
            return None
        from octavo.lora.ops import AdaptedOps

        return AdaptedOps(cast(AdapterOps, ops))

    def _captures(self, runner: Runner) -> bool:
        speculative, is_draft = self._config.speculative, runner is not self.runner
        may_capture = not (is_draft and speculative is not None and speculative.enforce_eager)
        return runner.model.is_recordable and may_capture and not self._config.enforce_eager

    def _cache_dtype(self, dtype: str) -> str:
        """Return the type of cached keys and values: `dtype`, the model's, unless --kv-cache-dtype says otherwise."""
        config = self._config
        return dtype if config.cache.dtype == config.model.dtype else config.cache.dtype

    def _allocate(self, phases: Phases) -> None:
        config, device = self._config, self._device
        # 1. Find the bytes of a block, by pool, from caches of one block, with which the largest step can run.
        small = self._caches([1] * capacity.num_pools(self.groups))
        own_sizes = [sum(map(block_bytes, of_pool)) for of_pool in small]
        sizes = own_sizes  # the first worker's sizes decide the number of blocks, because draft models share them
        if self._worker_group.worker_rank.num_stages > 1:
            sizes = [max(pair) for pair in zip(own_sizes, self._largest_blocks(), strict=True)]
        self._use_caches(small, [0] * len(small))
        # 2. Find the memory that the worker with the least has left.
        other_bytes = sum(runner.capture_memory_bytes for runner in self._runners if self._captures(runner))
        other_bytes += self._tower_bytes()
        if not device.shares_memory:
            other_bytes += sum(staging_bytes(size, capacity.host_bytes(config)) for size in own_sizes)
        if self._draft is not None and device.shares_memory:
            other_bytes += self._draft.state_bytes  # the draft's states count as in use before they are first written
        del small
        budget, source = self._worker_group.smallest(self._cache_offer(other_bytes))

        # 3. Choose the numbers of blocks, the same for all workers.
        def choose() -> Sizes:
            fitting = capacity.shortened(config, self.groups, sizes, budget)
            num_blocks = capacity.num_blocks(fitting, self.groups, sizes, budget, source)
            num_host_blocks = capacity.num_host_blocks(fitting, num_blocks, sizes)
            return Sizes(num_blocks, num_host_blocks, fitting.model.max_model_len)

        self.num_blocks, self.num_host_blocks, self.max_model_len = self._worker_group.agree(choose)
        # 4. Allocate the caches.
        self.cache_bytes = sum(map(mul, self.num_blocks, own_sizes))
        self.block_bytes = list(own_sizes)  # of a block that is read or written
        if self._draft is not None:
            self.block_bytes[self._draft.pool] += self._draft.num_note_bytes
        host_bytes, on_host = sum(map(mul, self.num_host_blocks, own_sizes)), self._worker_group.worker_rank.on_host
        capacity.check_host_memory(config, host_bytes, self.cache_bytes if device.shares_memory else 0, on_host.size)
        config = config.with_max_model_len(self.max_model_len)
        self._use_caches(self._caches(self.num_blocks), self.num_host_blocks)
        phases.end("KV cache")
        capacity.log_capacity(config, self.groups, self.cache_bytes, self.num_blocks, self.num_host_blocks)
        if device.shares_memory and config.cache.gpu_memory_utilization != EngineArgs.gpu_memory_utilization:
            logger.warning(
                "--gpu-memory-utilization is for GPUs; on CPU --cpu-memory-utilization (%s) sizes the KV cache.",
                config.cache.cpu_memory_utilization,
            )

    def _tower_bytes(self) -> int:
        """Return the device memory that a tower takes, beside its weights, for the largest medium."""
        tower = self.tower_cache
        if self._device.shares_memory or tower is None:
            return 0
        return max((self._device.peak_bytes(partial(tower.try_out, one)) for one in self._largest_media()), default=0)

    def _cache_offer(self, other_bytes: int) -> Offer:
        """Return the memory that this worker can give to its part of the cache, and what limits it."""
        config, device, size = self._config.cache, self._device, self._num_sharing
        wanted = config.memory_bytes
        if wanted is None:
            budget, source = device.cache_bytes(config, self._run_largest_step, other_bytes)
            return Offer(budget // size, source)
        free = device.free_bytes() // size
        if wanted > free:
            raise ConfigError(
                f"--kv-cache-memory-bytes asks for {wanted / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB ({free} bytes) "
                "are free beside the weights."
            )
        return Offer(wanted, f"--kv-cache-memory-bytes {wanted}")

    def _caches(self, num_blocks: Sequence[int]) -> list[list[LayerKVCache]]:
        """Allocate, by pool, memory for as many layers as the pool's largest group has in this stage; the layers of all
        its groups share it. Scratch memory is one layer's, which all share. The layers of a draft model with caches
        in the same blocks come last."""
        caches = []
        for pool, count in enumerate(num_blocks):
            spec = next(group.spec for group in self.groups if group.pool == pool)
            caches.append([self._layer_cache(spec, count) for _ in self._places_in(pool, self._own_layers)])
        if (draft := self._draft) is not None:
            dtype, count = self._cache_dtype(draft.dtype), num_blocks[draft.pool]
            caches[draft.pool] += [self._layer_cache(spec, count, dtype) for spec in draft.layer_caches]
        return caches

    def _places_in(self, pool: int, layers: range) -> list[int]:
        """Return which of a pool's memories, one for each layer of its largest group, the groups' `layers` use."""
        groups = [group for group in self.groups if group.pool == pool]
        found = {place for group in groups for place, layer in enumerate(group.layers) if layer in layers}
        return sorted(found)[:1] if self._config.cache.is_scratch else sorted(found)

    def _largest_blocks(self) -> list[int]:
        """Return, by pool, the bytes of a block in the stage that has the largest."""
        description, stages = self._description, self._config.stages(self._description)
        found = []
        for pool in range(capacity.num_pools(self.groups)):
            spec = next(group.spec for group in self.groups if group.pool == pool)
            most = max(len(self._places_in(pool, description.cache_indices(layers))) for layers in stages)
            found.append(most * block_bytes(self._layer_cache(spec, 1)))
        return found

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return the contents of blocks in the host's memory, [len(blocks), block_bytes[pool]]. On CPUs no step may be
        in flight."""
        if not self._device.shares_memory:
            contents = self._mover.read_host_blocks(pool, blocks)
        elif self._cache[pool]:
            contents = cast("NDArray[np.uint8]", self._ops.gather_blocks(np.array(blocks), self._cache[pool]))
        else:  # this stage has none of its layers
            contents = np.empty((len(blocks), 0), np.uint8)
        return contents if self._draft is None else self._draft.add_notes(pool, blocks, contents)

    def write_blocks(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> None:
        """Overwrite blocks in the host's memory. On CPUs no step may be in flight."""
        if not self._cache[pool]:
            return
        if self._draft is not None:
            contents = self._draft.take_notes(pool, blocks, contents)
        if self._device.shares_memory:
            self._ops.scatter_blocks(cast(Array, contents), np.array(blocks), self._cache[pool])
        else:
            self._mover.write_host_blocks(pool, blocks, contents)

    def waiting_steps_use(self, pool: int, blocks: Sequence[int]) -> bool:
        """Return whether a step whose drafts are made, but which waits for earlier stages, may use blocks in the host's
        memory. The moves of its plan were made here with the drafts; other workers of the stage still have to make
        them. On GPUs rows use no blocks of the host."""
        if self._drafting is None:
            return False
        of_host = not self._device.shares_memory
        if not self._worker_group.shard.is_whole and self._drafting.waiting_steps_move(pool, blocks, of_host):
            return True
        groups = [number for number, group in enumerate(self.groups) if group.pool == pool]
        return not of_host and self._drafting.waiting_steps_use(groups, blocks)

    def move_blocks(self, moves: Sequence[BlockMoves]) -> None:
        """Move blocks outside of a step, after all steps submitted before. What the device lacks memory for is moved
        with the next moves, or before the next step."""
        if self._draft is not None:
            self._draft.note_moves(moves)
        try:
            self._mover.move(moves)
        except self._device.memory_errors:
            self._device.release_memory()

    def is_settled(self, pool: int, blocks: Sequence[int], waits: bool) -> bool:
        """Return whether no move of host blocks is under way, or left for lack of memory. With `waits`, wait for moves
        under way."""
        return self._mover.is_settled(pool, blocks, waits)

    def take_rows(self, rows: Mapping[bytes, NDArray[np.float32]]) -> None:
        """Store the rows of the next plan's media, by content hash; they come from the first worker, which has the
        tower."""
        table = self._media_table or self._cross
        assert self._received is not None and table is not None, "this worker asks the tower"
        self._received.take(rows, table.content_hashes)

    def release_cache(self) -> None:
        """Give the memory of the cache and of the host tier back to the system, until it is written again."""
        if not self._device.shares_memory:
            raise NotImplementedError("the cache of a GPU is freed by ending the process that has it.")
        from octavo.ops.cpu_memory import release_pages

        cached = [array for of_pool in self._cache for layer in of_pool for array in layer.arrays]
        states = [] if self._draft is None else self._draft.state_arrays
        for array in (*cached, *states, *self._mover.host_arrays):
            release_pages(array)

    def _layer_cache(self, spec: LayerCacheSpec, num_blocks: int, dtype: str | None = None) -> LayerKVCache:
        config = self._config.cache
        config = config if dtype is None else replace(config, dtype=dtype)
        return layer_cache(config, self._device, self._ops, spec, num_blocks)

    def _use_caches(self, caches: list[list[LayerKVCache]], num_host_blocks: Sequence[int]) -> None:
        by_layer: dict[int, LayerKVCache] = {}
        own = self._own_layers
        for group in self.groups:
            of_pool, places = caches[group.pool], self._places_in(group.pool, own)
            is_scratch = self._config.cache.is_scratch
            for place, layer in enumerate(group.layers):
                if layer in own:
                    by_layer[layer] = of_pool[0 if is_scratch else places.index(place)]
        for pool, of_pool in enumerate(caches):  # masked attention reads the null block, so it must not hold NaN
            if any(group.pool == pool and group.spec.kind == "window" for group in self.groups):
                zeros = self._device.zeros([1, sum(block_bytes(cache) for cache in of_pool)], "uint8")
                self._device.compute.run(partial(self._ops.scatter_blocks, zeros, np.array([NULL_BLOCK]), of_pool))
        mover = BlockMover(self._ops, self._device, caches, num_host_blocks)
        self._cache, self._mover = caches, mover
        self.runner.use_caches([by_layer[layer] for layer in sorted(by_layer)], mover)
        if (draft := self._draft) is not None:
            from octavo.execution.drafting_runner import DraftingRunner

            in_pool = caches[draft.pool]
            of_draft = in_pool[len(in_pool) - len(draft.layer_caches) :]
            drafter = draft.use_caches(of_draft, in_pool[0].num_blocks, num_host_blocks[draft.pool])
            self._drafting = DraftingRunner(self.runner, drafter, self._worker_group)
            self.submit = self._drafting.submit


def _agree_on_stream(model: StageModel, dtype: str, worker_group: WorkerGroup) -> None:
    """Choose one type for the hidden states that stages pass on: float32 if all stages support it, otherwise the
    model's."""
    if worker_group.largest(int(model.residual_dtype != "float32")):
        model.residual_dtype = dtype
