"""Checks the flags of media and makes the `MediaConfig`."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import MediaConfig, VideoConfig
from octavo.config.sound_flags import check_cross_attention
from octavo.config.speculation_flags import speculative_config
from octavo.errors import ConfigError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.weight_files import read_json
from octavo.media_kinds import IMAGE, KINDS, VIDEO
from octavo.models.description import ModelDescription
from octavo.models.mllama import NUM_PICTURES, max_tiles, tile_rows
from octavo.models.multimodal_models import MEDIA_FAMILIES, MediaFamily, media_token, video_token, vision_config
from octavo.speculative_config import HEAD_METHODS

ADAPTER_FILE = "adapter_config.json"  # PEFT's
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_FLAGS = (  # flags that a model without media could only ignore
    "limit_mm_per_prompt", "language_model_only", "allowed_local_media_path", "allowed_media_domains",
    "allow_private_media_addresses", "enable_mm_embeds",
    "media_io_kwargs",
)  # fmt: skip
_MODULES = ("torch", "transformers")
_DEFAULT_COUNT = 8  # of a prompt
_NUM_FRAMES, _MAX_FRAMES = 32, 768  # frames of a video; the maximum is that of Qwen2-VL's processor
_MAX_CACHE_GB = 1 << 20
_PILLOW_PIXELS = 89_478_485  # PIL.Image.MAX_IMAGE_PIXELS: a quarter of a GiB of RGB


def media_config(
    args: EngineArgs, checkpoint: Checkpoint, description: ModelDescription, max_model_len: int, device: str
) -> MediaConfig | None:
    """Return the configuration of media, or None if no media are taken. Raises `ConfigError` for flags that cannot be
    honoured."""
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
                continue  # true for this model anyway
            if getattr(args, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for models that see or hear; {checkpoint.name} does not."
                )
        return None
    if description.num_cross_tokens:
        _check_crossing(args, checkpoint, device)
    if args.language_model_only:
        if description.sees_ahead == "prompt":
            raise ConfigError(f"{checkpoint.name} is no language model without pictures; drop --language-model-only.")
        return None
    family = MEDIA_FAMILIES[description.architecture]
    kind = KINDS[family.kind]
    taken = [kind.name, *([VIDEO.name] if family.sees_videos else [])]
    if others := sorted(name for name, count in limits.items() if count and name not in taken):
        raise ConfigError(
            f"--limit-mm-per-prompt has {', '.join(others)}; {checkpoint.name} takes {' and '.join(taken)}."
        )
    speculative = speculative_config(args)
    for what, is_so in {
        "with a draft head": speculative is not None
        and speculative.method in HEAD_METHODS
        and speculative.model is not None,
        "with --load-format dummy": checkpoint.format == "dummy",
    }.items():
        if is_so:
            raise ConfigError(
                f"{kind.noun}s are not built yet {what}; add --language-model-only to serve {checkpoint.name} without."
            )
    if missing := _missing(*_MODULES, *kind.modules):
        raise ConfigError(
            f"{checkpoint.name} takes {kind.noun}s only with {', '.join(missing)}: "
            f"scripts/install {kind.extra}, or add --language-model-only."
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
        adapter=_own_adapter(checkpoint, family),
        cache_tokens=max(args.media_cache_tokens, max_model_len, description.num_cross_tokens),
        tile_rows=tile_rows(vision_config(checkpoint.config)) if description.num_cross_tokens else 0,
        max_tiles=max_tiles(vision_config(checkpoint.config)) if description.num_cross_tokens else 0,
        video=_video_config(args, checkpoint, description, limits),
        hidden_size=description.hidden_size,
        num_parts=1 + description.num_media_layers,
        has_grids=description.has_axes,
        takes_embeddings=args.enable_mm_embeds,
        kept_bytes=int(args.mm_processor_cache_gb * (1 << 30)),
        allowed_folder=_allowed_folder(args.allowed_local_media_path),
        allowed_domains=[domain.strip().rstrip(".").lower() for domain in args.allowed_media_domains],
        allows_private=args.allow_private_media_addresses,
        fetch_timeout_s=args.media_fetch_timeout,
        max_redirects=args.max_media_redirects,
    )


def with_most_pictures(args: EngineArgs, checkpoint: Checkpoint, description: ModelDescription) -> Checkpoint:
    """Return the checkpoint with the number of pictures that a token's layers may attend to: all of a prompt's."""
    if not (description.takes_media and description.num_cross_tokens):
        return checkpoint
    count = 1 if args.language_model_only else max(1, _limits(args).get(IMAGE.name, _DEFAULT_COUNT))
    return replace(checkpoint, config=dict(checkpoint.config) | {NUM_PICTURES: count})


def _check_crossing(args: EngineArgs, checkpoint: Checkpoint, device: str) -> None:
    """Raise `ConfigError` for features that are not built for models whose layers attend to a picture."""
    check_cross_attention(args, checkpoint, "models that attend to a picture", device, pools=False, is_decoder=True)


def _missing(*modules: str) -> list[str]:
    return [module for module in modules if find_spec(module) is None]


def _own_adapter(checkpoint: Checkpoint, family: MediaFamily) -> str | None:
    """Return the folder of the adapter that the checkpoint brings. Raises `ConfigError` if it is missing."""
    if not family.brings_adapter or not checkpoint.config.get("has_lora_adapter", True):
        return None
    if not (Path(checkpoint.path) / ADAPTER_FILE).is_file():
        raise ConfigError(
            f"{checkpoint.name} takes an adapter for {KINDS[family.kind].noun}s, and there is no {ADAPTER_FILE} in "
            f"{checkpoint.path}; add --language-model-only to serve it without."
        )
    return checkpoint.path


def _video_config(
    args: EngineArgs, checkpoint: Checkpoint, description: ModelDescription, limits: dict[str, int]
) -> VideoConfig | None:
    """Return the configuration of videos. None if the model takes no videos, or if modules or the processor are missing
    and no flag asks for videos; `ConfigError` if a flag does."""
    token, options = video_token(checkpoint.config, description.architecture), _video_options(args)
    missing = _missing(*VIDEO.modules)
    has_processor = _has_video_processor(Path(checkpoint.path))
    if token is not None and (options or limits.get(VIDEO.name)):
        if missing:
            raise ConfigError(
                f"{checkpoint.name} takes videos only with {', '.join(missing)}: "
                f"scripts/install {VIDEO.extra}, or leave --media-io-kwargs and the limit of videos out."
            )
        if not has_processor:
            raise ConfigError(
                f"{checkpoint.path} has no processor of videos; leave --media-io-kwargs and the limit of videos out."
            )
    if token is None or missing or not has_processor or not limits.get(VIDEO.name, 1):
        return None
    return VideoConfig(
        token_id=token,
        max_count=limits.get(VIDEO.name, 1),
        max_bytes=args.max_video_bytes,
        max_seconds=args.max_video_seconds,
        max_pixels=args.max_video_pixels,
        num_frames=options.get("num_frames", _NUM_FRAMES),
        fps=options.get("fps"),
        positions_per_s=float(vision_config(checkpoint.config).get("tokens_per_second", 4)),
    )


def _has_video_processor(folder: Path) -> bool:
    """Return whether the folder has a processor of videos, or the file that older processors share with pictures. A
    processor that was saved without torchvision has none."""
    whole = folder / "processor_config.json"
    if whole.exists() and "video_processor" in read_json(str(whole)):
        return True
    return any((folder / name).exists() for name in ("video_preprocessor_config.json", "preprocessor_config.json"))


def _video_options(args: EngineArgs) -> dict[str, Any]:
    """Return the options for videos in --media-io-kwargs. Raises `ConfigError`."""
    given = args.media_io_kwargs or {}
    if set(given) - {VIDEO.name} or not isinstance(found := given.get(VIDEO.name, {}), dict):
        raise ConfigError(f"--media-io-kwargs must have an object for video only, got {given!r:.80}.")
    if others := sorted(set(found) - {"num_frames", "fps"}):
        raise ConfigError(f"--media-io-kwargs has {', '.join(others)} for video; num_frames and fps are built.")
    count, fps = found.get("num_frames", _NUM_FRAMES), found.get("fps")
    if type(count) is not int or not 1 <= count <= _MAX_FRAMES:
        raise ConfigError(f"--media-io-kwargs num_frames must be 1 to {_MAX_FRAMES}, got {count!r}.")
    if fps is not None and not (type(fps) in (int, float) and 0 < fps <= 240):
        raise ConfigError(f"--media-io-kwargs fps must be a number up to 240, got {fps!r}.")
    return found


def _allowed_folder(given: str | None) -> str | None:
    if given is None:
        return None
    if not Path(given).is_dir():
        raise ConfigError(f"--allowed-local-media-path {given} is not a folder.")
    return str(Path(given).resolve())


def _limits(args: EngineArgs) -> dict[str, int]:
    """Return, by kind, how many media a prompt may have, as --limit-mm-per-prompt says. Raises `ConfigError`."""
    limits = args.limit_mm_per_prompt or {}
    if others := set(limits) - set(KINDS):
        raise ConfigError(f"--limit-mm-per-prompt has {', '.join(sorted(others))}; {', '.join(KINDS)} are built.")
    for name, count in limits.items():
        if type(count) is not int or count < 0:
            raise ConfigError(f"--limit-mm-per-prompt {name} must be a number of {KINDS[name].noun}s, got {count!r}.")
    return limits
