"""The draft model or draft head of a worker: builds it, finds the cache group whose blocks it uses, and compares its
vocabulary with the target model's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig, ModelConfig
from octavo.errors import ConfigError, LoadError
from octavo.execution.block_mover import BlockMover, layer_cache
from octavo.execution.device import Device
from octavo.execution.draft_states import STATES_PER_ROW, DraftStates
from octavo.execution.drafting_runner import Drafter
from octavo.execution.filled_slots import FilledSlots
from octavo.execution.head_drafter import ChainDrafter, MedusaDrafter
from octavo.execution.model_drafter import ModelDrafter
from octavo.execution.runner import Runner
from octavo.execution.sequence_table import SequenceTable
from octavo.kv_cache.groups import CacheGroup, LayerCacheSpec, group_layers
from octavo.layers.tensor_parallel import WHOLE
from octavo.loading.file_weights import open_weights
from octavo.loading.recording import RecordingWeights
from octavo.models.decoder import Decoder
from octavo.models.description import ModelDescription
from octavo.models.draft_heads import ChainHead, Eagle3Head, EagleHead, HeadTarget, MedusaHeads, module_names
from octavo.models.registry import Model, describe
from octavo.models.sharding import with_shard
from octavo.ops import LayerKVCache, Ops
from octavo.step_plan import BlockMoves

_LEAST_COMMON = 0.95  # share of common tokens; families add a few tokens from model to model


def group_for(groups: Sequence[CacheGroup], specs: Sequence[LayerCacheSpec], name: str) -> int:
    """Return the group of a model's cache whose blocks can hold a draft model's keys and values: the first group that
    releases no block that the draft still reads. States are kept outside of blocks, but a draft with states reads all
    keys again. Raises `ConfigError` if there is no such group."""
    if all(spec.kind == "state" for spec in specs):
        return 0
    if all(group.spec.kind == "state" for group in groups):
        raise ConfigError(
            f"{name} cannot draft for this model: its keys and values need the model's blocks for keys, and all layers "
            "of the model keep a state instead. Take ngram, suffix or medusa."
        )
    reads_all = any(spec.kind in ("full", "state") for spec in specs)
    longest = max((spec.window for spec in specs), default=0)
    for number, group in enumerate(groups):
        if group.spec.kind == "full" or (not reads_all and group.spec.window >= longest):
            return number
    raise ConfigError(
        f"{name} cannot draft for this model: it reads further back than the window of "
        f"{max(group.spec.window for group in groups)} tokens that the model keeps."
    )


class Draft:
    """A draft model or head of `own` configuration for the sequences of `target`. Call `use_caches` before using it."""

    def __init__(
        self, config: EngineConfig, own: ModelConfig, model: Model | MedusaHeads, target: Runner,
        groups: Sequence[CacheGroup], ops: Ops, device: Device,
    ) -> None:  # fmt: skip
        self._target, self._ops, self._device, self._own = target, ops, device, own
        self._block_size = config.cache.block_size
        self.dtype, self.runner = own.dtype, None
        self.num_weight_bytes = model.num_weight_bytes()
        self._specs: Sequence[LayerCacheSpec] = () if isinstance(model, MedusaHeads) else model.layer_caches
        self.layer_caches = [spec for spec in self._specs if spec.kind != "state"]  # in the model's blocks
        num_states = STATES_PER_ROW * config.scheduler.max_num_seqs
        self._states = [
            layer_cache(config.cache, device, ops, spec, num_states) for spec in self._specs if spec.kind == "state"
        ]
        self.state_arrays = [part for cache in self._states for part in cache.arrays]  # of this draft alone
        self.state_bytes = sum(int(part.nbytes) for part in self.state_arrays)
        self._group = group_for(groups, self._specs, own.checkpoint.name)
        self.pool = groups[self._group].pool
        self._has_null_block = any(group.pool == self.pool and group.spec.kind == "window" for group in groups)
        self._drafter: Drafter | None = None
        self._filled: FilledSlots | None = None
        # With a block that is saved: its number of filled slots. Heads fill every slot, and a draft model with states
        # computes prompts anew.
        self.num_note_bytes = 0 if self._states or isinstance(model, MedusaHeads | ChainHead) else 4
        limits = config.scheduler
        if isinstance(model, MedusaHeads):
            self._drafter = MedusaDrafter(model, target, device, own.dtype)
            return
        is_head = isinstance(model, ChainHead)
        assert not (is_head and self._states), "heads have attention"
        table = SequenceTable(
            limits.max_num_seqs, config.model.max_model_len, config.cache.block_size, group_layers(model.layer_caches),
            tokens_of=target.sequence_table, num_ahead=int(is_head),
            vocab_size=None if is_head or model.vocab_size >= target.model.vocab_size else model.vocab_size,
        )  # fmt: skip
        self.runner = runner = Runner(model, ops, device, table, limits.max_num_batched_tokens)
        if isinstance(model, ChainHead):
            if isinstance(model, Eagle3Head):
                target.submitter.computation.aux_hidden_states = model.aux_hidden_states
                model.target.watch_layer_inputs(model.aux_hidden_states.see)
            if model.target_token_ids is not None:
                runner.submitter.set_draft_hooks(target_token_ids=ops.place(model.target_token_ids.reshape(-1, 1)))
            self._drafter = ChainDrafter(model, runner, target, self._group, device, own.dtype)

    def use_caches(self, caches: Sequence[LayerKVCache], num_blocks: int, num_host_blocks: int) -> Drafter:
        """Use `caches` for the layers' keys and values; they are moved with the target model's blocks. Returns the
        drafter."""
        mover = BlockMover(self._ops, self._device, [self._states] if self._states else [], [0] if self._states else [])
        if self.runner is not None:
            states, in_blocks = iter(self._states), iter(caches)
            by_layer = [next(states if spec.kind == "state" else in_blocks) for spec in self._specs]
            self.runner.use_caches(by_layer, mover)
        if self._drafter is not None:
            return self._drafter
        assert self.runner is not None
        kept: FilledSlots | DraftStates
        if self._states:
            kept = DraftStates(self.runner.sequence_table, mover)
        else:
            kept = self._filled = FilledSlots(
                num_blocks, num_host_blocks, self._block_size, self._has_null_block, not self._device.shares_memory
            )
        table, longest = self._target.sequence_table, self._own.max_model_len
        vocab_size = self._target.model.vocab_size
        return ModelDrafter(self.runner, table, self._group, self.pool, kept, longest, vocab_size)

    def note_moves(self, moves: Sequence[BlockMoves]) -> None:
        """Note that blocks are moved, by pool, outside of a step."""
        if moves and self._filled is not None:
            self._filled.move(moves[self.pool])

    def add_notes(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the contents of blocks, [len(blocks), block bytes], each followed by `num_note_bytes` in the draft's
        pool."""
        if pool != self.pool or self._filled is None:
            return contents
        notes = self._filled.counts(blocks)[:, None].view(np.uint8)
        return np.concatenate([contents, notes], axis=1)

    def take_notes(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Take the notes off the contents that blocks are about to get, as `add_notes` has returned them."""
        if pool != self.pool or self._filled is None:
            return contents
        contents, notes = np.split(contents, [-self.num_note_bytes], axis=1)
        self._filled.restore(blocks, np.ascontiguousarray(notes).view(np.int32)[:, 0])
        return np.ascontiguousarray(contents)


def build_head(
    config: EngineConfig, own: ModelConfig, target: Model, ops: Ops, max_draft_tokens: int, is_outline: bool = False
) -> ChainHead | MedusaHeads:
    """Build the head that `config.speculative` asks for, over a model or a worker's shard of it. Over a shard, a head
    without its own embedding or output matrix gets whole copies. An outline's weights are not read. Raises `LoadError`
    or `ConfigError` if it does not fit."""
    assert config.speculative is not None
    method, checkpoint, of_target = config.speculative.method, own.checkpoint, config.model
    if not isinstance(target, Decoder):
        raise ConfigError(f"{method} is not built for models of {type(target).__name__}.")
    whole = describe(of_target.checkpoint.config, of_target.impl, of_target.code_folder, of_target.pooling)
    whole = with_shard(whole, WHOLE, config.enable_expert_parallel, config.reproducible_parallel)

    def read(description: ModelDescription) -> Decoder:
        weights = open_weights(
            of_target.checkpoint, of_target.dtype, of_target.seed, of_target.quantization, whole.tie_word_embeddings
        )
        taken = RecordingWeights(of_target.dtype, weights) if is_outline else weights
        copy = Decoder(description, taken, ops, of_target.max_model_len, of_target.dtype)
        weights.close()
        return copy

    weights = open_weights(checkpoint, own.dtype, own.seed, own.quantization, False)
    taken = RecordingWeights(own.dtype, weights) if is_outline else weights
    settings = (
        HeadTarget(target, whole, read), checkpoint.config, taken, ops, of_target.max_model_len, own.dtype,
    )  # fmt: skip
    head: ChainHead | MedusaHeads
    if method == "mtp":
        module = module_names(whole, weights)
        if module is None:
            raise ConfigError(f"{checkpoint.name} has no modules of multi-token prediction that Octavo knows.")
        head = EagleHead(*settings, module)
        weights.close()
        return head
    if method == "medusa":
        head = MedusaHeads(*settings)
        if head.num_heads < max_draft_tokens:
            raise ConfigError(
                f"num_speculative_tokens {max_draft_tokens} is more than the {head.num_heads} Medusa heads."
            )
    else:
        head = EagleHead(*settings) if method == "eagle" else Eagle3Head(*settings)
    taken.check_all_taken()
    weights.close()
    return head


def check_vocabulary(target: ModelConfig, draft: ModelConfig) -> None:
    """Raise `ConfigError` if model and draft have different tokens for one id."""
    paths = [config.checkpoint.tokenizer_path for config in (target, draft)]
    if paths[0] == paths[1]:
        return
    from octavo.loading.tokenizer import read_tokenizer

    try:
        ours, theirs = (read_tokenizer(path).get_vocab() for path in paths)
    except LoadError as e:
        if target.vocab_size == draft.vocab_size:
            return  # no tokenizer file: a server without one can still draft
        raise ConfigError(
            f"the vocabularies of {target.checkpoint.name} ({target.vocab_size} tokens) and "
            f"{draft.checkpoint.name} ({draft.vocab_size}) differ in size and cannot be compared: {e}"
        ) from None
    tokens_of_draft = {number: token for token, number in theirs.items()}
    num_common = 0
    for token, number in ours.items():
        other = tokens_of_draft.get(number)
        if other is not None and other != token:
            raise ConfigError(
                f"{draft.checkpoint.name} cannot draft for {target.checkpoint.name}: token {number} is {token!r} in "
                f"the model's vocabulary and {other!r} in the draft's. Take a draft of the same family; vocabularies "
                "are not translated."
            )
        num_common += other is not None
    if num_common < _LEAST_COMMON * len(ours):
        raise ConfigError(
            f"{draft.checkpoint.name} cannot draft for {target.checkpoint.name}: it knows {num_common} of its "
            f"{len(ours)} tokens."
        )
