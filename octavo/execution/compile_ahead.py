"""Compiles a model's kernels while its weights are loaded.

One worker of each host runs `compile_ahead` in a thread, for the first worker of each of the host's stages: the others
launch the same kernels. It builds the model, and a draft model or head, a second time with arrays that have no memory
(`octavo.ops.triton.outline`), and runs the warm-up steps on a device without memory. So the same code decides what is
compiled and what is launched."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Thread
from typing import Any, cast

import torch
from numpy.typing import NDArray

from octavo.config import CacheConfig, EngineConfig
from octavo.errors import ConfigError
from octavo.execution.adapter_store import AdapterStore
from octavo.execution.block_mover import BlockMover, layer_cache
from octavo.execution.cpu_device import HostMemory, InlineStream
from octavo.execution.cross_outputs import CrossOutputs
from octavo.execution.device import CapturedStep, Event, StepModel
from octavo.execution.draft_model import Draft, build_head
from octavo.execution.dummy_steps import DummySteps
from octavo.execution.media_table import MediaTable
from octavo.execution.runner import Runner, RunnerAdapters
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.stage_links import Link, StageLinks
from octavo.execution.step_arrays import StepArrays, StepLimits, StepShape
from octavo.execution.worker_group import WorkerGroup
from octavo.kv_cache.groups import group_layers
from octavo.layers.tensor_parallel import WHOLE, Shard
from octavo.loading.file_weights import open_weights
from octavo.loading.recording import RecordingWeights
from octavo.loading.weights import Weights
from octavo.lora.ops import AdaptedOps
from octavo.models.description import ModelDescription
from octavo.models.draft_heads import MedusaHeads
from octavo.models.inventory import adaptable_modules
from octavo.models.registry import Model, build, describe
from octavo.models.sharding import with_shard, with_stage
from octavo.multimodal.tower import ReceivedRows
from octavo.ops import AdapterOps, Array, Ops
from octavo.speculative_config import HEAD_METHODS

logger = logging.getLogger(__name__)

_ROTARY_POSITIONS = 1  # length of the table; no kernel depends on it


def start_compile_ahead(
    config: EngineConfig, description: ModelDescription, weights: Weights, ops: Ops, stages: range
) -> Thread:
    """Start a thread that runs `compile_ahead`, for the caller's device."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    thread = Thread(
        target=compile_ahead, args=(config, description, weights, ops, stages, device), name="compile", daemon=True
    )  # fmt: skip
    thread.start()
    return thread


def compile_ahead(
    config: EngineConfig, description: ModelDescription, weights: Weights, ops: Ops, stages: range,
    device: int | None = None,
) -> None:  # fmt: skip
    """Compile the kernels that `DummySteps.warm_up` will launch in `stages`. Kernels that fail here are compiled, or
    fail, when they are launched."""
    from octavo.ops.triton.outline import compiling

    begun = time.monotonic()
    if device is not None:  # compiled kernels are kept by device
        torch.cuda.set_device(device)
    try:
        with compiling(len(os.sched_getaffinity(0))):
            _warm_up_stages(config, description, weights, ops, stages)
    except Exception as e:  # missing kernels are compiled when they are launched
        logger.info("kernels are compiled as they are launched (%s: %s)", type(e).__name__, str(e).splitlines()[:1])
        return
    logger.debug("kernels compiled in %.1f s beside the loading of weights", time.monotonic() - begun)


def compile_model(config: EngineConfig) -> None:
    """Compile the kernels that a start with `config` would launch, for Triton's current device."""
    from octavo.ops import load_cuda
    from octavo.ops.cuda_collectives import absent_group
    from octavo.ops.triton.outline import compiling

    model = config.model
    checkpoint = model.checkpoint
    description = describe(checkpoint.config, model.impl, model.code_folder, model.pooling)
    if description.impl != "octavo":
        raise ConfigError(f"{checkpoint.name} runs through transformers: none of its kernels can be compiled before.")
    size = config.tensor_parallel_size
    description = with_shard(
        replace(description, num_precise_layers=model.num_precise_layers), Shard(0, size),
        config.enable_expert_parallel, config.reproducible_parallel,
    )  # fmt: skip
    weights = open_weights(
        checkpoint, model.dtype, model.seed, model.quantization, description.tie_word_embeddings
    )  # fmt: skip
    try:
        with compiling(len(os.sched_getaffinity(0))), absent_group(size):
            _warm_up_stages(config, description, weights, load_cuda(), range(config.pipeline_parallel_size))
    finally:
        weights.close()


def _warm_up_stages(
    config: EngineConfig, description: ModelDescription, weights: Weights, ops: Ops, stages: range
) -> None:
    for runner in outline_runners(config, description, weights, ops, stages):
        DummySteps(runner).warm_up()


def outline_runners(
    config: EngineConfig, description: ModelDescription, weights: Weights | None, ops: Ops, stages: range
) -> Iterator[Runner]:
    """Yield the runner of the first worker of each of `stages`, and after the last stage's runner a draft model's; the
    calling thread must be outlining. `description` may describe one stage."""
    layers = config.stages(description)
    for stage in stages:
        runner = _outline_runner(config, with_stage(description, layers[stage]), weights, ops)
        is_drafted = config.draft is not None and stage == len(layers) - 1
        draft = _outline_draft(config, runner, ops) if is_drafted else None
        yield runner
        if draft is not None:
            yield draft


class _OutlineGroup(WorkerGroup):
    """The group of a stage's first worker. No step uses its links."""

    def __init__(self, stage: ModelDescription) -> None:
        link = cast(Link, self)
        self.stage_links = StageLinks(None if stage.is_first_stage else link, None if stage.is_last_stage else link)


def _outline_runner(config: EngineConfig, description: ModelDescription, weights: Weights | None, ops: Ops) -> Runner:
    limits, device = config.scheduler, OutlineDevice()
    recorded = RecordingWeights(config.model.dtype, weights)
    adapted = None if config.lora is None else AdaptedOps(cast(AdapterOps, ops))
    model_ops = ops if adapted is None else adapted.as_ops()
    model = build(description, recorded, model_ops, _ROTARY_POSITIONS, config.model.dtype)
    groups = group_layers(model.layer_caches)
    table = SequenceTable(limits.max_num_seqs, config.model.max_model_len, config.cache.block_size, groups)
    media = cross = adapters = None
    if description.num_cross_tokens:
        cross = CrossOutputs(
            ReceivedRows(), groups, config.cache.block_size, config.model.dtype, limits.max_num_seqs,
            limits.max_num_batched_tokens,
        )  # fmt: skip
    elif config.media is not None or config.prompt_embeds is not None:
        media = MediaTable(ReceivedRows(), description, limits.max_num_seqs)
    if adapted is not None:
        others = adaptable_modules(description)
        adapters = RunnerAdapters(adapted, AdapterStore(model.matrices, adapted, config, device, others=others))
    runner = Runner(
        model, ops, device, table, limits.max_num_batched_tokens, pooling=config.model.pooling, media_table=media,
        cross_outputs=cross, adapters=adapters, worker_group=_OutlineGroup(description),
    )  # fmt: skip
    own = description.cache_indices(description.stage)
    caches = [layer_cache(config.cache, device, ops, model.layer_caches[i], 1) for i in own]
    runner.use_caches(caches, BlockMover(ops, device, [caches], [0]))
    return runner


def _outline_draft(config: EngineConfig, target: Runner, ops: Ops) -> Runner | None:
    """Build the draft model or head, whose kernels the runner of `target` launches too. Return the draft's own runner;
    None if it has none."""
    assert config.draft is not None
    assert config.speculative is not None
    own, device = config.draft, OutlineDevice()
    model: Model | MedusaHeads
    if config.speculative.method in HEAD_METHODS:
        model = build_head(config, own, target.model, ops, config.speculative.num_speculative_tokens, is_outline=True)
    else:
        description = describe(own.checkpoint.config, own.impl, own.code_folder, own.pooling)
        if description.impl != "octavo":
            return None  # its kernels are compiled when they are launched
        description = with_shard(
            replace(description, num_precise_layers=own.num_precise_layers), WHOLE, config.enable_expert_parallel,
            config.reproducible_parallel,
        )  # fmt: skip
        weights = open_weights(
            own.checkpoint, own.dtype, own.seed, own.quantization, description.tie_word_embeddings
        )  # fmt: skip
        model = build(description, RecordingWeights(own.dtype, weights), ops, _ROTARY_POSITIONS, own.dtype)
        weights.close()
    draft = Draft(config, own, model, target, group_layers(target.model.layer_caches), ops, device)
    draft.use_caches([layer_cache(config.cache, device, ops, spec, 1) for spec in draft.layer_caches], 1, 0)
    return draft.runner


class _Now(InlineStream):
    def run(
        self, work: Callable[[], None], reads: Sequence[NDArray[Any]] = (), writes: Sequence[NDArray[Any]] = ()
    ) -> None:
        with torch.inference_mode():
            work()


class OutlineDevice(HostMemory):
    """A device without memory that computes nothing."""

    name = hardware = "an outline"
    shares_memory = False

    def __init__(self) -> None:
        self.compute = self.copies = _Now()

    def free_bytes(self) -> int:
        return 0

    def cache_bytes(self, config: CacheConfig, step: Callable[[], None], other_bytes: int) -> tuple[int, str]:
        return 0, self.name

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")

    def upload_target(self, pinned: NDArray[Any]) -> Any:
        return self.zeros(pinned.shape, pinned.dtype.name)

    def as_input(self, array: Any) -> Any:
        return array

    def view(self, array: Any, dtype: str) -> Any:
        return array.view(getattr(torch, dtype))

    def copy(self, source: Any, target: Any) -> None:
        """Do nothing: there is no memory."""

    def capture_shapes(self, limits: StepLimits) -> list[StepShape]:
        return []

    def can_replay(self, captured: StepShape, used: StepShape) -> bool:
        return False

    def capture(self, model: StepModel, inputs: StepArrays[Array]) -> CapturedStep:
        raise NotImplementedError

    def fetch(self, arrays: Sequence[Array], after: Event) -> list[NDArray[Any]]:
        raise NotImplementedError
