"""Prepares media and prompts with the model's own processor: the arrays that the tower reads, and a prompt with as many
placeholder tokens as the tower gives rows. This module runs in the front end; `tower` runs in the core.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from threading import Lock, Thread
from typing import Any, NamedTuple

import numpy as np

from octavo.config import MediaConfig
from octavo.errors import LoadError, RequestError
from octavo.media_kinds import AUDIO, IMAGE, VIDEO, MediaKind, SentEmbeddings, SentMedium, checked_uuid
from octavo.metrics.media_metrics import MediaMetrics
from octavo.multimodal.connector import fetch_all, needs_fetching
from octavo.multimodal.embeddings import Embeddings, in_place_of
from octavo.multimodal.media_cache import MediaCache, medium_bytes
from octavo.multimodal.media_loader import MediaLoader
from octavo.multimodal.processor_loader import load_processor
from octavo.multimodal.sound_decoder import RATE
from octavo.multimodal.videos import Video
from octavo.request import EMBEDDINGS, MediaArray, MediaInput, MediaItem

logger = logging.getLogger(__name__)


_PARTS = {"image": "image_processor", "audio": "feature_extractor", "video": "video_processor"}  # parts of a processor
# Arrays of a processed video. Some towers take the frames as pictures.
_OF_VIDEO = (
    "pixel_values_videos", "video_grid_thw", "video_position_ids", "num_frames_per_video", "pixel_values",
    "pixel_attention_mask", "target_sizes_videos", "video_merge_sizes", "video_compression_mask",
)  # fmt: skip
_NUM_GUESSES = 8  # tries to find a medium's size that fits
# Arrays of the text in a processor's output.
_OF_TEXT = ("attention_mask", "token_type_ids", "mm_token_type_ids")


class Processed(NamedTuple):
    """A processed medium: the text that stands for it in a prompt, and the input of the tower."""

    text: str
    input: MediaInput


class MediaProcessor:
    """Processes the media of one model. Threads may share it."""

    def __init__(self, config: MediaConfig) -> None:
        self.config = config
        self._kept = MediaCache(config.kept_bytes)
        self._loaders: dict[str, MediaLoader] = {config.kind: MediaLoader(config, self._kept)}
        self._tokens: dict[str, int] = {config.kind: config.token_id}  # by kind: the token that each row replaces
        if (video := config.video) is not None:
            bounds = replace(config, kind="video", max_count=video.max_count, max_bytes=video.max_bytes)
            self._loaders[VIDEO.name] = MediaLoader(bounds, self._kept)
            self._tokens[VIDEO.name] = video.token_id
        self.kinds = tuple(loader.kind for loader in self._loaders.values())  # kinds that the model takes
        self.metrics = MediaMetrics(*self._loaders)
        self._lock = Lock()
        self._processor: Any = None
        self._settings: dict[str, str] = {}  # by kind
        self._found_marks: dict[str, tuple[str, str, str]] = {}  # by kind
        # The import takes seconds; the first medium should not wait for it.
        Thread(target=self._warm_up, name="octavo-processor", daemon=True).start()

    @property
    def placeholders(self) -> dict[str, str]:
        """Return, by kind, the text that stands for a medium in a prompt. Raises `LoadError`."""
        self._load()
        return {name: str(getattr(self._processor, f"{name}_token")) for name in self._loaders}

    def media(self, given: object, uuids: object, salt: str | None) -> dict[str, list[Any]]:
        """Return, by kind, the media of `multi_modal_data`; `multi_modal_uuids` names them. Raises `RequestError` if
        one is refused."""
        if not isinstance(given, Mapping) or set(given) - set(self._loaders):
            values = ", or ".join(f"{kind.name}: {kind.values}" for kind in self.kinds)
            raise RequestError(
                f"multi_modal_data must be a dictionary with {values}, or a list of such; other media are not taken "
                "here.",
                param="multi_modal_data",
            )
        if not isinstance(uuids, Mapping | None) or set(uuids or ()) - set(given):
            raise _wrong_uuids()
        found = {}
        for name, values in given.items():
            loader = self._loaders[name]
            ids = None if uuids is None else uuids.get(name)
            is_one = not loader.is_many(values) and (values is not None or isinstance(ids, str))
            listed = [values] if is_one else [] if values is None else list(values)
            named = [ids] if ids is None or isinstance(ids, str) else ids
            if ids is None:
                named = [None] * len(listed)
            if not isinstance(named, list | tuple) or len(named) != len(listed):
                raise _wrong_uuids()
            loader.check_number(len(listed))
            found[name] = [
                self._medium(SentMedium(loader.kind, value, checked_uuid(uuid)), salt, loader.normalized)
                for value, uuid in zip(listed, named, strict=True)
            ]
        return found

    def open(self, media: Sequence[SentMedium], salt: str | None = None) -> dict[str, list[Any]]:
        """Return, by kind, the media of a caller in the same process. Values are read; URLs are fetched concurrently,
        and the call waits for them. Raises `RequestError`."""
        self._check_numbers(media)
        futures = {url: self._loaders[kind].connector.fetch(url) for kind, url in _to_fetch(media)}
        return self.decode(media, {url: future.result() for url, future in futures.items()}, salt)

    def needs_fetching(self, media: Sequence[SentMedium]) -> bool:
        """Return whether any of a prompt's media must be fetched. Raises `RequestError` for more than a prompt may
        have."""
        self._check_numbers(media)
        return bool(_to_fetch(media))

    async def fetch(self, media: Sequence[SentMedium]) -> dict[str, bytes]:
        """Return, by URL, the files of a prompt's media that must be fetched. Raises `RequestError`."""
        self._check_numbers(media)
        files: dict[str, bytes] = {}
        for name, loader in self._loaders.items():
            if urls := [url for kind, url in _to_fetch(media) if kind == name]:
                with self.metrics.phase(name, "fetch"):
                    files |= await fetch_all(loader.connector, urls)
        return files

    def decode(self, media: Sequence[SentMedium], files: Mapping[str, bytes], salt: str | None) -> dict[str, list[Any]]:
        """Return, by kind, the decoded media of a conversation. `files` has the fetched ones by URL. Raises
        `RequestError`."""
        found: dict[str, list[Any]] = {}
        for one in media:
            read = partial(self._read, one.kind, files, salt)
            found.setdefault(one.kind.name, []).append(self._medium(one, salt, read))
        return found

    def _read(self, kind: MediaKind, files: Mapping[str, bytes], salt: str | None, given: object) -> Any:
        """Return the medium of a URL, of embeddings, or of a value. Raises `RequestError`."""
        loader = self._loaders[kind.name]
        if not isinstance(given, str | SentEmbeddings):
            return loader.normalized(given)
        with self.metrics.phase(kind.name, "decode"):
            if isinstance(given, SentEmbeddings):
                return loader.embeddings.read(given.value)
            return loader.read(given, files.get(given), salt)

    def _medium(self, sent: SentMedium, salt: str | None, read: Callable[[Any], Any]) -> Any:
        """Return the medium that `read` makes of `sent`, and keep it under its uuid if it has one. If only a uuid was
        sent, return the medium that is kept under it. Raises `RequestError`."""
        kind, given, uuid = sent
        key = "uuid", kind.name, salt or "", uuid
        try:
            if given is not None or uuid is None:
                medium = read(given)
            elif (medium := self._kept.find(key)) is None:
                raise kind.refusal(
                    "nothing is kept under its uuid: it was not sent here with the same cache_salt, or had to go "
                    "(--mm-processor-cache-gb). Send it again."
                )
        except RequestError as error:
            error.param = kind.part  # the refused medium is a part of a message
            raise
        if given is not None and uuid is not None:
            self._kept.keep(key, medium, medium_bytes(medium))
        return medium

    def _check_numbers(self, media: Sequence[SentMedium]) -> None:
        for name, loader in self._loaders.items():
            loader.check_number(sum(one.kind.name == name for one in media))

    def expand(
        self,
        prompt: str | Sequence[int],
        media: Mapping[str, Sequence[Any]],
        salt: str | None,
        encode: Callable[[str], list[int]],
    ) -> tuple[list[int], tuple[MediaItem, ...], list[MediaInput]]:
        """Expand a prompt that has one placeholder for each medium. Return its tokens, with the processor's text in
        place of each placeholder; the runs of tokens that stand for rows; and the tower's inputs for these rows. A
        prompt of text is expanded before `encode` makes tokens of it, as the processor does. Raises `RequestError` if
        the numbers of placeholders and media differ.
        """
        if isinstance(prompt, str):
            kind_of = {text: name for name, text in self.placeholders.items()}
            texts = re.split("|".join(f"({re.escape(text)})" for text in kind_of), prompt)
            texts = [text for text in texts if text is not None]
            names = [kind_of[text] for text in texts[1::2]]
            if self.config.frames_prompts:
                texts[-1] = f"{self._processor.tokenizer.bos_token}{texts[-1]}\n"
            found = self._processed(media, names, salt)
            more = (text for one, part in zip(found, texts[2::2], strict=True) for text in (one.text, part))
            token_ids = encode("".join([texts[0], *more]))
        else:
            names, [first, *parts] = _split(prompt, {encode(text)[0]: name for name, text in self.placeholders.items()})
            found = self._processed(media, names, salt)
            token_ids = first
            for one, ids in zip(found, parts, strict=True):
                token_ids += [*encode(one.text), *ids]
        inputs = {one.input.content_hash: one.input for one in found}
        return token_ids, self._items(token_ids, [one.input for one in found]), list(inputs.values())

    def largest(self, max_tokens: int) -> list[MediaInput]:
        """Return, for each kind, the media that cost a tower most among those that fit into `max_tokens` of a prompt.
        Raises `LoadError`."""
        self._load()
        found: list[MediaInput] = []
        for loader in self._loaders.values():
            share = 1.0
            for _ in range(_NUM_GUESSES):
                try:
                    first, *others = loader.reader.largest(share)
                    made = self._process(loader, first, b"").input
                except RequestError:  # too large for the model
                    share /= 2
                    continue
                if made.num_tokens <= max_tokens:
                    more = (self._process(loader, other, b"").input for other in others)
                    found += [made, *(one for one in more if one.num_tokens <= max_tokens)]
                    break
                share *= max_tokens / made.num_tokens
        return found

    def _items(self, token_ids: Sequence[int], media: Sequence[MediaInput]) -> tuple[MediaItem, ...]:
        """Return the runs of tokens that stand for the rows of `media`, in the order of `media`."""
        tokens = set(self._tokens.values())
        places = [i for i, token in enumerate(token_ids) if token in tokens]
        if self.config.tile_rows and len(places) == len(media):
            return tuple(
                MediaItem(place, 0, one.content_hash, num_rows=one.num_tokens)
                for place, one in zip(places, media, strict=True)
            )
        if len(places) != sum(one.num_tokens for one in media):
            nouns = " or a ".join(kind.noun for kind in self.kinds)
            raise RequestError(f"the prompt's own text has tokens that stand for a {nouns}.", param="prompt")
        items: list[MediaItem] = []
        start = 0
        for one in media:
            of_one, row = places[start : start + one.num_tokens], 0
            runs = [
                [place for _, place in run] for _, run in groupby(enumerate(of_one), lambda entry: entry[1] - entry[0])
            ]
            grid = one.grid
            if grid is not None:  # a video whose frames have text between them
                grid = grid[0] // len(runs), grid[1], grid[2]
            for run_places in runs:
                items.append(MediaItem(run_places[0], len(run_places), one.content_hash, row, grid, one.time_step))
                row += len(run_places)
            start += one.num_tokens
        return tuple(items)

    def _processed(self, media: Mapping[str, Sequence[Any]], names: Sequence[str], salt: str | None) -> list[Processed]:
        """Return the processed media of one prompt in the order of its placeholders, whose kinds are `names`. Equal
        media are processed once. Raises `RequestError`."""
        for name, loader in self._loaders.items():
            if (count := len(media.get(name, ()))) != names.count(name):
                raise RequestError(
                    f"the prompt has {names.count(name)} placeholders and {count} {loader.kind.noun}s; each "
                    f"{loader.kind.noun} needs one.",
                    param="prompt",
                )
        self._load()
        found: dict[bytes, Processed] = {}
        digests = []
        following = {name: iter(values) for name, values in media.items()}
        for name in names:
            medium, loader = next(following[name]), self._loaders[name]
            # Media of its own kind, up to the number that makes a difference.
            number = 2 if self.config.counts_pictures and name == IMAGE.name and len(media[name]) > 1 else 1
            if isinstance(medium, Embeddings):
                digest = medium.content_hash(name, salt)
            else:
                digest = loader.reader.content_hash(medium, f"{self._settings[name]} {number}", salt)
            if digest not in found:
                with self.metrics.phase(name, "process"):
                    found[digest] = self._made(loader, medium, digest, number)
            self.metrics.count(name, "taken")
            digests.append(digest)
        return self._numbered(names, [found[digest] for digest in digests])

    def _numbered(self, names: Sequence[str], found: list[Processed]) -> list[Processed]:
        """Return `found` with each medium's number in its text, for processors that write numbers. A medium's number
        counts the prompt's earlier media of its kind; each was processed alone, with number 0."""
        start, end = (getattr(self._processor, f"image_id_{side}_token", "") for side in ("start", "end"))
        numbers = [names[:i].count(name) for i, name in enumerate(names)] if start else []
        for i, number in enumerate(numbers):
            text = found[i].text.replace(f"{start}0{end}", f"{start}{number}{end}", 1)
            found[i] = found[i]._replace(text=text)
        return found

    def _made(self, loader: MediaLoader, medium: Any, digest: bytes, number: int) -> Processed:
        """Return the result of `_process`, from the cache if it has it."""
        key = "made", digest
        made: Processed | None = self._kept.find(key)
        if made is None:
            made = self._process(loader, medium, digest, number)
            self._kept.keep(key, made, sum(len(array.values) for array in made.input.arrays))
        return made

    def _process(self, loader: MediaLoader, medium: Any, digest: bytes, number: int = 1) -> Processed:
        """Return a processed medium, as number `number` of its kind in the prompt. Each medium is processed alone, so
        that no other can change it. Raises `RequestError` for a sound that the model would hear only in part, or not at
        all."""
        if isinstance(medium, Embeddings):
            return self._process_embeddings(loader, medium, digest)
        if loader.kind is VIDEO:
            return self._process_video(medium, digest)
        kind = loader.kind
        if self.config.tile_rows:
            return self._process_tiles(medium, digest)
        is_sound = kind is AUDIO
        if is_sound:
            longest_s = self.config.longest_s or getattr(self._processor, "max_audio_len", None)
            if longest_s is not None and len(medium) > longest_s * RATE:
                raise kind.refusal(f"it is longer than {longest_s:g} s, the most that this model takes.")
        found = self._processor(
            text=[self.placeholders[kind.name] * number],
            **{kind.argument: [medium] if number == 1 else [[medium] * number]},
            **({"sampling_rate": RATE} if is_sound else {}),
            return_text_replacement_offsets=True,
            return_tensors="pt",  # some processors return only torch tensors
            add_special_tokens=False,
        )
        text = found.pop("text_replacement_offsets")[0][0]["replacement"]
        num_tokens = np.count_nonzero(np.asarray(found.pop("input_ids")) == self._tokens[kind.name]) // number
        if not num_tokens:
            raise kind.refusal("it is too short: the model would get no part.")
        arrays = []
        for name, values in found.items():
            if name not in _OF_TEXT:
                arrays.append(_array(name, values if name == "batch_num_images" else values[: len(values) // number]))
        grid = None
        if "image_grid_thw" in found:  # the grid counts patches; a square of them makes a row
            merge = self._processor.image_processor.merge_size
            time, height, width = found["image_grid_thw"][0].tolist()
            grid = time, height // merge, width // merge
        return Processed(text, MediaInput(digest, int(num_tokens), tuple(arrays), grid))

    def _process_tiles(self, picture: Any, digest: bytes) -> Processed:
        """Return a processed picture whose rows replace no token: layers attend to them, and its token stays."""
        found = self._processor.image_processor([[picture]], return_tensors="np")
        [[num_tiles]] = found.pop("num_tiles")
        arrays = tuple(_array(name, values) for name, values in found.items())
        num_rows = int(num_tiles) * self.config.tile_rows
        return Processed(self.placeholders[IMAGE.name], MediaInput(digest, num_rows, arrays))

    def _process_video(self, video: Video, digest: bytes) -> Processed:
        """Return a video's sampled frames as the model's processor makes them. Raises `RequestError`."""
        assert self.config.video is not None
        count, height, width, _ = video.frames.shape
        metadata = {
            "total_num_frames": video.total, "fps": video.rate, "frames_indices": list(video.indices), "height": height,
            "width": width, "duration": video.total / video.rate if video.rate else None,
        }  # fmt: skip
        try:
            found = self._processor(
                text=[self.placeholders[VIDEO.name]],
                videos=[video.frames],
                video_metadata=[metadata],
                do_sample_frames=False,
                return_text_replacement_offsets=True,
                return_tensors="pt",
                add_special_tokens=False,
            )
        except ValueError:  # the frames are too small for the processor, or too many
            raise VIDEO.refusal(
                f"the model's processor takes no {count} frames of {width} x {height} pixels."
            ) from None
        [[replaced]] = found["text_replacement_offsets"]
        num_tokens = int(np.count_nonzero(np.asarray(found["input_ids"]) == self.config.video.token_id))
        if not num_tokens:
            raise VIDEO.refusal("the model would get no part.")
        arrays = [_array(name, found[name]) for name in _OF_VIDEO if name in found]
        grid, step = None, 1.0
        if "video_grid_thw" in found and self.config.has_grids:
            merge = self._processor.video_processor.merge_size
            time, rows, columns = found["video_grid_thw"][0].tolist()
            grid = time, rows // merge, columns // merge
        if "second_per_grid_ts" in found:
            step = float(np.float32(self.config.video.positions_per_s) * np.float32(found["second_per_grid_ts"][0]))
        return Processed(replaced["replacement"], MediaInput(digest, num_tokens, tuple(arrays), grid, step))

    def _process_embeddings(self, loader: MediaLoader, given: Embeddings, digest: bytes) -> Processed:
        """Return embeddings as a processed medium. Its text has the marks that surround a medium's tokens, and a token
        for each row."""
        kind, num_tokens = loader.kind, given.rows.shape[1]
        array = MediaArray(EMBEDDINGS, given.rows.dtype.name, given.rows.shape, given.rows.tobytes())
        if (of_tile := self.config.tile_rows) > 0:
            most = self.config.max_tiles
            if num_tokens % of_tile or num_tokens > most * of_tile:
                raise kind.refusal(f"its embeddings must be those of 1 to {most} tiles of {of_tile} rows.")
            return Processed(self.placeholders[kind.name], MediaInput(digest, num_tokens, (array,)))
        grid = None
        if given.grid is not None:
            merge = getattr(self._processor, _PARTS[kind.name]).merge_size
            time, height, width = given.grid
            grid = time, height // merge, width // merge
            has_one = kind is VIDEO or time == 1
            if not has_one or height % merge or width % merge or time * grid[1] * grid[2] != num_tokens:
                raise kind.refusal(f"its {kind.name}_grid_thw {list(given.grid)} is not that of {num_tokens} rows.")
            if kind is VIDEO:
                assert self.config.video is not None
                text, step = in_place_of(self._processor, given.grid, given.times, self.config.video.positions_per_s)
                return Processed(text, MediaInput(digest, num_tokens, (array,), grid, step))
        before, token, behind = self._marks(loader)
        return Processed(before + token * num_tokens + behind, MediaInput(digest, num_tokens, (array,), grid))

    def _marks(self, loader: MediaLoader) -> tuple[str, str, str]:
        """Return the text before a medium's rows, the text for each row, and the text behind them. The first call finds
        them by processing an example. Raises `RequestError` for models with marks between rows."""
        kind = loader.kind
        if (found := self._found_marks.get(kind.name)) is None:
            example = self._process(loader, loader.reader.example(), b"")
            tokenizer = getattr(self._processor, "tokenizer", None)
            token = (
                tokenizer.convert_ids_to_tokens(self._tokens[kind.name]) if tokenizer else self.placeholders[kind.name]
            )
            before, run, behind = example.text.partition(token * example.input.num_tokens)
            if not run:
                token = ""
            self._found_marks[kind.name] = found = before, token, behind
        before, token, behind = found
        if not token or token in before + behind:
            raise kind.refusal(f"this model has marks between rows of a {kind.noun}; embeddings are not built for it.")
        return found

    def _warm_up(self) -> None:
        try:
            self._load()
        except Exception as e:  # the first request with a medium raises the error too
            logger.error("the processor of media cannot be loaded: %s", e)

    def _load(self) -> None:
        """Load the processor once. Raises `LoadError`."""
        with self._lock:
            if self._processor is not None:
                return
            try:
                processor = load_processor(self.config.folder, self.config.token_id, self.config.video is not None)
                for name in self._loaders:
                    str(getattr(processor, f"{name}_token"))  # not every class has one
            except (AttributeError, ImportError, OSError, TypeError, ValueError) as e:
                raise LoadError(f"the processor of media cannot be loaded: {str(e).strip().splitlines()[0]}") from None
            for name in self._loaders:
                part = getattr(processor, _PARTS[name])
                self._settings[name] = json.dumps(part.to_dict(), sort_keys=True, default=str)
            self._processor = processor


def _array(name: str, values: Any) -> MediaArray:
    """Return a tensor or an array as a `MediaArray`. Llama 4's tensors are bfloat16, which numpy lacks and float32
    towers do not take; they become float32."""
    found = np.ascontiguousarray(values.float() if str(values.dtype) == "torch.bfloat16" else values)
    return MediaArray(name, found.dtype.name, found.shape, found.tobytes())


def _split(token_ids: Sequence[int], placeholders: Mapping[int, str]) -> tuple[list[str], list[list[int]]]:
    """Return the kinds of a prompt's placeholders, in order, and the tokens before, between and behind them."""
    names: list[str] = []
    parts: list[list[int]] = [[]]
    for token in token_ids:
        if token in placeholders:
            names.append(placeholders[token])
            parts.append([])
        else:
            parts[-1].append(token)
    return names, parts


def _to_fetch(media: Sequence[SentMedium]) -> list[tuple[str, str]]:
    """Return the kind and the URL of each medium that must be fetched."""
    return [(one.kind.name, one.given) for one in media if isinstance(one.given, str) and needs_fetching(one.given)]


def _wrong_uuids() -> RequestError:
    return RequestError(
        "multi_modal_uuids must be a dictionary with a uuid, or None, for each medium of multi_modal_data.",
        param="multi_modal_uuids",
    )
