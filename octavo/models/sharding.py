"""Division of a model among workers: shards of each layer (tensor parallelism), and layers by stage (pipeline
parallelism). Models that cannot be split are refused. `octavo.layers.parameters` cuts the matrices."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from octavo.errors import ConfigError
from octavo.layers.attention import AttentionDescription
from octavo.layers.cross_attention import CrossAttentionDescription
from octavo.layers.experts import ExpertsDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.mamba import MambaDescription
from octavo.layers.mixer import MixerDescription
from octavo.layers.mla import MLADescription
from octavo.layers.recurrent import (
    GatedDeltaDescription,
    GatedRecurrenceDescription,
    LightningDescription,
    ShortConvDescription,
)
from octavo.layers.tensor_parallel import Shard
from octavo.models.description import LayerDescription, ModelDescription

# Mixers that can be sharded, by heads or channels.
_SHARDABLE = (
    AttentionDescription, MLADescription, MambaDescription, ShortConvDescription, GatedDeltaDescription,
    LightningDescription, GatedRecurrenceDescription, CrossAttentionDescription,
)  # fmt: skip
# Layers that may gather a whole row from all workers.
_GATHERING = (
    AttentionDescription, MambaDescription, LightningDescription, FeedForwardDescription, CrossAttentionDescription,
)  # fmt: skip

# Numbers of equal parts whose sum a layer's output may be; the first number that divides the model's sizes is used.
_SUMMANDS = (8, 4, 2, 3, 5, 7)


def with_shard(
    description: ModelDescription, shard: Shard, shares_experts: bool = False, reproducible: bool | None = None
) -> ModelDescription:
    """Return the model as worker `shard.rank` builds it, with its part of the experts if `shares_experts`.

    With `reproducible` answers have the same bits for any number of workers; None: if the model allows it. Raises
    `ConfigError` for models that cannot be sharded so."""
    if not shard.is_whole:
        _check_can_shard(description, shard, shares_experts)
    if reproducible is not False and why_not_reproducible(description, shard.size) is None:
        shard = replace(shard, summands=_summands(description), must_agree=reproducible is True)
    if shard.is_whole and shard.summands == 1:
        return description
    layers = tuple(_with_shard(layer, shard) for layer in description.layers)
    return replace(description, layers=layers, shard=shard)


def why_not_reproducible(description: ModelDescription, size: int) -> str | None:
    """Return why `size` workers cannot give the bits of one; None if they can."""
    if size == 1:
        return None
    for layer in description.layers:
        if isinstance(layer.feed_forward, ExpertsDescription) and layer.feed_forward.shared_gate_name is not None:
            return f"the shared expert of {description.architecture} has a gate"
    summands = _summands(description)
    sizes = [n for n in range(1, summands + 1) if summands % n == 0 and (summands // n in (1, 2, 4, 8) or n == 1)]
    if size in sizes:
        return None
    return f"the sizes for which sums are cut alike are {', '.join(map(str, sizes))}"


def _summands(description: ModelDescription) -> int:
    """Return the number of equal parts whose sum a layer's output is, whatever the number of workers.

    A part consists of whole heads or experts, or of equally many channels or inner elements. The number is 1 if several
    workers are refused, or if no number of `_SUMMANDS` divides all sizes."""
    if any(_not_built(description).values()):
        return 1
    counts = set[int]()
    for layer in description.layers:
        feed_forward = layer.feed_forward
        counts.update(mixer.units for mixer in (layer.attention, layer.second_mixer) if isinstance(mixer, _SHARDABLE))
        if layer.reused is not None:
            counts |= {layer.reused.attention.units, layer.reused.feed_forward.intermediate_size}
        if isinstance(feed_forward, ExpertsDescription):
            counts.add(feed_forward.num_experts)
            feed_forward = feed_forward.shared
        if isinstance(feed_forward, FeedForwardDescription):
            counts.add(feed_forward.intermediate_size)
    return next((n for n in _SUMMANDS if all(count % n == 0 for count in counts)), 1)


def _check_can_shard(description: ModelDescription, shard: Shard, shares_experts: bool) -> None:
    has_experts = any(isinstance(layer.feed_forward, ExpertsDescription) for layer in description.layers)
    if has_experts and not shares_experts:
        raise ConfigError(
            f"--tensor-parallel-size {shard.size} does not cut the experts of {description.architecture}; add "
            "--enable-expert-parallel, which shares whole ones out."
        )
    if shares_experts and not has_experts:
        raise ConfigError(f"--enable-expert-parallel: {description.architecture} has no experts; leave it out.")
    for name, has in _not_built(description).items():
        if has:
            raise ConfigError(
                f"--tensor-parallel-size {shard.size} is not built yet for {name}, which {description.architecture} "
                "has; leave it out."
            )


def stage_layers(description: ModelDescription, num_stages: int, partition: Sequence[int] | None = None) -> list[range]:
    """Return the layers of each stage: as many as `partition` says, otherwise divided as equally as possible.

    The first stage also embeds and the last stage also makes logits; they have no more layers than other stages if the
    model can be cut anywhere. Raises `ConfigError` for a wrong partition."""
    num_layers = len(description.layers)
    if partition is not None:
        if len(partition) != num_stages or sum(partition) != num_layers or min(partition) < 1:
            given = ",".join(map(str, partition))
            raise ConfigError(
                f"--pipeline-layer-partition {given} must be {num_stages} numbers above 0 that add up to the model's "
                f"{num_layers} layers."
            )
        counts = list(partition)
    else:
        if num_stages > num_layers:
            raise ConfigError(f"--pipeline-parallel-size {num_stages} is more than the model's {num_layers} layers.")
        each, left = divmod(num_layers, num_stages)
        first = max(0, min(1, num_stages - 1 - left))  # the first stage that gets one layer more
        counts = [each + (first <= stage < first + left) for stage in range(num_stages)]
        starts = _possible_starts(description)
        if not starts.issuperset(accumulate(counts[:-1])):
            counts = _equal_counts(sorted(starts), num_layers, num_stages)
            if not counts:
                possible = ", ".join(map(str, sorted(starts))) or "none but the first"
                raise ConfigError(
                    f"--pipeline-parallel-size {num_stages} is more stages than {description.architecture} can be cut "
                    f"into: those behind the first can begin with layers {possible}."
                )
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def with_stage(description: ModelDescription, layers: range) -> ModelDescription:
    """Return the model as the workers of the stage with `layers` build it. Raises `ConfigError` if it cannot be cut
    there."""
    if len(layers) == len(description.layers):
        return description
    refused = {
        "models that transformers computes": description.impl != "octavo",
        "models that write down speech": description.num_cross_tokens > 0 and not description.takes_media,
    }
    for name, has in refused.items():
        if has:
            raise ConfigError(
                f"--pipeline-parallel-size is not built yet for {name}, which {description.architecture} has; leave it "
                "out."
            )
    for start in (layers.start, layers.stop):
        if (reason := _why_no_start(description, start)) is not None:
            possible = ", ".join(map(str, sorted(_possible_starts(description)))) or "none"
            raise ConfigError(
                f"a stage cannot begin with layer {start}: {reason}. Those that can, for --pipeline-layer-partition: "
                f"{possible}."
            )
    return replace(description, own_layers=layers)


def _why_no_start(description: ModelDescription, start: int) -> str | None:
    """Return why no stage can begin with layer `start`; None if a stage can."""
    for i, layer in enumerate(description.layers):
        attention = layer.attention
        if i < start <= i + layer.deferred_by:
            return f"layer {i} adds something at its end, or later"
        read = attention.reads_layer if isinstance(attention, AttentionDescription) else None
        if read is not None and read < start <= i:
            return f"layer {i} reads the keys of layer {read}, which must be of its stage"
        if i == start and isinstance(attention, MLADescription) and attention.shares_index:
            return "it reads keys that an index before it chooses"
    return None


def _possible_starts(description: ModelDescription) -> set[int]:
    """Return the layers that a stage after the first can begin with."""
    return {start for start in range(1, len(description.layers)) if _why_no_start(description, start) is None}


def _equal_counts(starts: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Return the numbers of layers of each stage if stages begin only at `starts`: as equal as possible (least sum of
    squares). Empty if there are too few starts."""
    best = {0: (0, list[int]())}  # layers that the stages so far have -> (least sum of squares, layers of each stage)
    for ends in [starts] * (num_stages - 1) + [[num_layers]]:
        longer = {}
        for end in ends:
            found = [(cost + (end - at) ** 2, [*counts, end - at]) for at, (cost, counts) in best.items() if at < end]
            if found:
                longer[end] = min(found)
        best = longer
    return best[num_layers][1] if best else []


def _not_built(description: ModelDescription) -> dict[str, bool]:
    return {
        "models that transformers computes": description.impl != "octavo",
        "attention of several inputs": any(a.num_inputs > 1 for a in description.mixers(AttentionDescription)),
    }


def all_gather_size(description: ModelDescription) -> int:
    """Return the most elements of a row that workers gather within a layer, or before the first layer."""
    sizes = [description.embedding_size or description.hidden_size]
    if description.per_layer_embeddings is not None:
        sizes.append(len(description.checkpoint_layers) * description.per_layer_embeddings.size)
    for layer in description.layers:
        feed_forward = layer.feed_forward
        if isinstance(feed_forward, ExpertsDescription):
            feed_forward = feed_forward.shared
        of_shared = () if layer.reused is None else (layer.reused.attention, layer.reused.feed_forward)
        parts = (layer.attention, layer.second_mixer, feed_forward, *of_shared)
        sizes += [part.all_gather_size for part in parts if isinstance(part, _GATHERING)]
    return max(sizes)


def _with_shard(layer: LayerDescription, shard: Shard) -> LayerDescription:
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, FeedForwardDescription):
        feed_forward = replace(feed_forward, shard=shard)
    elif isinstance(feed_forward, ExpertsDescription):
        shared_expert = None if feed_forward.shared is None else replace(feed_forward.shared, shard=shard)
        feed_forward = replace(feed_forward, shard=shard, shared=shared_expert)
        feed_forward.own  # noqa: B018  # raises `ConfigError` if the shard is refused
    attention, second_mixer = _sharded_mixer(layer.attention, shard), _sharded_mixer(layer.second_mixer, shard)
    reused = layer.reused
    if reused is not None:
        of_all, inner = reused.attention, replace(reused.feed_forward, shard=shard)
        reused = replace(reused, attention=replace(of_all, shard=shard), feed_forward=inner)
        reused.attention.own_heads, reused.cache  # noqa: B018  # may raise too
    return replace(layer, attention=attention, second_mixer=second_mixer, feed_forward=feed_forward, reused=reused)


def _sharded_mixer(mixer: MixerDescription | None, shard: Shard) -> MixerDescription | None:
    if mixer is None:
        return None
    assert isinstance(mixer, _SHARDABLE)
    shared: MixerDescription = replace(mixer, shard=shard)
    if isinstance(shared, AttentionDescription | CrossAttentionDescription):
        shared.own_heads  # noqa: B018  # may raise too
    shared.cache  # noqa: B018  # may raise too
    return shared
