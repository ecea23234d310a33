"""Checks of flags that need no model: values out of range, and features that the device does not have."""

import math

from octavo.config.engine_args import AUTO_LENGTH, EngineArgs
from octavo.config.number_types import CACHE_BYTES, DTYPES, check_quantization
from octavo.config.parallel_flags import check_parallel
from octavo.config.speculation_flags import speculative_config
from octavo.config.wording import listed, on_device
from octavo.errors import ConfigError
from octavo.hardware import why_not_cuda

# Sampling fields whose default may come from a model's generation_config.json.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GENERATION_OVERRIDES = (*SAMPLING_DEFAULTS, "max_new_tokens", "eos_token_id")
_BLOCK_SIZES = {"cpu": (8, 16, 32), "cuda": (8, 16, 32, 64, 128, 256)}


def check(args: EngineArgs) -> str:
    """Check the flags for the chosen device, and return this device. Raises `ConfigError` for flags that it cannot
    honour."""
    args.check_flags()
    device = _device(args)
    _check_values(args)
    _check_for_device(args, device)
    check_parallel(args, device)
    speculative_config(args)
    return device


def _device(args: EngineArgs) -> str:
    if args.device == "auto":
        return "cpu" if why_not_cuda() else "cuda"
    if args.device == "cuda" and (reason := why_not_cuda()):
        raise ConfigError(f"--device cuda: {reason}. Or use --device cpu.")
    return args.device


def _check_values(args: EngineArgs) -> None:
    """Check the flags that have the same meaning on every device."""
    if args.max_model_len is not None and args.max_model_len <= 0 and args.max_model_len != AUTO_LENGTH:
        raise ConfigError(f"--max-model-len must be greater than 0, got {args.max_model_len}.")
    unknown = set(args.override_generation_config or {}) - {*_GENERATION_OVERRIDES}
    if unknown:
        raise ConfigError(
            f"--override-generation-config has {', '.join(sorted(unknown))}, which nothing reads; "
            f"{listed(_GENERATION_OVERRIDES, 'and')} are read."
        )
    if args.target_step_time is not None:
        if not 0 <= args.target_step_time < math.inf:
            raise ConfigError(f"--target-step-time must be 0 or more milliseconds, got {args.target_step_time}.")
        if args.target_step_time > 0 and not args.enable_chunked_prefill:
            raise ConfigError("--target-step-time cuts prompts, which --no-enable-chunked-prefill forbids.")
    if args.max_logprobs < -1:
        raise ConfigError(f"--max-logprobs must be -1 (all of the vocabulary), 0 or more, got {args.max_logprobs}.")
    if not all(args.served_model_name):
        raise ConfigError("--served-model-name must not be empty.")
    for name in ("gpu_memory_utilization", "cpu_memory_utilization"):
        if not 0 < getattr(args, name) <= 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be in (0, 1], got {getattr(args, name)}.")
    if not 0 <= args.swap_space < math.inf:
        raise ConfigError(f"--swap-space must be 0 or more GiB, got {args.swap_space}.")
    if args.preemption_mode == "swap" and args.swap_space == 0:
        raise ConfigError("--preemption-mode swap needs --swap-space above 0.")


def _check_for_device(args: EngineArgs, device: str) -> None:
    if args.block_size not in (sizes := _BLOCK_SIZES[device]):
        raise ConfigError(f"--block-size must be {listed(sizes, 'or')}{on_device(device)}, got {args.block_size}.")
    if device != "cpu":
        for name in ("cpu_threads", "cpu_threads_bind", "cpu_memory_utilization", "precise_layers"):
            if getattr(args, name) != getattr(EngineArgs, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for CPUs, and the device is a GPU; leave it out, or add "
                    "--device cpu."
                )
    if args.async_scheduling is not None and args.async_scheduling != (device != "cpu"):
        raise ConfigError(
            f"--{'' if args.async_scheduling else 'no-'}async-scheduling is not built{on_device(device)}: "
            + ("steps are always scheduled ahead." if device != "cpu" else "there is no device to overlap with.")
        )
    if args.tokenizer_mode not in ("auto", "hf"):
        raise ConfigError(f"--tokenizer-mode {args.tokenizer_mode} is not built; use auto.")
    if args.attention_backend != "auto" and device == "cpu":
        raise ConfigError(f"--attention-backend {args.attention_backend} is for GPUs, and the device is the CPU.")
    if DTYPES.get(args.dtype, args.dtype) == "float16" and device == "cpu":
        raise ConfigError(f"--dtype {args.dtype} is not built for CPUs; use bfloat16 or float32.")
    check_quantization("--quantization", args.quantization, device)
    if args.kv_cache_dtype not in ("auto", "float32", "float16", "bfloat16", *CACHE_BYTES):
        raise ConfigError(
            f"--kv-cache-dtype {args.kv_cache_dtype} is not built yet; {listed(('auto', *CACHE_BYTES), 'and')} are."
        )
