"""Checks the flags of speculation and makes the draft model's configuration."""

from dataclasses import replace

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import ModelConfig
from octavo.config.number_types import check_quantization, load_quantization, model_dtype
from octavo.config.sparse_attention import check_cache_of_index, without_needless_index
from octavo.errors import ConfigError
from octavo.loading.checkpoint import resolve
from octavo.loading.overrides import longest_context
from octavo.models.description import ModelDescription
from octavo.models.registry import describe
from octavo.speculative_config import DEFAULT, DRAFT_METHODS, HEAD_METHODS, NO_METHOD, SpeculativeConfig, parse


def speculative_config(args: EngineArgs) -> SpeculativeConfig | None:
    """Return the configuration of speculation that the flags ask for, or None. Raises `ConfigError`."""
    return parse(
        args.speculative_config,
        model=args.speculative_model,
        num_speculative_tokens=args.num_speculative_tokens,
        draft_tensor_parallel_size=args.speculative_draft_tensor_parallel_size,
        prompt_lookup_max=args.ngram_prompt_lookup_max,
        prompt_lookup_min=args.ngram_prompt_lookup_min,
    )


def settled_speculation(
    args: EngineArgs, description: ModelDescription, name: str, device: str, *, pools: bool
) -> SpeculativeConfig | None:
    """Return the configuration of speculation in effect: what the flags ask for, or else the default where it goes with
    the model `name` and the other flags. Raises `ConfigError`."""
    asked = speculative_config(args)
    if asked is not None and pools:
        raise ConfigError(f"{name} pools and samples no tokens; leave speculation out.")
    is_off = (args.speculative_config or {}).get("method") == NO_METHOD
    if asked is not None or is_off or pools or device != "cpu":
        return asked
    # Draft tokens over states take blocks from snapshots of prefixes. The others are not measured.
    has_states = any(spec.kind == "state" for spec in description.layer_caches)
    if has_states or description.impl != "octavo" or description.num_cross_tokens or args.pipeline_parallel_size > 1:
        return None
    return DEFAULT


def draft_config(
    args: EngineArgs, speculative: SpeculativeConfig | None, target: ModelConfig, device: str
) -> ModelConfig | None:
    """Return the draft model or head, if the method has one, with its own checkpoint and quantization.

    Raises `ConfigError` for settings that cannot be honoured, and `LoadError` for a checkpoint that cannot be found or
    read.
    """
    if speculative is None or speculative.method not in DRAFT_METHODS:
        return None
    method, longest = speculative.method, speculative.max_model_len or target.max_model_len
    if speculative.use_heterogeneous_vocab:
        raise ConfigError("use_heterogeneous_vocab is not built yet: a draft model must have the model's vocabulary.")
    if speculative.kv_cache_dtype not in (None, "auto"):
        raise ConfigError("kv_cache_dtype of --speculative-config is not built yet: --kv-cache-dtype is for both.")
    if speculative.draft_tensor_parallel_size not in (None, 1):
        raise ConfigError(
            f"draft_tensor_parallel_size {speculative.draft_tensor_parallel_size} is not built yet: a draft model "
            f"runs whole on the first of {args.tensor_parallel_size} workers; leave it out, or say 1."
        )
    if method == "mtp":
        for name in ("model", "revision", "quantization"):
            if getattr(speculative, name) is not None:
                raise ConfigError(f"mtp drafts with modules of the model's own checkpoint; leave its {name} out.")
        return replace(target, max_model_len=min(longest, target.max_model_len))
    if speculative.model is None:
        raise ConfigError(f'{method} needs a draft model: --speculative-config {{"model": ...}}.')
    if target.impl != "octavo" and method in HEAD_METHODS:
        raise ConfigError(f"{method} needs a model that Octavo computes itself, not through transformers.")
    quantization = "quantization of --speculative-config"
    check_quantization(quantization, speculative.quantization, device)
    checkpoint = resolve(
        speculative.model,
        load_format="dummy" if args.load_format == "dummy" else "auto",
        revision=speculative.revision,
        download_dir=args.download_dir,
    )
    dtype, vocab_size, impl = target.dtype, target.vocab_size, target.impl
    if method not in HEAD_METHODS:
        description = describe(checkpoint.config, args.model_impl)
        dtype = model_dtype(args, checkpoint, device, is_encoder=False)
        vocab_size, impl = description.vocab_size, description.impl
        longest = min(longest, longest_context(checkpoint.config, description.max_position_embeddings))
        longest = min(longest, target.max_model_len)
        check_cache_of_index(args.kv_cache_dtype, description, longest)
        checkpoint = without_needless_index(checkpoint, description, longest)
    return ModelConfig(
        checkpoint=checkpoint,
        served_model_names=[checkpoint.name],
        dtype=dtype,
        max_model_len=min(longest, target.max_model_len),
        vocab_size=vocab_size,
        seed=args.seed,
        quantization=load_quantization(quantization, speculative.quantization, checkpoint, device),
        impl=impl,
    )
