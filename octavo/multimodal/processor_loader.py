"""Loads a model's own processor from transformers, which resizes pictures and makes the features of sounds, without the
parts whose dependencies are missing here."""

from importlib import import_module
from typing import Any

# By model type: the module and class that replace transformers' own processor, whose dependencies are missing here.
_OWN = {
    "voxtral": ("voxtral", "VoxtralProcessor"),
    "granite_speech": ("granite_speech", "GraniteSpeechProcessor"),
    "granite_speech_plus": ("granite_speech", "GraniteSpeechProcessor"),
}


def load_processor(folder: str, token_id: int, sees_videos: bool = False) -> Any:
    import transformers
    from transformers import AutoConfig, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    # Always Pillow's arithmetic, even with torchvision installed: the same picture must have the same rows.
    options = {"backend": "pil", "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type in _OWN:
        module, name = _OWN[config.model_type]
        return getattr(import_module(f"octavo.multimodal.{module}"), name)(folder, token_id)
    known = PROCESSOR_MAPPING.get(type(config), None)
    if config.model_type == "glm_ocr":  # the mapping lacks it
        known = transformers.Glm46VProcessor
    if known is not None and "video_processor" in known.get_attributes():
        return (with_videos if sees_videos else without_videos)(known).from_pretrained(folder, **options)
    return AutoProcessor.from_pretrained(folder, **options)


class _NoVideos:
    """Replaces a processor's half for videos; every attribute is None. Some classes copy its settings."""

    def __getattr__(self, name: str) -> None:
        return None


def _place(processor: Any) -> int:
    """Return the position of the half for videos among a processor's arguments."""
    return int(processor.get_attributes().index("video_processor"))


def without_videos(processor: Any) -> Any:
    """Return a subclass of a processor without the half for videos, which needs torchvision."""
    from transformers import ProcessorMixin

    class Base(ProcessorMixin):  # type: ignore[misc]
        video_processor = _NoVideos()

        def __init__(self, *args: Any, video_processor: None = None, **options: Any) -> None:
            place = _place(processor)  # some classes pass it by name, some by position
            super().__init__(*args[:place], *args[place + 1 :], **options)

    class Processor(processor, Base):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **options: Any) -> list[Any]:
            found: list[Any] = super()._get_arguments_from_pretrained(*args, **options)
            found.insert(_place(processor), None)
            return found

    return Processor


def with_videos(processor: Any) -> Any:
    """Return a subclass of a processor with the half for videos, which exists only for torchvision; other parts use
    Pillow."""
    from transformers import AutoVideoProcessor

    class Processor(processor):  # type: ignore[misc]
        @classmethod
        def _get_arguments_from_pretrained(cls, folder: str, *args: Any, **options: Any) -> list[Any]:
            found: list[Any] = without_videos(processor)._get_arguments_from_pretrained(folder, *args, **options)
            found[_place(processor)] = videos = AutoVideoProcessor.from_pretrained(folder, trust_remote_code=False)
            if hasattr(videos, "stack_frames"):
                videos.stack_frames = 1  # it stacks only frames that it samples itself
            return found

    return Processor
