"""Pictures or sounds, and prompts, as a model takes them, by the model's own processor: the values that its tower
reads, and as many placeholder tokens as the tower gives rows. The front end's half of a model that sees or hears; the
other is `tower`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from threading import Lock, Thread
from typing import Any, NamedTuple

import numpy as np

from octavo.config import MediaConfig
from octavo.errors import LoadError, RequestError
from octavo.media_kinds import AUDIO, KINDS, MediaReader
from octavo.metrics.media import MediaMetrics
from octavo.multimodal.connector import MediaConnector, fetch_all, needs_fetching
from octavo.multimodal.sound_decoder import RATE
from octavo.request import MediaArray, MediaInput, MediaItem

logger = logging.getLogger(__name__)


# What a processor makes of the text.
_OF_TEXT = ("attention_mask", "token_type_ids", "mm_token_type_ids")


class Processed(NamedTuple):
    """What stands for a medium in a prompt, and what the tower reads."""

    text: str
    input: MediaInput


class MediaProcessor:
    """Of one model, which takes media of one kind. Threads may share it."""

    def __init__(self, config: MediaConfig) -> None:
        self.config = config
        self.kind = KINDS[config.kind]
        self.metrics = MediaMetrics(config.kind)
        self._reader = _reader(config)
        self._connector = MediaConnector(config)
        self._lock = Lock()
        self._processor: Any = None
        self._settings = ""
        # It takes seconds to import, which the first medium should not wait for.
        Thread(target=self._warm_up, name="octavo-processor", daemon=True).start()

    @property
    def placeholder(self) -> str:
        """The text that stands for a medium in a prompt. Raises `LoadError`."""
        self._load()
        return str(getattr(self._processor, f"{self.kind.name}_token"))

    def media(self, given: object) -> list[Any]:
        """The media of `multi_modal_data`. Raises `RequestError` for any that are refused."""
        name = self.kind.name
        if not isinstance(given, dict) or set(given) - {name}:
            raise RequestError(
                f"multi_modal_data must be a dictionary with {name}: {self.kind.values}, or a list of such; other "
                "media are not taken here.",
                param="multi_modal_data",
            )
        found = given.get(name)
        found = [] if found is None else list(found) if self._reader.is_many(found) else [found]
        self.check_number(len(found))
        return [self._normalized(one) for one in found]

    def open(self, given: Sequence[object]) -> list[Any]:
        """The media of a caller in the same process: URLs, which are fetched at once and waited for, and values.
        Raises `RequestError`."""
        self.check_number(len(given))
        futures = {url: self._connector.fetch(url) for url in given if isinstance(url, str) and needs_fetching(url)}
        files = {url: future.result() for url, future in futures.items()}
        return [self.decode(one, files.get(one)) if isinstance(one, str) else self._normalized(one) for one in given]

    async def fetch(self, urls: Sequence[str]) -> dict[str, bytes]:
        """The files of those of a prompt's URLs that say where one is. Raises `RequestError`."""
        self.check_number(len(urls))
        if not any(map(needs_fetching, urls)):
            return {}
        with self.metrics.phase("fetch"):
            return await fetch_all(self._connector, urls)

    def decode(self, url: str, file: bytes | None) -> Any:
        """The medium of a data: URL, or of the file that was fetched from `url`. Raises `RequestError`."""
        with self.metrics.phase("decode"), self._of_part():
            return self._reader.from_bytes(self.kind.data_of(url, self.config.max_bytes) if file is None else file)

    def _normalized(self, given: object) -> Any:
        with self._of_part():
            return self._reader.normalized(given)

    @contextmanager
    def _of_part(self) -> Iterator[None]:
        """What is refused is the fault of a part of a message."""
        try:
            yield
        except RequestError as error:
            error.param = self.kind.part
            raise

    def check_number(self, count: int) -> None:
        """Raise `RequestError` for more media than a prompt may have."""
        if count > self.config.max_count:
            raise RequestError(
                f"the prompt has {count} {self.kind.noun}s, and {self.config.max_count} are the most "
                "(--limit-mm-per-prompt).",
                param="messages",
            )

    def expand(
        self, prompt: str | Sequence[int], media: Sequence[Any], salt: str | None, encode: Callable[[str], list[int]]
    ) -> tuple[list[int], tuple[MediaItem, ...], list[MediaInput]]:
        """A prompt with one placeholder a medium -> its tokens, with what the processor makes of each medium in the
        place of that; the runs of tokens that stand for rows; and what the tower makes those of. A prompt of text is
        expanded before `encode` makes tokens of it, as the processor does. Raises `RequestError` if there are not as
        many placeholders as media.
        """
        if isinstance(prompt, str):
            texts = prompt.split(self.placeholder)
            if self.config.frames_prompts:
                texts[-1] = f"{self._processor.tokenizer.bos_token}{texts[-1]}\n"
            found = self._processed(media, len(texts) - 1, salt)
            more = (text for one, part in zip(found, texts[1:], strict=True) for text in (one.text, part))
            token_ids = encode("".join([texts[0], *more]))
        else:
            first, *parts = _split(prompt, encode(self.placeholder)[0])
            found = self._processed(media, len(parts), salt)
            token_ids = first
            for one, ids in zip(found, parts, strict=True):
                token_ids += [*encode(one.text), *ids]
        inputs = {one.input.content_hash: one.input for one in found}
        return token_ids, self._items(token_ids, [one.input for one in found]), list(inputs.values())

    def _items(self, token_ids: Sequence[int], media: Sequence[MediaInput]) -> tuple[MediaItem, ...]:
        """The runs of tokens that stand for the rows of `media`, which have them one after the other."""
        places = [i for i, token in enumerate(token_ids) if token == self.config.token_id]
        if len(places) != sum(one.num_tokens for one in media):
            raise RequestError(f"the prompt's own text has tokens that stand for a {self.kind.noun}.", param="prompt")
        items: list[MediaItem] = []
        start = 0
        for one in media:
            of_one, row = places[start : start + one.num_tokens], 0
            for _, run in groupby(enumerate(of_one), lambda entry: entry[1] - entry[0]):
                run_places = [place for _, place in run]
                items.append(MediaItem(run_places[0], len(run_places), one.content_hash, row, one.grid))
                row += len(run_places)
            start += one.num_tokens
        return tuple(items)

    def _processed(self, media: Sequence[Any], num_placeholders: int, salt: str | None) -> list[Processed]:
        """The media of one prompt, each different one processed once. Raises `RequestError`."""
        if num_placeholders != len(media):
            raise RequestError(
                f"the prompt has {num_placeholders} placeholders and {len(media)} {self.kind.noun}s; each "
                f"{self.kind.noun} needs one.",
                param="prompt",
            )
        number = 2 if self.config.counts_pictures and len(media) > 1 else 1
        self._load()
        found: dict[bytes, Processed] = {}
        digests = [self._reader.content_hash(one, f"{self._settings} {number}", salt) for one in media]
        for digest, one in zip(digests, media, strict=True):
            if digest not in found:
                with self.metrics.phase("process"):
                    found[digest] = self._process(one, digest, number)
            self.metrics.count("taken")
        return [found[digest] for digest in digests]

    def _process(self, medium: Any, digest: bytes, number: int) -> Processed:
        """A medium as the model's processor makes it in a prompt with `number` of them, alone so that no other has to
        do with it. Raises `RequestError` for a sound of which the model would hear a part, or nothing."""
        is_sound = self.kind is AUDIO
        if is_sound:
            longest_s = self.config.longest_s or getattr(self._processor, "max_audio_len", None)
            if longest_s is not None and len(medium) > longest_s * RATE:
                raise self.kind.refusal(f"it is longer than {longest_s:g} s, which is what this model hears of one.")
        found = self._processor(
            text=[self.placeholder * number],
            **{self.kind.argument: [medium] if number == 1 else [[medium] * number]},
            **({"sampling_rate": RATE} if is_sound else {}),
            return_text_replacement_offsets=True,
            return_tensors="pt" if is_sound else "np",  # some processors of sounds make no others
            add_special_tokens=False,
        )
        text = found.pop("text_replacement_offsets")[0][0]["replacement"]
        num_tokens = np.count_nonzero(np.asarray(found.pop("input_ids")) == self.config.token_id) // number
        if not num_tokens:
            raise self.kind.refusal("it is too short: nothing of it reaches the model.")
        arrays = []
        for name, values in found.items():
            if name not in _OF_TEXT:
                of_one = values if name == "batch_num_images" else values[: len(values) // number]
                of_one = np.ascontiguousarray(of_one)
                arrays.append(MediaArray(name, of_one.dtype.name, of_one.shape, of_one.tobytes()))
        grid = None
        if "image_grid_thw" in found:  # of patches, squares of which make a row
            merge = self._processor.image_processor.merge_size
            time, height, width = found["image_grid_thw"][0].tolist()
            grid = time, height // merge, width // merge
        return Processed(text, MediaInput(digest, int(num_tokens), tuple(arrays), grid))

    def _warm_up(self) -> None:
        try:
            self._load()
        except Exception as e:  # the first request with a medium gets it too
            logger.error("the processor of media cannot be loaded: %s", e)

    def _load(self) -> None:
        """Raises `LoadError`."""
        with self._lock:
            if self._processor is not None:
                return
            try:
                processor = _load_processor(self.config.folder, self.config.token_id)
                str(getattr(processor, f"{self.kind.name}_token"))  # not every class has one
            except (AttributeError, ImportError, OSError, TypeError, ValueError) as e:
                raise LoadError(f"the processor of media cannot be loaded: {str(e).strip().splitlines()[0]}") from None
            part = processor.feature_extractor if self.kind is AUDIO else processor.image_processor
            self._settings = json.dumps(part.to_dict(), sort_keys=True, default=str)
            self._processor = processor


def _reader(config: MediaConfig) -> MediaReader:
    if config.kind == "audio":
        from octavo.multimodal.sounds import SoundReader

        return SoundReader(config)
    from octavo.multimodal.pictures import PictureReader

    return PictureReader(config)


def _load_processor(folder: str, token_id: int) -> Any:
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
        return _without_videos(known).from_pretrained(folder, **options)
    return AutoProcessor.from_pretrained(folder, **options)


def _without_videos(processor: Any) -> Any:
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


def _split(token_ids: Sequence[int], placeholder: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in token_ids:
        if token == placeholder:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
