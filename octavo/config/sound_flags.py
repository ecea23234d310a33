"""Checks the flags of sound and makes the `SoundConfig`. It also checks flags of every model with cross attention."""

from importlib.util import find_spec
from pathlib import Path

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import SoundConfig
from octavo.config.speculation_flags import speculative_config
from octavo.errors import ConfigError
from octavo.loading.checkpoint import Checkpoint
from octavo.models.description import ModelDescription

_EXTRACTOR_FILES = ("preprocessor_config.json", "processor_config.json")
_MODULES = ("torch", "transformers", "soundfile", "soxr")


def check_cross_attention(
    args: EngineArgs, checkpoint: Checkpoint, models: str, device: str, *, pools: bool, is_decoder: bool = False
) -> None:
    """Raise `ConfigError` for flags that are not built for models with cross attention to another network's output.
    `models` names them in the error. `is_decoder` says that the model is a language model with some such layers."""
    for what, is_so in {
        "for pooling": pools,
        "with --tensor-parallel-size on GPUs": device == "cuda" and args.tensor_parallel_size > 1 and not is_decoder,
        "with --enable-lora": args.enable_lora and not is_decoder,
        "with speculation": speculative_config(args) is not None and not is_decoder,
        "with quantized checkpoints": bool(checkpoint.config.get("quantization_config")) and not is_decoder,
        "with --load-format dummy": checkpoint.format == "dummy",
    }.items():
        if is_so:
            raise ConfigError(f"{models} are not built yet {what}.")


def sound_config(
    args: EngineArgs, checkpoint: Checkpoint, description: ModelDescription, device: str, *, pools: bool
) -> SoundConfig | None:
    """Return the configuration of speech, or None for a model that does not transcribe. Raises `ConfigError` for flags
    that cannot be honoured."""
    num_rows = description.num_cross_tokens
    if not num_rows or description.takes_media:
        return None
    check_cross_attention(args, checkpoint, "models that hear", device, pools=pools)
    missing = [module for module in _MODULES if find_spec(module) is None]
    if missing:
        raise ConfigError(f"{checkpoint.name} takes sounds only with {', '.join(missing)}: scripts/install audio.")
    if not any((Path(checkpoint.path) / name).is_file() for name in _EXTRACTOR_FILES):
        raise ConfigError(f"{checkpoint.name} has no {' or '.join(_EXTRACTOR_FILES)}, which says how it hears.")
    return SoundConfig(
        folder=checkpoint.path,
        num_rows=num_rows,
        max_bytes=args.max_audio_bytes,
        max_seconds=args.max_audio_seconds,
        cache_tokens=max(args.media_cache_tokens, num_rows),
    )
