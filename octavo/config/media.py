"""The flags of media, checked: `MediaConfig`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import MediaConfig
from octavo.errors import ConfigError
from octavo.loading.checkpoint import Checkpoint
from octavo.media_kinds import IMAGE, KINDS
from octavo.models.description import ModelDescription
from octavo.models.media import MEDIA_FAMILIES, media_token

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_FLAGS = (  # which a model that neither sees nor hears could only ignore
    "limit_mm_per_prompt", "language_model_only", "allowed_local_media_path", "allowed_media_domains",
    "allow_private_media_addresses", "enable_mm_embeds",
)  # fmt: skip
_MODULES = ("torch", "transformers")
_DEFAULT_COUNT = 8  # of a prompt
_MAX_CACHE_GB = 1 << 20
_PILLOW_PIXELS = 89_478_485  # PIL.Image.MAX_IMAGE_PIXELS: a quarter of a GiB of RGB


def media_config(
    args: EngineArgs, checkpoint: Checkpoint, description: ModelDescription, device: str, max_model_len: int
) -> MediaConfig | None:
    """None where no media are taken. Raises `ConfigError` for what cannot be honoured."""
    limits = _limits(args)
    if args.max_image_pixels > _PILLOW_PIXELS:
        raise ConfigError(
            f"--max-image-pixels must be at most {_PILLOW_PIXELS}, Pillow's own bound, got {args.max_image_pixels}."
        )
    if not 0 <= args.mm_processor_cache_gb <= _MAX_CACHE_GB:
        raise ConfigError(f"--mm-processor-cache-gb must be 0 to {_MAX_CACHE_GB}, got {args.mm_processor_cache_gb}.")
    if args.max_media_redirects < 0:
        raise ConfigError(f"--max-media-redirects must not be negative, got {args.max_media_redirects}.")
    if not description.takes_media:
        for name in _FLAGS:
            if name == "language_model_only" and description.architecture in MEDIA_FAMILIES:
                continue  # which it is anyway
            if getattr(args, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for models that see or hear; {checkpoint.name} does not."
                )
        return None
    if args.language_model_only:
        if description.sees_ahead == "prompt":
            raise ConfigError(f"{checkpoint.name} is no language model without pictures; drop --language-model-only.")
        return None
    family = MEDIA_FAMILIES[description.architecture]
    kind = KINDS[family.kind]
    if others := sorted(name for name, count in limits.items() if count and name != kind.name):
        raise ConfigError(f"--limit-mm-per-prompt has {', '.join(others)}; {checkpoint.name} takes {kind.name}.")
    for what, is_so in {
        "on GPUs": device != "cpu",
        "with a model that guesses": "model" in (args.speculative_config or {})
        or args.speculative_model not in (None, "[ngram]"),
        "with --load-format dummy": checkpoint.format == "dummy",
    }.items():
        if is_so:
            raise ConfigError(
                f"{kind.noun}s are not built yet {what}; add --language-model-only to serve {checkpoint.name} without."
            )
    missing = [module for module in (*_MODULES, *kind.modules) if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"{checkpoint.name} {kind.verb} by {', '.join(missing)}, which is not installed: pip install "
            f"'octavo[{kind.extra}]', or add --language-model-only."
        )
    if not any((Path(checkpoint.path) / name).is_file() for name in _PROCESSOR_FILES):
        raise ConfigError(
            f"{checkpoint.name} has no {' or '.join(_PROCESSOR_FILES)}, which says how it {kind.verb}; add "
            "--language-model-only."
        )
    return MediaConfig(
        kind=family.kind,
        folder=checkpoint.path,
        token_id=media_token(checkpoint.config, description.architecture),
        counts_pictures=family.counts_pictures,
        frames_prompts=family.frames_prompts,
        row_multiplier=description.embedding_multiplier if family.multiplies_rows else 1.0,
        max_count=limits.get(kind.name, _DEFAULT_COUNT),
        max_bytes=args.max_image_bytes if kind is IMAGE else args.max_audio_bytes,
        max_pixels=args.max_image_pixels,
        max_seconds=args.max_audio_seconds,
        longest_s=family.longest_s,
        cache_tokens=max(args.media_cache_tokens, max_model_len),
        hidden_size=description.hidden_size,
        num_parts=1 + description.num_media_layers,
        has_grids=description.has_axes,
        takes_embeddings=args.enable_mm_embeds,
        named_bytes=int(args.mm_processor_cache_gb * (1 << 30)),
        allowed_folder=_allowed_folder(args.allowed_local_media_path),
        allowed_domains=[domain.strip().rstrip(".").lower() for domain in args.allowed_media_domains],
        allows_private=args.allow_private_media_addresses,
        fetch_timeout_s=args.media_fetch_timeout,
        max_redirects=args.max_media_redirects,
    )


def _allowed_folder(given: str | None) -> str | None:
    if given is None:
        return None
    if not Path(given).is_dir():
        raise ConfigError(f"--allowed-local-media-path {given} is not a folder.")
    return str(Path(given).resolve())


def _limits(args: EngineArgs) -> dict[str, int]:
    """By kind, how many media of it a prompt may have."""
    limits = args.limit_mm_per_prompt or {}
    if others := set(limits) - set(KINDS):
        raise ConfigError(f"--limit-mm-per-prompt has {', '.join(sorted(others))}; {', '.join(KINDS)} are built.")
    for name, count in limits.items():
        if type(count) is not int or count < 0:
            raise ConfigError(f"--limit-mm-per-prompt {name} must be a number of {KINDS[name].noun}s, got {count!r}.")
    return limits
