"""Turns flags into an `EngineConfig`: finds the model, and derives the settings that were left open from it."""

import logging
import re
from dataclasses import replace
from typing import Any

from octavo.config.cache_tier_flags import disk_cache_config, host_cache_bytes
from octavo.config.checks import SAMPLING_DEFAULTS, check
from octavo.config.data_parallel_flags import engine_hosts_config
from octavo.config.engine_args import AUTO_LENGTH, EngineArgs
from octavo.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.config.kv_events_flag import kv_events_config
from octavo.config.lora_flags import lora_config
from octavo.config.media_flags import media_config, with_most_pictures
from octavo.config.number_types import cache_dtype, load_quantization, model_dtype, precise_layers
from octavo.config.parallel_flags import check_shared, is_reproducible, layer_partition, nodes_config
from octavo.config.pooling_flags import pooling_of
from octavo.config.prompt_embeds_flag import prompt_embeds_config
from octavo.config.sound_flags import sound_config
from octavo.config.sparse_attention import check_cache_of_index, without_needless_index
from octavo.config.speculation_flags import draft_config, settled_speculation
from octavo.errors import ConfigError, LoadError, RequestError
from octavo.loading.checkpoint import Checkpoint, resolve
from octavo.loading.overrides import longest_context, overridden
from octavo.models.description import ModelDescription
from octavo.models.registry import by_transformers, describe, unread_settings
from octavo.pooling_params import PoolingConfig
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

DEFAULT_MAX_BATCHED_TOKENS = 2048
_MAX_POSITIONS = 1 << 30
GIB = 1 << 30


def create_engine_config(args: EngineArgs) -> EngineConfig:
    """Find the model, settle the defaults and check every combination.

    Raises `ConfigError` for a flag that cannot be honoured, `LoadError` for a model that cannot be found or read.
    """
    device = check(args)
    checkpoint = resolve(
        args.model,
        load_format=args.load_format,
        revision=args.revision,
        download_dir=args.download_dir,
        tokenizer=args.tokenizer,
    )
    checkpoint = replace(
        checkpoint,
        config=overridden(checkpoint.config, args.hf_overrides),
        generation_config=checkpoint.generation_config | (args.override_generation_config or {}),
        trusts_code=args.trust_remote_code,
    )
    code_folder = _code_folder(args, checkpoint)
    description = describe(checkpoint.config, args.model_impl, code_folder)
    if ignored := unread_settings(checkpoint.config, args.model_impl):
        logger.warning("config.json of %s: %s are not read and change nothing", checkpoint.name, ", ".join(ignored))
    if description.num_cross_tokens:
        checkpoint = with_most_pictures(args, checkpoint, description)
        description = describe(checkpoint.config, args.model_impl, code_folder)
    pooling, checkpoint = pooling_of(args, checkpoint, description)
    check_shared(args, description, device)
    # If tokens of a prompt see later tokens, a step computes the whole prompt, and its blocks are not shared.
    whole_prompts = pooling.whole_prompts if pooling is not None else description.sees_ahead == "prompt"
    enable_chunked_prefill = args.enable_chunked_prefill and not whole_prompts
    if args.kv_cache_memory_bytes is not None and pooling is not None and pooling.whole_prompts:
        raise ConfigError(f"{checkpoint.name} keeps no KV cache; leave --kv-cache-memory-bytes out.")
    max_model_len = _max_model_len(args, checkpoint, description, pooling)
    check_cache_of_index(args.kv_cache_dtype, description, max_model_len)
    checkpoint = without_needless_index(checkpoint, description, max_model_len)
    budget = _step_budget(args, enable_chunked_prefill, max_model_len)
    dtype = model_dtype(args, checkpoint, device, description.is_bidirectional)
    model = ModelConfig(
        checkpoint=checkpoint,
        served_model_names=list(args.served_model_name) or [checkpoint.name],
        dtype=dtype,
        max_model_len=max_model_len,
        may_shorten=args.max_model_len == AUTO_LENGTH,
        vocab_size=description.vocab_size,
        seed=args.seed,
        quantization=load_quantization("--quantization", args.quantization, checkpoint, device),
        num_precise_layers=precise_layers(args, checkpoint, description, dtype, pooling is not None),
        impl=description.impl,
        code_folder=code_folder,
        chat_template=args.chat_template,
        default_sampling_params=_default_sampling_params(args, checkpoint) if pooling is None else {},
        default_max_tokens=_default_max_tokens(args, checkpoint) if pooling is None else None,
        max_logprobs=args.max_logprobs,
        pooling=pooling,
    )
    speculative = settled_speculation(args, description, checkpoint.name, device, pools=pooling is not None)
    media = media_config(args, checkpoint, description, max_model_len, device)
    draft = draft_config(args, speculative, model, device)
    # With cross attention, keys and values of tokens depend on the sound or the pictures too.
    shares_prefixes = args.enable_prefix_caching and not whole_prompts and not description.num_cross_tokens
    return EngineConfig(
        model=model,
        cache=CacheConfig(
            block_size=args.block_size,
            num_blocks_override=args.num_gpu_blocks_override,
            cpu_memory_utilization=args.cpu_memory_utilization,
            gpu_memory_utilization=args.gpu_memory_utilization,
            memory_bytes=args.kv_cache_memory_bytes,
            swap_space_bytes=int(args.swap_space * GIB),
            enable_prefix_caching=shares_prefixes,
            host_bytes=host_cache_bytes(args, device, shares_prefixes=shares_prefixes),
            disk=disk_cache_config(args, device, shares_prefixes=shares_prefixes),
            events=kv_events_config(args, shares_prefixes=shares_prefixes),
            is_scratch=pooling is not None and pooling.whole_prompts,
            dtype=cache_dtype(args, dtype, device),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=min(args.max_num_seqs, budget),
            max_num_batched_tokens=budget,
            enable_chunked_prefill=enable_chunked_prefill,
            policy=args.scheduling_policy,
            preemption_mode=args.preemption_mode,
            stream_interval=args.stream_interval,
            check_invariants=args.check_invariants,
            target_step_s=args.target_step_time and args.target_step_time / 1e3,
            starts_at_images=media is not None and description.num_cross_tokens > 0,
            whole_images=media is not None and description.sees_ahead == "picture",
        ),
        device=device,
        enforce_eager=args.enforce_eager,
        tensor_parallel_size=args.tensor_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        reproducible_parallel=is_reproducible(args, device),
        pipeline_parallel_size=args.pipeline_parallel_size,
        pipeline_layer_partition=layer_partition(args),
        nodes=nodes_config(args, device),
        data_parallel_size=args.data_parallel_size,
        data_parallel_rank=args.data_parallel_rank or 0,
        engine_hosts=engine_hosts_config(args),
        cpu_threads=args.cpu_threads,
        cpus=_cpus(args),
        disable_additional_properties=args.disable_additional_properties,
        log_stats=not args.disable_log_stats,
        lora=lora_config(args, description.impl, device, dtype, media, pools=pooling is not None),
        media=media,
        sound=sound_config(args, checkpoint, description, device, pools=pooling is not None),
        prompt_embeds=prompt_embeds_config(args, checkpoint, description, max_model_len, pools=pooling is not None),
        speculative=speculative,
        draft=draft,
    )


def _max_model_len(
    args: EngineArgs, checkpoint: Checkpoint, description: ModelDescription, pooling: PoolingConfig | None
) -> int:
    """Return the longest sequence in tokens. Raises `ConfigError` if the flag exceeds the model's positions."""
    config = checkpoint.config.get("text_config") or checkpoint.config
    longest = longest_context(config, description.max_position_embeddings)
    if longest > _MAX_POSITIONS:
        raise LoadError(
            f"the configuration of {checkpoint.name} says {longest} positions, more than the {_MAX_POSITIONS} that a "
            "sequence may have; --hf-overrides can give it another max_position_embeddings or rope scaling."
        )
    if args.max_model_len is None or args.max_model_len == AUTO_LENGTH:
        return longest if pooling is None else min(longest, pooling.max_length or longest)
    if args.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {args.max_model_len} is more than the model's {longest} positions; --hf-overrides can "
            "give it another max_position_embeddings or rope scaling."
        )
    return args.max_model_len


def _step_budget(args: EngineArgs, enable_chunked_prefill: bool, max_model_len: int) -> int:
    """Return the most tokens in a step. Raises `ConfigError` if a prompt could never fit."""
    budget = args.max_num_batched_tokens or max(
        DEFAULT_MAX_BATCHED_TOKENS, 0 if enable_chunked_prefill else max_model_len
    )
    if not enable_chunked_prefill and budget < max_model_len:
        what_to_do = "lower --max-model-len" if args.enable_chunked_prefill else "leave chunked prefill on"
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is less than --max-model-len {max_model_len}: a prompt that long "
            f"could never run. Raise it, or {what_to_do}."
        )
    return budget


def _generation_config(args: EngineArgs, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the generation config in effect: defaults for requests that leave fields out."""
    given = checkpoint.generation_config if args.generation_config == "auto" else args.override_generation_config
    return given or {}


def _default_max_tokens(args: EngineArgs, checkpoint: Checkpoint) -> int | None:
    wanted = _generation_config(args, checkpoint).get("max_new_tokens")
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        return None
    if wanted < 1:
        raise ConfigError(f"max_new_tokens of the generation config must be 1 or more, got {wanted}.")
    logger.info("a chat that does not say max_tokens ends after %d: max_new_tokens of the generation config", wanted)
    return wanted


def _default_sampling_params(args: EngineArgs, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sampling fields of requests that leave them out. Logs a line if the model has none: few expect its
    answers at temperature 1, and as long as the context."""
    given = _generation_config(args, checkpoint)
    found = {name: given[name] for name in SAMPLING_DEFAULTS if type(given.get(name)) in (int, float)}
    try:
        SamplingParams(**found)
    except RequestError as e:
        raise ConfigError(
            f"the generation config of {checkpoint.name}: {e} --override-generation-config can change it, and "
            "--generation-config none leaves it out."
        ) from None
    if not found and args.generation_config == "auto":
        logger.info(
            "%s has no sampling defaults. As with vLLM, a request without temperature gets 1%s. "
            """--override-generation-config '{"temperature": 0.7, "max_new_tokens": 1024}' sets defaults""",
            checkpoint.name,
            "" if "max_new_tokens" in given else ", and one without max_tokens may fill the context",
        )
    return found


def _cpus(args: EngineArgs) -> list[int] | None:
    """Return the processors of --cpu-threads-bind, in order."""
    if args.cpu_threads_bind is None:
        return None
    cpus: list[int] = []
    for part in args.cpu_threads_bind.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        if match is None:
            raise ConfigError(f"--cpu-threads-bind {args.cpu_threads_bind} is not a list of processors like 0-3,8.")
        cpus += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not cpus or len(set(cpus)) < len(cpus):
        raise ConfigError(f"--cpu-threads-bind {args.cpu_threads_bind} must name each of its processors once.")
    if args.cpu_threads not in (None, len(cpus)):
        raise ConfigError(
            f"--cpu-threads {args.cpu_threads} and the {len(cpus)} processors of --cpu-threads-bind "
            f"{args.cpu_threads_bind} contradict each other; leave --cpu-threads out."
        )
    return cpus


def _code_folder(args: EngineArgs, checkpoint: Checkpoint) -> str | None:
    """Return the folder whose Python code may run, or None."""
    if not args.trust_remote_code or "auto_map" not in checkpoint.config:
        return None
    if not by_transformers(checkpoint.config, args.model_impl):
        return None  # none of its code runs
    logger.warning("--trust-remote-code: Python code of %s runs in this server", checkpoint.path)
    return checkpoint.path
