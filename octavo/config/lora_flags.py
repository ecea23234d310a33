"""Checks the flags of adapters and makes the `LoRAConfig`, also for adapters that a model brings itself."""

import json
import os
from pathlib import Path
from typing import Any

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import LoRAConfig, LoRAModule, MediaConfig
from octavo.config.media_flags import ADAPTER_FILE
from octavo.errors import ConfigError
from octavo.loading.weight_files import read_json

MAX_LORA_RANK = 512


def lora_config(
    args: EngineArgs, impl: str, device: str, dtype: str, media: MediaConfig | None, *, pools: bool
) -> LoRAConfig | None:
    """Return the configuration of adapters, or None if none are served. Raises `ConfigError` for flags that cannot be
    honoured."""
    own = None if media is None else media.adapter
    if own is not None:
        _check_beside_own(args)
    if not args.enable_lora:
        idle = EngineArgs()
        for name in (
            "lora_modules", "lora_root", "lora_target_modules", "lora_memory_gb", "enable_runtime_lora_updating",
            "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype",
        ):  # fmt: skip
            if getattr(args, name) != getattr(idle, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora.")
        return None if own is None else _of_own(own, dtype)
    if impl != "octavo":
        raise ConfigError("--enable-lora is not built for models that transformers computes (--model-impl).")
    if pools:
        raise ConfigError("--enable-lora is not built for models that pool.")
    if args.max_lora_rank > MAX_LORA_RANK:
        raise ConfigError(f"--max-lora-rank must be at most {MAX_LORA_RANK}, got {args.max_lora_rank}.")
    if args.lora_dtype == "float16" and device == "cpu":
        raise ConfigError("--lora-dtype float16 is not built for CPUs; use auto, bfloat16 or float32.")
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        raise ConfigError(f"--max-cpu-loras {args.max_cpu_loras} is less than --max-loras {args.max_loras}.")
    for root in args.lora_root:
        if not Path(root).expanduser().is_dir():
            raise ConfigError(f"--lora-root {root} is no folder.")
    return LoRAConfig(
        max_loras=args.max_loras,
        max_rank=args.max_lora_rank,
        max_cpu_loras=args.max_cpu_loras,
        dtype=dtype if args.lora_dtype == "auto" else args.lora_dtype,
        target_modules=list(args.lora_target_modules) or None,
        modules=[_lora_module(text) for text in args.lora_modules],
        roots=[str(Path(root).expanduser().resolve()) for root in args.lora_root],
        may_update=args.enable_runtime_lora_updating or bool(os.environ.get("OCTAVO_ALLOW_RUNTIME_LORA_UPDATING")),
        download_dir=args.download_dir,
        memory_bytes=None if args.lora_memory_gb is None else int(args.lora_memory_gb * (1 << 30)),
    )


def _check_beside_own(args: EngineArgs) -> None:
    """Raise `ConfigError` for flags that are not built together with adapters that media choose."""
    for what, is_so in {
        "--enable-lora": args.enable_lora,
        "--reproducible-parallel": bool(args.reproducible_parallel) and args.tensor_parallel_size > 1,
    }.items():
        if is_so:
            raise ConfigError(
                f"{what} is not built with models that bring adapters for their media; leave it out, or add "
                "--language-model-only."
            )


def _of_own(folder: str, dtype: str) -> LoRAConfig:
    """Return the configuration for the adapter that a model brings itself. Raises `ConfigError`."""
    path = Path(folder) / ADAPTER_FILE
    config = read_json(str(path))
    targets = config.get("target_modules")
    ranks = [config.get("r", 8), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and 1 <= rank <= MAX_LORA_RANK for rank in ranks):
        raise ConfigError(f"{path}: ranks must be 1 to {MAX_LORA_RANK}, got {ranks!r:.60}.")
    return LoRAConfig(
        max_loras=1,
        max_rank=max(ranks),
        max_cpu_loras=1,
        dtype=dtype,
        target_modules=sorted(targets) if isinstance(targets, list) else None,  # a regular expression: any module
        modules=[],
        roots=[],
        may_update=False,
        takes_requests=False,
    )


def _lora_module(text: str) -> LoRAModule:
    """Parse an adapter: `name=path`, or a JSON object. Raises `ConfigError`."""
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
