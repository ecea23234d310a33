"""Makes the core's `EngineRequest` of a prompt: tokenizes it and checks it against the model's limits."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

import msgspec

from octavo.config import EngineConfig, MediaConfig
from octavo.engine.off_loop import MAX_INLINE_LENGTH
from octavo.engine.vllm_names import refuse_kwargs
from octavo.errors import LoadError, RequestError, naming_prompt
from octavo.kv_cache.block_hashes import prompt_hashes
from octavo.loading.piece_encoder import PieceEncoder
from octavo.lora.adapter_files import source
from octavo.lora.request import LoRARequest
from octavo.media_kinds import KINDS, MediaKind, SentMedium
from octavo.request import AdapterSource, EngineRequest, MediaInput, MediaItem, Prompt, num_positions
from octavo.sampling.processor_classes import LogitsProcessor, with_classes
from octavo.sampling_params import SEED_BITS, SamplingParams, is_unicode
from octavo.structured_output.grammar_builder import WantedGrammar, make_checked_grammar

if TYPE_CHECKING:
    from tokenizers import Encoding

    from octavo.loading.tokenizer import ModelTokenizer
    from octavo.multimodal.audio_features import AudioFeatureExtractor
    from octavo.multimodal.model_processor import MediaProcessor
    from octavo.multimodal.prompt_embeds import PromptEmbedsReader

# str, a list of token ids, {"prompt": str} or {"prompt_token_ids": [int]}; dictionaries may also hold "cache_salt", and
# "prediction", the likely answer as text or token ids, and "multi_modal_data", {"image": PIL.Image} or {"audio":
# samples at 16 kHz, or (samples, rate)}, or lists of these, one item for each placeholder of the prompt in order;
# "multi_modal_uuids", {"image": "name"} or a list of names, are names by which later prompts may refer to media, with
# None in place of the medium. {"prompt_embeds": a tensor [tokens, hidden_size], or one in base64} is a prompt without
# tokens.
PromptInput = str | list[int] | Mapping[str, Any]


def as_prompts(prompts: PromptInput | Sequence[PromptInput] | None) -> Sequence[PromptInput]:
    """Return prompts as a list; `given` may be a single one. Raises `RequestError` for anything else."""
    if isinstance(prompts, str | Mapping) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        return [cast(PromptInput, prompts)]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be one or a list of them, got {type(prompts).__name__}.", param="prompt")
    return cast(Sequence[PromptInput], prompts)


_PROMPT_FIELDS = {
    "prompt", "prompt_token_ids", "prompt_embeds", "multi_modal_data", "multi_modal_uuids", "cache_salt", "prediction",
}  # fmt: skip

# Where a text comes from: the field, its index there, and how many texts the field has.
Source = tuple[str, int, int]


def sources_of(field: str, count: int) -> list[Source]:
    """Return the sources of all texts of a field."""
    return [(field, index, count) for index in range(count)]


_LONG_TOKEN_CHARACTERS = 16  # more than a token has in most texts
_MAX_CHARACTERS_PER_TOKEN = 1024  # more than the longest token of any vocabulary we know


class InputProcessor:
    """Used by `LLM` and the asynchronous engine. Its methods raise `RequestError` for invalid requests."""

    def __init__(self, config: EngineConfig, tokenizer: ModelTokenizer) -> None:
        self._config = config
        self.processor_classes: list[type[LogitsProcessor]] = []  # of an `LLM`
        self.model = model = config.model
        self.scheduler = config.scheduler
        self._lora = config.lora
        self._hashed_size = config.cache.block_size if config.cache.enable_prefix_caching else 0
        self._num_engines = len(config.served_ranks)
        self._closes_objects = config.disable_additional_properties
        self.tokenizer = tokenizer
        self._ids = itertools.count()
        self._id_prefix = ""
        self._seeds = random.Random(model.seed)
        self.eos_token_ids = model.checkpoint.end_token_ids(tokenizer.eos_token_id, model.vocab_size)
        self.media: MediaProcessor | None = None  # if the model takes media
        if config.media is not None:
            from octavo.multimodal.model_processor import MediaProcessor

            self.media = MediaProcessor(config.media)
        self.prompt_embeds: PromptEmbedsReader | None = None  # if prompts may be embeddings
        if config.prompt_embeds is not None:
            from octavo.multimodal.prompt_embeds import PromptEmbedsReader

            self.prompt_embeds = PromptEmbedsReader(config.prompt_embeds)
        self.listener: AudioFeatureExtractor | None = None  # if the model transcribes speech
        if config.sound is not None:
            from octavo.multimodal.audio_features import AudioFeatureExtractor

            self.listener = AudioFeatureExtractor(config.sound)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens: id by text."""
        added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def has_special_token(self) -> Callable[[str], bool]:
        """A function that returns whether a text contains a special token. Its results are cached, because some
        vocabularies have a thousand special tokens."""
        return lru_cache(maxsize=256)(lambda text: any(token in text for token in self.special_tokens))

    @cached_property
    def _pieces(self) -> PieceEncoder:
        return PieceEncoder(self.tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._check_characters(text)
        try:
            if not add_special_tokens:
                return self._pieces.encode(text)
            ids: list[int] = self.tokenizer.backend_tokenizer.encode_batch_fast([text])[0].ids
        except (TypeError, UnicodeEncodeError):  # lone surrogates
            raise RequestError("the prompt is not valid Unicode text.", param="prompt") from None
        return ids

    def be_one_of_several(self, number: int, place: int) -> None:
        """Draw other ids and seeds than the other front ends. This one is front end `number`."""
        self._id_prefix = f"{number}-"
        self._seeds = random.Random(f"{self.model.seed}, {place}")

    def new_id(self) -> str:
        return f"{self._id_prefix}{next(self._ids)}"

    def _begin(self, token_ids: list[int]) -> list[int]:
        """Return the tokens that the tokenizer puts before a text (BOS), if these tokens begin with them."""
        pairs = zip(token_ids, self.encode(""), strict=False)
        return [own for own, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def encode_all(
        self,
        texts: Sequence[str | tuple[str, str]],
        sources: Sequence[Source],
        add_special_tokens: bool,
        many: int,
        *,
        has_offsets: bool = False,
    ) -> list[Encoding]:
        """Return the encodings of texts and pairs; `sources` says where each comes from, for errors. `many` or more
        texts are encoded by several threads. With `has_offsets`, the offsets of tokens take a fifth of the time."""
        for text, its in zip(texts, sources, strict=True):
            for part in (text,) if isinstance(text, str) else text:
                with naming_prompt(*its):
                    self._check_characters(part)
                    if not is_unicode(part):
                        raise RequestError("the prompt is not valid Unicode text.", param="prompt")
        backend = self.tokenizer.backend_tokenizer
        encode = backend.encode_batch if has_offsets else backend.encode_batch_fast
        if len(texts) >= many:
            return list(encode(list(texts), add_special_tokens=add_special_tokens))
        return [encode([text], add_special_tokens=add_special_tokens)[0] for text in texts]

    def _check_characters(self, text: str) -> None:
        if len(text) > self.model.max_model_len * _MAX_CHARACTERS_PER_TOKEN:
            raise RequestError(
                f"the prompt has {len(text)} characters, which cannot fit the model's {self.model.max_model_len} "
                "tokens.",
                param="prompt",
                code="context_length_exceeded",
            )

    def process(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        add_special_tokens: bool = True,
        grammar: WantedGrammar | None = None,
        clamps_max_tokens: bool = True,
        scores_prompt: bool = False,
        adapter: AdapterSource | None = None,
        data_parallel_rank: int | None = None,
    ) -> EngineRequest:
        """Return the request for the core, with a unique id. Without `params` the model's defaults apply.

        `grammar` replaces the structured output that `params` ask for. With `clamps_max_tokens` a `max_tokens` that
        does not fit is lowered; without, the request is refused. If a request only `scores_prompt`, the prompt may be
        as long as the model's limit. `adapter` is a result of `find_adapter`.
        """
        self.refuse_if_it_pools()
        self.check_rank(data_parallel_rank)
        if params is None:
            params = SamplingParams(**self.model.default_sampling_params)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}.")
        self._check_scheduling(params, priority)
        counts = self._logprobs(params)
        room = 0 if scores_prompt else 1
        made, media = self._make_prompt(prompt, params, add_special_tokens, room)
        num_places = num_positions(len(made.token_ids), made.media)
        if num_places + room > (limit := self.model.max_model_len):
            raise RequestError(
                f"the prompt's media take it to position {num_places}, and the model has {limit}: its videos are too "
                "long, or their times too far apart.",
                param="prompt",
                code="context_length_exceeded",
            )
        if media and not made.is_embedded and self.media is not None:
            adapter = _own_adapter(self.media.config) or adapter
        if adapter is not None:
            made = msgspec.structs.replace(made, adapter=adapter.identity)
        params = with_classes(copy.copy(params), self.processor_classes, self._config)  # its values have been checked
        for name, count in counts.items():
            setattr(params, name, count)
        if params.seed is None:  # drawn here, so that the next core draws the same tokens if one dies
            params.seed = self._seeds.getrandbits(SEED_BITS)
        self._check_token_ids(params)
        if grammar is None and params.structured_outputs is not None:
            grammar = WantedGrammar(params.structured_outputs, special_tokens=self.special_tokens)
        check = None
        if grammar is not None:
            params.grammar, check = make_checked_grammar(grammar, closes_objects=self._closes_objects)
            params.structured_outputs = None
        params.bad_words_token_ids = self._bad_words(params.bad_words) if params.bad_words else None
        return EngineRequest(
            request_id=self.new_id(),
            prompt=made,
            block_hashes=prompt_hashes(made, self._hashed_size) if self._hashed_size else b"",
            params=params,
            eos_token_ids=self.eos_token_ids,
            max_tokens=self._max_tokens(params, num_places - (1 - room), clamps_max_tokens),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            prediction=[] if isinstance(prompt, str | list) else self._prediction(prompt.get("prediction")),
            adapter=adapter,
            data_parallel_rank=data_parallel_rank,
            media=media,
            final_check=check,
        )

    def find_adapter(self, asked: LoRARequest) -> AdapterSource:
        """Return an adapter's location and the identity of its contents. May read files, and fetch them from the
        hub."""
        if self._lora is None or not self._lora.takes_requests:
            raise RequestError(f"adapter {asked.lora_name!r} needs --enable-lora.", param="lora_request")
        try:
            return source(asked.lora_name, asked.lora_path, self._lora.download_dir, may_fetch=True)
        except LoadError as e:
            raise RequestError(f"adapter {asked.lora_name!r}: {e}", param="lora_request") from None

    def refuse_if_it_pools(self) -> None:
        """Raise `RequestError` if the model does not generate."""
        pooling = self.model.pooling
        if pooling is not None:
            raise RequestError(
                f"{self.model.served_model_names[0]} is a pooling model and generates no text. Its tasks: "
                f"{', '.join(pooling.tasks)}. Use /v1/embeddings, /pooling, /classify, /score or /rerank; in Python "
                "LLM.embed, encode, classify or score.",
                code="model_pools",
            )

    def _prediction(self, given: object) -> list[int]:
        """Return the tokens of a predicted output, without tokens that no answer can have."""
        if given is None:
            return []
        limit = self.model.max_model_len
        if isinstance(given, str):
            tokens = self.encode(given[: limit * _MAX_CHARACTERS_PER_TOKEN], add_special_tokens=False)
        else:
            tokens = self.check_ids(given, "prediction")
        return [token for token in tokens[:limit] if token < self.model.vocab_size]

    def _logprobs(self, params: SamplingParams) -> dict[str, int]:
        """Return the number of log-probabilities that each field asks for, by field. Raises `RequestError` for more
        than allowed."""
        size, limit = self.model.vocab_size, self.model.max_logprobs
        counts = {}
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, name)) is None:
                continue
            counts[name] = min(size if asked == -1 else asked, size)
            if counts[name] > limit != -1:
                all_of_it = f" (all {size} of the vocabulary)" if asked == -1 else ""
                raise RequestError(
                    f"{name}: a request may have {limit} log-probabilities of a position here (--max-logprobs), got "
                    f"{asked}{all_of_it}.",
                    param=name,
                )
        return counts

    def _make_prompt(
        self, prompt: PromptInput, params: SamplingParams, add_special_tokens: bool, room: int
    ) -> tuple[Prompt, list[MediaInput]]:
        """Return a caller's prompt, tokenized, truncated if asked for, and checked; and the inputs of its media."""
        if isinstance(prompt, str | list):
            prompt = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if not isinstance(prompt, Mapping):
            raise RequestError(
                "a prompt must be text, token ids or a dictionary with prompt or prompt_token_ids, got "
                f"{type(prompt).__name__}.",
                param="prompt",
            )
        _check_fields(prompt)
        text, salt = prompt.get("prompt"), prompt.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and is_unicode(salt)):
            raise RequestError("cache_salt must be a string of valid Unicode.", param="cache_salt")
        if (embeds := prompt.get("prompt_embeds")) is not None:
            return self._make_embedded_prompt(prompt, embeds, params, add_special_tokens, salt)
        limit, keep = self.model.max_model_len, params.truncate_prompt_tokens
        items: tuple[MediaItem, ...] = ()
        media: list[MediaInput] = []
        asked: str | list[int]
        if (given := prompt.get("prompt_token_ids")) is not None:
            asked = self.check_ids(given, "prompt_token_ids", "prompt")
        elif isinstance(text, str):
            asked = text
        else:
            unbuilt = "encoder_prompt is not built yet; " if "encoder_prompt" in prompt else ""
            said = f"{unbuilt}a prompt needs text (prompt) or token ids (prompt_token_ids)."
            raise RequestError(said, param="prompt")
        given_media = prompt.get("multi_modal_data")
        if isinstance(given_media, Mapping) and not given_media:
            given_media = None
        if self.listener is not None:
            if given_media is None:
                raise RequestError(
                    f"{self.model.served_model_names[0]} only transcribes sounds: send a file to "
                    "/v1/audio/transcriptions or /v1/audio/translations, or a prompt with multi_modal_data to LLM.",
                    code="model_hears",
                )
            token_ids = self.encode(asked, False) if isinstance(asked, str) else asked
            item, heard = self.listener.take(given_media, salt)
            items, media = (item,), [heard]
        elif given_media is not None:
            if keep is not None:
                raise RequestError(
                    "truncate_prompt_tokens would cut pictures or sounds.", param="truncate_prompt_tokens"
                )
            token_ids, items, media = self._with_media(
                asked, given_media, prompt.get("multi_modal_uuids"), salt, add_special_tokens
            )
        else:
            if isinstance(asked, str) and keep is None:
                self._refuse_long(asked)
            token_ids = self.encode(asked, add_special_tokens) if isinstance(asked, str) else asked
        if keep is not None:
            keep = keep if keep > 0 else max(1, limit - (params.max_tokens or 1))
            first = self._begin(token_ids)[: keep - 1] if isinstance(asked, str) else []
            token_ids = token_ids[:keep] if params.truncation_side == "right" else token_ids[-keep:]
            token_ids[: len(first)] = first
        self.check_known(token_ids)
        self._check_length(len(token_ids), room=room)
        return Prompt(token_ids, text, media=items, cache_salt=salt), media

    def _make_embedded_prompt(
        self,
        prompt: Mapping[str, Any],
        embeds: object,
        params: SamplingParams,
        add_special_tokens: bool,
        salt: str | None,
    ) -> tuple[Prompt, list[MediaInput]]:
        """Return a prompt of embeddings, alone or between texts, and its media, like `_make_prompt`."""
        if self.prompt_embeds is None:
            raise RequestError("prompt_embeds needs --enable-prompt-embeds.", param="prompt_embeds")
        for name in ("prompt_token_ids", "multi_modal_data"):
            if prompt.get(name) is not None:
                raise RequestError(f"prompt_embeds are the whole prompt; leave {name} out.", param=name)
        for name in ("prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(params, name) is not None:
                raise RequestError(f"{name} needs tokens; prompt_embeds have none. Leave it out.", param=name)
        texts = prompt.get("prompt")
        if isinstance(embeds, list) and isinstance(texts, list):
            if len(texts) != len(embeds) + 1 or not all(isinstance(text, str) for text in texts):
                raise RequestError(
                    "with a list of prompt_embeds, prompt must be a list of texts: before, between and after them.",
                    param="prompt",
                )
            return self._make_mixed_prompt(texts, embeds, add_special_tokens, salt)
        item, made = self.prompt_embeds.take(embeds, salt)
        self._check_length(item.num_tokens, "shorten it")
        text = prompt.get("prompt") if isinstance(prompt.get("prompt"), str) else None
        return Prompt([0] * item.num_tokens, text, media=(item,), cache_salt=salt, is_embedded=True), [made]

    def _make_mixed_prompt(
        self, texts: list[str], embeds: list[Any], add_special_tokens: bool, salt: str | None
    ) -> tuple[Prompt, list[MediaInput]]:
        """Return a prompt of `texts`, with one item of `embeds` between each two."""
        assert self.prompt_embeds is not None
        token_ids = self.encode(texts[0], add_special_tokens)
        items, media = list[MediaItem](), list[MediaInput]()
        for given, text in zip(embeds, texts[1:], strict=True):
            item, made = self.prompt_embeds.take(given, salt)
            items.append(msgspec.structs.replace(item, position=len(token_ids)))
            media.append(made)
            token_ids += [0] * item.num_tokens + self.encode(text, False)
            self._check_length(len(token_ids), "shorten it")
        self.check_known(token_ids)
        return Prompt(token_ids, None, media=tuple(items), cache_salt=salt, is_embedded=True), media

    def _check_length(
        self,
        num_tokens: int,
        advice: str = "shorten it, or set truncate_prompt_tokens",
        *,
        room: int = 1,
        is_beginning: bool = False,
    ) -> None:
        """Raise `RequestError` if a prompt leaves no room for an answer. With `is_beginning` only the first tokens of
        the prompt were counted."""
        if num_tokens + room > (limit := self.model.max_model_len):
            count = f"more than {num_tokens - 1}" if is_beginning else num_tokens
            raise RequestError(
                f"the prompt has {count} tokens and the model takes {limit} of prompt and output together; {advice}.",
                param="prompt",
                code="context_length_exceeded",
                details={"num_tokens": num_tokens, "limit": min(limit, num_tokens - 1)},
            )

    def _refuse_long(self, text: str) -> None:
        """Raise `RequestError` for a text whose beginning already has too many tokens. Tokenizing the longest text that
        a body may hold would take seconds."""
        limit = self.model.max_model_len
        most = max(_LONG_TOKEN_CHARACTERS * limit, MAX_INLINE_LENGTH)
        if len(text) > most and (num_tokens := len(self.encode(text[:most], add_special_tokens=False))) > 2 * limit:
            self._check_length(num_tokens, is_beginning=True)

    def count(self, text: str, media: Mapping[str, Any] | None, add_special_tokens: bool) -> int:
        """Return the number of tokens of a prompt, which may be too long for the model. Raises `RequestError`."""
        if media is None:
            return len(self.encode(text, add_special_tokens))
        return len(self._with_media(text, media, None, None, add_special_tokens)[0])

    def _with_media(
        self, prompt: str | list[int], media: object, uuids: object, salt: str | None, add_special_tokens: bool
    ) -> tuple[list[int], tuple[MediaItem, ...], list[MediaInput]]:
        processor = self.media_processor(
            *(kind for name, kind in KINDS.items() if isinstance(media, Mapping) and name in media)
        )
        adds = add_special_tokens and isinstance(prompt, str)
        found = {kind: values for kind, values in processor.media(media, uuids, salt).items() if values}
        return processor.expand(prompt, found, salt, lambda text: self.encode(text, adds))

    def media_processor_of(self, media: Iterable[SentMedium]) -> MediaProcessor:
        """Return the processor of these media. Raises `RequestError` if the model does not take all their kinds."""
        return self.media_processor(*(one.kind for one in media))

    def media_processor(self, *asked: MediaKind) -> MediaProcessor:
        """Return the media processor. Raises `RequestError` if the model does not take all the `asked` kinds of
        media."""
        taken = () if self.media is None else self.media.kinds
        others = [kind for kind in asked if kind not in taken]
        if self.media is None or others:
            kinds = " and ".join(f"{kind.noun}s" for kind in taken)
            why = f", but {kinds}" if taken else "; docs/media.md says which models do, and with which flags"
            nouns = f"{others[0].noun}s" if others else "pictures or sounds"
            raise RequestError(
                f"{self.model.served_model_names[0]} takes no {nouns} here{why}.", param="messages", code="no_media"
            )
        return self.media

    def check_known(self, token_ids: list[int]) -> None:
        """Raise `RequestError` if a prompt is empty or has unknown tokens."""
        if not token_ids:
            raise RequestError("the prompt is empty: it has no tokens.", param="prompt")
        if max(token_ids) >= self.model.vocab_size:
            # A tokenizer may have added tokens without an embedding in the model.
            raise RequestError(
                f"the prompt has token id {max(token_ids)}; the model's are 0 to {self.model.vocab_size - 1}.",
                param="prompt",
            )

    def check_ids(self, token_ids: object, name: str, param: str | None = None) -> list[int]:
        """Return the argument `name`, which must be a list of token ids. Raises `RequestError`."""
        if not isinstance(token_ids, list | tuple):
            raise RequestError(
                f"{name} must be a list of token ids, got {type(token_ids).__name__}.", param=param or name
            )
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self.model.vocab_size:
                raise RequestError(
                    f"token id {token!r} is not an integer from 0 to {self.model.vocab_size - 1}.", param=param or name
                )
        return list(token_ids)

    def _max_tokens(self, params: SamplingParams, num_prompt: int, clamps: bool) -> int:
        """Return the most output tokens, at least one: the prompt was checked before."""
        room = self.model.max_model_len - num_prompt
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but a prompt of {num_prompt} tokens leaves room for {room}.",
                param="min_tokens",
            )
        if params.max_tokens is None:
            default = self.model.default_max_tokens
            return room if default is None else min(room, max(default, params.min_tokens))
        if params.max_tokens > room and not clamps:
            raise RequestError(
                f"max_tokens is {params.max_tokens}, but the prompt has {num_prompt} tokens and the model takes "
                f"{self.model.max_model_len} of both together; leave it out to get as many as fit.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return min(params.max_tokens, room)

    def _check_scheduling(self, params: SamplingParams, priority: int) -> None:
        if params.num_sequences > self.scheduler.max_num_seqs:
            raise RequestError(
                f"the request needs {params.num_sequences} sequences at once and --max-num-seqs is "
                f"{self.scheduler.max_num_seqs}.",
                param="n" if params.best_of is None else "best_of",
            )
        self.check_priority(priority)

    def check_rank(self, rank: int | None) -> None:
        """Raise `RequestError` if this server has no engine of that rank."""
        if rank is not None and not (type(rank) is int and 0 <= rank < self._num_engines):
            raise RequestError(
                f"data_parallel_rank must be 0 to {self._num_engines - 1}, of the engines here, got {rank!r}.",
                param="data_parallel_rank",
            )

    def check_priority(self, priority: int) -> None:
        """Raise `RequestError` for an invalid priority, or one that the scheduling policy ignores."""
        if type(priority) is not int or not -(2**63) <= priority < 2**63:
            raise RequestError(f"priority must be a 64-bit integer, got {priority!r}.", param="priority")
        if priority and self.scheduler.policy != "priority":
            raise RequestError(f"priority {priority} needs --scheduling-policy priority.", param="priority")

    def _check_token_ids(self, params: SamplingParams) -> None:
        if params.allowed_token_ids is not None and len(params.allowed_token_ids) > self.model.vocab_size:
            raise RequestError(
                f"allowed_token_ids has {len(params.allowed_token_ids)} tokens; the model's are "
                f"{self.model.vocab_size}.",
                param="allowed_token_ids",
            )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            for token in getattr(params, name) or ():
                if not 0 <= token < self.model.vocab_size:
                    raise RequestError(
                        f"{name} has token id {token}; the model's are 0 to {self.model.vocab_size - 1}.", param=name
                    )

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Return the token sequences of each word, at the start of a text and after a space."""
        sequences = dict[tuple[int, ...], None]()  # an ordered set
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self.encode(text, add_special_tokens=False)
                if ids and max(ids) < self.model.vocab_size:
                    sequences[tuple(ids)] = None
        return [list(ids) for ids in sequences]


def _check_fields(prompt: Mapping[str, Any]) -> None:
    """Raise `RequestError` for fields of a prompt that nothing reads. Null and an empty dictionary say nothing."""
    if prompt.keys() <= _PROMPT_FIELDS or "encoder_prompt" in prompt:  # that is refused later
        return
    refuse_kwargs(mm_processor_kwargs=prompt.get("mm_processor_kwargs"))
    for name in prompt.keys() - _PROMPT_FIELDS:
        if prompt[name] is not None and name != "mm_processor_kwargs":
            known = ", ".join(sorted(_PROMPT_FIELDS))
            raise RequestError(f"a prompt has no field {name!r}; its fields are {known}.", param="prompt")


def _own_adapter(media: MediaConfig) -> AdapterSource | None:
    """Return the adapter that the model brings for prompts with media, or None. Raises `RequestError`."""
    if media.adapter is None:
        return None
    try:
        return source(media.kind, media.adapter)
    except LoadError as e:
        raise RequestError(f"the adapter of the model's {KINDS[media.kind].noun}s: {e}", status=500) from None
