"""The flags of adapters, checked: `LoRAConfig`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import LoRAConfig, LoRAModule
from octavo.errors import ConfigError

MAX_LORA_RANK = 512


def lora_config(args: EngineArgs, impl: str, device: str, dtype: str) -> LoRAConfig | None:
    """None where no adapters are served. Raises `ConfigError` for what cannot be honoured."""
    if not args.enable_lora:
        idle = EngineArgs()
        for name in (
            "lora_modules", "lora_root", "lora_target_modules", "lora_memory_gb", "enable_runtime_lora_updating",
            "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype",
        ):  # fmt: skip
            if getattr(args, name) != getattr(idle, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora.")
        return None
    if impl != "octavo":
        raise ConfigError("--enable-lora is not built for models that transformers computes (--model-impl).")
    if device == "cuda" and args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        raise ConfigError(
            "--enable-lora is not built yet for models that several GPUs share; leave out --tensor-parallel-size and "
            "--pipeline-parallel-size, or --enable-lora."
        )
    if args.max_lora_rank > MAX_LORA_RANK:
        raise ConfigError(f"--max-lora-rank must be at most {MAX_LORA_RANK}, got {args.max_lora_rank}.")
    if args.lora_dtype == "float16" and device == "cpu":
        raise ConfigError("--lora-dtype float16 is not built for CPUs; use auto, bfloat16 or float32.")
    max_cpu_loras = args.max_cpu_loras or args.max_loras
    if max_cpu_loras < args.max_loras:
        raise ConfigError(f"--max-cpu-loras {max_cpu_loras} is less than --max-loras {args.max_loras}.")
    for root in args.lora_root:
        if not Path(root).expanduser().is_dir():
            raise ConfigError(f"--lora-root {root} is no folder.")
    return LoRAConfig(
        max_loras=args.max_loras,
        max_rank=args.max_lora_rank,
        max_cpu_loras=max_cpu_loras,
        dtype=dtype if args.lora_dtype == "auto" else args.lora_dtype,
        target_modules=list(args.lora_target_modules) or None,
        modules=[_lora_module(text) for text in args.lora_modules],
        roots=[str(Path(root).expanduser().resolve()) for root in args.lora_root],
        may_update=args.enable_runtime_lora_updating or bool(os.environ.get("OCTAVO_ALLOW_RUNTIME_LORA_UPDATING")),
        download_dir=args.download_dir,
        memory_bytes=None if args.lora_memory_gb is None else int(args.lora_memory_gb * (1 << 30)),
    )


def _lora_module(text: str) -> LoRAModule:
    """`name=path`, or a JSON object. Raises `ConfigError`."""
    fields: dict[str, Any] = {}
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError:
            raise ConfigError(f"--lora-modules {text} is not JSON.") from None
    else:
        fields["name"], _, fields["path"] = text.partition("=")
    wanted = {"name", "path", "base_model_name"}
    if not fields.get("name") or not fields.get("path") or not set(fields) <= wanted:
        raise ConfigError(
            f'--lora-modules {text} must be name=path or {{"name": ..., "path": ..., "base_model_name": ...}}.'
        )
    if not all(isinstance(value, str) for value in fields.values() if value is not None):
        raise ConfigError(f"--lora-modules {text} must have texts for values.")
    return LoRAModule(**fields)
