"""A model's own processor, as transformers has it, without what cannot be had of it here."""

from __future__ import annotations

from typing import Any


def load_processor(folder: str, token_id: int, sees_videos: bool = False) -> Any:
    from transformers import AutoConfig, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    # Pillow's arithmetic, whether torchvision is installed or not: the same picture has the same rows.
    options = {"backend": "pil", "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type == "voxtral":
        from octavo.multimodal.voxtral import VoxtralProcessor

        return VoxtralProcessor(folder, token_id)
    known = PROCESSOR_MAPPING.get(type(config), None)
    if known is not None and "video_processor" in known.get_attributes():
        return (with_videos if sees_videos else without_videos)(known).from_pretrained(folder, **options)
    return AutoProcessor.from_pretrained(folder, **options)


def without_videos(processor: Any) -> Any:
    """A class of processors without its half for videos, which cannot be made where torchvision is not installed."""
    from transformers import ProcessorMixin

    class Base(ProcessorMixin):  # type: ignore[misc]
        def __init__(self, *args: Any, video_processor: None = None, **options: Any) -> None:
            super().__init__(*args, **options)  # some classes hand it on by its name

    class Processor(processor, Base):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **options: Any) -> list[Any]:
            return [*super()._get_arguments_from_pretrained(*args, **options), None]  # the last argument of all classes

    return Processor


def with_videos(processor: Any) -> Any:
    """A class of processors whose half for videos is torchvision's, which no other is built of."""
    from transformers import AutoVideoProcessor

    class Processor(processor):  # type: ignore[misc]
        @classmethod
        def _get_arguments_from_pretrained(cls, folder: str, *args: Any, **options: Any) -> list[Any]:
            *others, _ = without_videos(processor)._get_arguments_from_pretrained(folder, *args, **options)
            return [*others, AutoVideoProcessor.from_pretrained(folder, trust_remote_code=False)]

    return Processor
