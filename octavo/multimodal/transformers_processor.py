"""A model's own processor, as transformers has it, without what cannot be had of it here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# In the place of transformers' own, which ask for what cannot be had: the modules and classes by the model's type.
_OWN = {
    "voxtral": ("voxtral", "VoxtralProcessor"),
    "granite_speech": ("granite_speech", "GraniteSpeechProcessor"),
    "granite_speech_plus": ("granite_speech", "GraniteSpeechProcessor"),
    "phi4_multimodal": ("phi4_multimodal", "Phi4Processor"),
}


def load_processor(folder: str, token_id: int, sees_videos: bool = False) -> Any:
    import transformers
    from transformers import AutoConfig, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    # Pillow's arithmetic, whether torchvision is installed or not: the same picture has the same rows.
    options = {"backend": "pil", "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type in _OWN:
        module, name = _OWN[config.model_type]
        return getattr(import_module(f"octavo.multimodal.{module}"), name)(folder, token_id)
    known = PROCESSOR_MAPPING.get(type(config), None)
    if config.model_type == "glm_ocr":  # which is not listed there
        known = transformers.Glm46VProcessor
    if known is not None and "video_processor" in known.get_attributes():
        return (with_videos if sees_videos else without_videos)(known).from_pretrained(folder, **options)
    return AutoProcessor.from_pretrained(folder, **options)


class _NoVideos:
    """In the place of a processor's half for videos, whose settings some classes copy."""

    def __getattr__(self, name: str) -> None:
        return None


def _place(processor: Any) -> int:
    """Of a processor's half for videos among its arguments."""
    return int(processor.get_attributes().index("video_processor"))


def without_videos(processor: Any) -> Any:
    """A class of processors without its half for videos, which cannot be made where torchvision is not installed."""
    from transformers import ProcessorMixin

    class Base(ProcessorMixin):  # type: ignore[misc]
        video_processor = _NoVideos()

        def __init__(self, *args: Any, video_processor: None = None, **options: Any) -> None:
            place = _place(processor)  # some classes hand it on by its name, some by its place
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
    """A class of processors whose half for videos is torchvision's, which no other is built of."""
    from transformers import AutoVideoProcessor

    class Processor(processor):  # type: ignore[misc]
        @classmethod
        def _get_arguments_from_pretrained(cls, folder: str, *args: Any, **options: Any) -> list[Any]:
            found: list[Any] = without_videos(processor)._get_arguments_from_pretrained(folder, *args, **options)
            found[_place(processor)] = videos = AutoVideoProcessor.from_pretrained(folder, trust_remote_code=False)
            if hasattr(videos, "stack_frames"):
                videos.stack_frames = 1  # several of a second side by side are of frames that it samples itself
            return found

    return Processor
