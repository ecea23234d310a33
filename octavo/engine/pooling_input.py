"""Texts for models that pool: tokenizes one text or a pair, cuts what is too long, and makes the `EngineRequest`."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from octavo.engine.input_processor import InputProcessor, PromptInput, Source, sources_of
from octavo.errors import RequestError, naming_prompt
from octavo.pooling.scores import similarity
from octavo.pooling_params import PoolingConfig, PoolingParams
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams, is_unicode

_NO_SAMPLING = SamplingParams(max_tokens=1, detokenize=False)
_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")  # keys of a prompt that is a dictionary
_MANY = 16  # from this number of texts on, the tokenizer uses several threads


# Cohere's name of a text's purpose -> the names that models give to their prompts for it.
_PROMPTS = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "search_document"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


def prompt_for(config: PoolingConfig, purpose: str) -> str | None:
    """Return the name of the model's prompt for texts of a `purpose`, or None for its default prompt."""
    return next((name for name in _PROMPTS[purpose] if name in config.prompts), None)


@dataclass(frozen=True, slots=True)
class Text:
    """A text, a pair of texts, or token ids; and the name of the prompt that comes before it: "" is no prompt, None is
    the model's default."""

    first: str | Sequence[int]
    second: str | None = None
    prompt_name: str | None = None
    document: tuple[int, int] | None = None  # characters of `first` that may be cut; None: all
    cache_salt: str | None = None

    @classmethod
    def of(cls, prompt: PromptInput, prompt_name: str | None = None) -> Self:
        """Make a `Text` of a caller's prompt. Raises `RequestError` for an invalid prompt, and for fields that are not
        built for models that pool."""
        given: Any = prompt
        salt: Any = None
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids")
            given = prompt.get("prompt") if given is None else given
            salt = prompt.get("cache_salt")
            if salt is not None and not (isinstance(salt, str) and is_unicode(salt)):
                raise RequestError("cache_salt must be a string of valid Unicode.", param="cache_salt")
            for name, value in prompt.items():
                if value is not None and name not in _FIELDS:
                    raise RequestError(f"{name} is not built for models that pool; leave it out.", param=str(name))
        if not isinstance(given, str | list | tuple):
            raise RequestError(
                "a prompt must be text, token ids, or a dictionary with prompt or prompt_token_ids, got "
                f"{type(prompt).__name__}.",
                param="prompt",
            )
        return cls(given, None, prompt_name, cache_salt=salt)


class PoolingInput:
    """Used by `LLM` and the asynchronous engine. Its methods raise `RequestError` for invalid requests, and for models
    that generate."""

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs, self._model = inputs, inputs.model
        config = inputs.model.pooling
        if config is None:
            raise RequestError(
                f"{inputs.model.served_model_names[0]} generates text and returns no vectors. Serve an embedding "
                "model, or return this model's hidden states as embeddings: --runner pooling (or runner='pooling').",
                code="model_generates",
            )
        self.config = config

    def process(
        self,
        texts: Sequence[Text],
        params: PoolingParams | None = None,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        sources: str | Sequence[Source] = "prompt",
    ) -> list[EngineRequest]:
        """Return a request for the core for each text, with unique ids. Texts with different salts share no cached
        blocks. Errors name the `sources` of the texts; by default all come from one field."""
        params = self.config.settle(PoolingParams() if params is None else params)
        self._inputs.check_priority(priority)
        if (params.truncate_prompt_tokens or 0) > (limit := self._model.max_model_len):
            raise RequestError(
                f"truncate_prompt_tokens is {params.truncate_prompt_tokens}, and the model takes {limit}; -1 keeps as "
                "many as it takes.",
                param="truncate_prompt_tokens",
            )
        now = time.monotonic() if arrival_time is None else arrival_time
        if isinstance(sources, str):
            sources = sources_of(sources, len(texts))
        prompts = self._prompts(texts, sources, params, add_special_tokens, cache_salt)
        return [
            EngineRequest(
                request_id=self._inputs.new_id(), prompt=prompt, params=_NO_SAMPLING, eos_token_ids=[], max_tokens=0,
                arrival_time=now, priority=priority, pooling=its,
            )
            for prompt, its in prompts
        ]  # fmt: skip

    def shortened(self, texts: Sequence[str], num_tokens: int, field: str) -> list[str]:
        """Return the texts of a `field`, cut after their first `num_tokens` tokens; 0 cuts nothing."""
        if not num_tokens:
            return list(texts)
        encodings = self._inputs.encode_all(texts, sources_of(field, len(texts)), False, _MANY, has_offsets=True)
        ends = [encoding.offsets[:num_tokens][-1][1] if encoding.ids else 0 for encoding in encodings]
        return [text[:end] for text, end in zip(texts, ends, strict=True)]

    def _prompts(
        self,
        texts: Sequence[Text],
        sources: Sequence[Source],
        params: PoolingParams,
        add_special_tokens: bool,
        cache_salt: str | None,
    ) -> list[tuple[Prompt, PoolingParams]]:
        written = [(text, self._prefix(text)) for text in texts]
        given = [self._given(text, prefix) for text, prefix in written]
        as_text = [(entry, source) for entry, source in zip(given, sources, strict=True) if entry is not None]
        entries, their_sources = [entry for entry, _ in as_text], [source for _, source in as_text]
        has_offsets = self._limit(params) is not None and any(text.document is not None for text in texts)
        encodings = iter(
            self._inputs.encode_all(entries, their_sources, add_special_tokens, _MANY, has_offsets=has_offsets)
        )
        found = []
        for source, (text, prefix), entry in zip(sources, written, given, strict=True):
            its = params
            with naming_prompt(*source):
                if entry is None:
                    ids, second_start = self._inputs.check_ids(text.first, "prompt_token_ids", "prompt"), None
                    ids = self._cut_ids(ids, params)
                else:
                    ids, second_start, kept = self._cut(next(encodings), params, text.document)
                    if prefix and not self.config.pools_prompts:
                        its = self._with_skipped(prefix, kept, params, add_special_tokens)
                self._check_length(ids)
            shown = text.first if isinstance(text.first, str) else None
            salt = text.cache_salt or cache_salt
            found.append((Prompt(ids, shown, second_start=second_start, cache_salt=salt), its))
        return found

    def _prefix(self, text: Text) -> str:
        if not isinstance(text.first, str):
            if text.prompt_name:
                raise RequestError("prompt_name needs a text, not token ids; leave it out.", param="prompt_name")
            return ""
        name = self.config.default_prompt if text.prompt_name is None else text.prompt_name
        if not name:
            return ""
        if name not in self.config.prompts:
            known = ", ".join(self.config.prompts) or "none"
            raise RequestError(f"prompt_name {name!r} is not one of the model's ({known}).", param="prompt_name")
        prefix = self.config.prompts[name]
        return prefix.lower() if self.config.lowers_case else prefix

    def _given(self, text: Text, prefix: str) -> str | tuple[str, str] | None:
        if not isinstance(text.first, str):
            return None
        first = prefix + text.first
        first = first.lower() if self.config.lowers_case else first
        return first if text.second is None else (first, text.second)

    def _cut(
        self, encoding: Encoding, params: PoolingParams, document: tuple[int, int] | None = None
    ) -> tuple[list[int], int | None, Sequence[int]]:
        """Return the token ids, cut as `params` say, where the second text begins, and the places in `encoding` of the
        tokens that are kept. Special tokens stay; with a `document`, everything outside of it stays too. In a pair the
        longer text is cut first."""
        ids, types = list(encoding.ids), list(encoding.type_ids)
        limit, kept = self._limit(params), list(range(len(ids)))
        if limit is not None and len(ids) > limit:
            owners = encoding.sequence_ids  # None: a special token
            if document is not None:
                first, end = document
                owners = [0 if first <= begin < stop <= end else None for begin, stop in encoding.offsets]
            places = [[i for i, owner in enumerate(owners) if owner == number] for number in (0, 1)]
            excess = len(ids) - limit
            if excess >= len(places[0]) + len(places[1]):
                raise RequestError(
                    f"truncate_prompt_tokens {limit} leaves no room beside the tokens that stay.",
                    param="truncate_prompt_tokens",
                )
            kept = [i for i, owner in enumerate(owners) if owner is None]
            for its, cut in zip(places, num_cut(len(places[0]), len(places[1]), excess), strict=True):
                kept += its[cut:] if params.truncation_side == "left" else its[: len(its) - cut]
            kept.sort()
            ids, types = [ids[i] for i in kept], [types[i] for i in kept]
        # A model with one token type has no row for a second one, even if the tokenizer says 1.
        has_second = 1 in types and self._model.checkpoint.config.get("type_vocab_size") != 1
        return ids, types.index(1) if has_second else None, kept

    def _cut_ids(self, ids: list[int], params: PoolingParams) -> list[int]:
        limit = self._limit(params)
        if limit is None:
            return ids
        return ids[-limit:] if params.truncation_side == "left" else ids[:limit]

    def _limit(self, params: PoolingParams) -> int | None:
        keep = params.truncate_prompt_tokens
        return self._model.max_model_len if keep == -1 else keep

    def _with_skipped(
        self, prefix: str, kept: Sequence[int], params: PoolingParams, add_special_tokens: bool
    ) -> PoolingParams:
        """Return `params` by which pooling skips the tokens of an instruction, and the special token before it. Of the
        text with the instruction the tokens at the places `kept` are left."""
        [encoding] = self._inputs.encode_all([prefix], sources_of("prompt_name", 1), add_special_tokens, _MANY)
        ends_special = bool(encoding.sequence_ids) and encoding.sequence_ids[-1] is None
        end = len(encoding.ids) - ends_special
        return msgspec.structs.replace(params, num_skipped=sum(place < end for place in kept))

    def _check_length(self, ids: list[int]) -> None:
        limit = self._model.max_model_len
        self._inputs.check_known(ids)
        if len(ids) > limit:
            raise RequestError(
                f"the text has {len(ids)} tokens and the model takes {limit}; shorten it, or set "
                "truncate_prompt_tokens to -1.",
                param="prompt",
                code="context_length_exceeded",
            )


def num_cut(first: int, second: int, excess: int) -> tuple[int, int]:
    """Return how many tokens two texts of `first` and `second` tokens lose if `excess` tokens are cut one by one, each
    from the longer text, or from the first if both are equally long."""
    longer = min(excess, abs(first - second))
    rest = excess - longer
    of_first, of_second = (longer, 0) if first > second else (0, longer)
    return of_first + (rest + 1) // 2, of_second + rest // 2


class Scores:
    """Scores of queries with documents: `requests` are to be computed, `results` makes the scores of their outputs. A
    single query is scored with every document; several queries with one document each. A cross-encoder judges pairs;
    embeddings and the tokens' vectors are compared. Raises `RequestError`.
    """

    def __init__(
        self,
        inputs: PoolingInput,
        queries: Sequence[str],
        documents: Sequence[str],
        params: PoolingParams | None = None,
        *,
        fields: tuple[str, str] = ("queries", "documents"),
        instruction: str | None = None,
        **scheduling: Any,
    ) -> None:
        """`fields` are the names of the two sides in errors; `scheduling` are arguments of `process`."""
        if not queries or not documents:
            raise RequestError("send at least one query and one document.")
        if len(queries) not in (1, len(documents)):
            raise RequestError(
                f"{len(queries)} queries for {len(documents)} documents; give one for all, or one for each."
            )
        config = inputs.config
        self._is_cross = "classify" in config.task
        if self._is_cross and (config.size != 1 or config.task != "classify"):
            raise RequestError(
                f"the model has {config.size} classes, and a score needs one (num_labels 1); ask /classify."
            )
        if instruction is not None and config.score_template is None:
            raise RequestError("this model takes no instruction; leave it out.", param="instruction")
        self._each = list(queries) * len(documents) if len(queries) == 1 else list(queries)
        self._documents = documents
        self._places: dict[Text, int] = {}
        sources: list[Source] = []
        for index, (query, document) in enumerate(zip(self._each, documents, strict=True)):
            of_query = (fields[0], index % len(queries), len(queries))
            of_document = (fields[1], index, len(documents))
            texts = self._texts(config, query, document, instruction)
            for text, source in zip(texts, (of_query, of_document)[-len(texts) :], strict=True):
                if text not in self._places:
                    self._places[text] = len(self._places)
                    sources.append(source)
        self._config, self._instruction = config, instruction
        self.requests = inputs.process(
            [*self._places], params, add_special_tokens=config.score_template is None, sources=sources, **scheduling,
        )  # fmt: skip

    def _texts(self, config: PoolingConfig, query: str, document: str, instruction: str | None) -> list[Text]:
        if config.score_template is not None:
            given = {"instruction": instruction or config.score_instruction, "query": query, "document": document}
            text, span = _filled(config.score_template, given)
            return [Text(text, document=span)]
        if self._is_cross:
            return [Text(query, document)]
        sides = {"search_query": query, "search_document": document}
        return [Text(text, None, prompt_for(config, purpose)) for purpose, text in sides.items()]

    @property
    def places(self) -> list[int]:
        """For each document, the index of the last of the `requests` that its score needs."""
        config, each = self._config, zip(self._each, self._documents, strict=True)
        return [self._places[self._texts(config, *pair, self._instruction)[-1]] for pair in each]

    def results(self, vectors: Sequence[NDArray[np.float32]]) -> list[float]:
        """Return the score of each document, from the vectors of `requests`."""
        found = []
        for query, document in zip(self._each, self._documents, strict=True):
            its = [vectors[self._places[t]] for t in self._texts(self._config, query, document, self._instruction)]
            found.append(float(its[0][0]) if self._is_cross else similarity(its[0], its[1]))
        return found


def _filled(template: str, texts: Mapping[str, str]) -> tuple[str, tuple[int, int]]:
    """Return `template` with texts in place of {name}, and where the document begins and ends. Braces in the texts
    themselves are left alone."""
    found, document = "", (0, 0)
    while (begin := template.find("{")) >= 0:
        end = template.index("}", begin)
        name, found = template[begin + 1 : end], found + template[:begin]
        if name == "document":
            document = len(found), len(found) + len(texts[name])
        found += texts[name]
        template = template[end + 1 :]
    return found + template, document
