"""A request's sampling parameters: one struct, checked when it is made, the same in Python, HTTP and on the wire.

`octavo.sampling` (logits to tokens) and `octavo.engine.output_processor` (stop strings, text) implement the fields.
Field names and defaults are vLLM's.
"""

from __future__ import annotations

import copy
import difflib
import math
import operator
import sys
from collections.abc import Callable
from enum import IntEnum
from itertools import compress
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import RequestError

MAX_LOGPROBS = 20  # unless --max-logprobs says otherwise
MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's bound
MAX_N = 128
SEED_BITS = 53  # of a drawn seed: programs that read the log's JSON may keep numbers as floats
MAX_LENGTH_PENALTY = 10  # beyond it powers of long lengths overflow floating-point numbers
# Takes (prompt_token_ids, output_token_ids, logits [vocab_size] float32) and returns the logits to use.
LogitsProcessor = Callable[[list[int], list[int], Any], Any]


class RequestOutputKind(IntEnum):
    """The content of each `RequestOutput` in a stream."""

    CUMULATIVE = 0  # everything since the start, in every output
    DELTA = 1  # the new part since the last output
    FINAL_ONLY = 2  # one output, when the request has finished


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an answer must be: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`.

    `octavo.structured_output.grammar_builder` turns it into a grammar. Raises `RequestError` naming the field.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as an object."""
    regex: str | None = None
    """In the syntax of Rust's `regex`: no look-around, no back references."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar: Lark, or EBNF in the manner of llama.cpp (`root ::= ...`)."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Text whose parts between tags follow a grammar: xgrammar's structural tag or vLLM's older list of structures, as
    JSON text or as an object. See `octavo.structured_output.structural_tag`."""
    disable_fallback: bool = False
    """No effect: there is only one grammar library, and grammars that it cannot follow are always refused."""
    disable_any_whitespace: bool = False
    """For JSON: allow no whitespace between its parts."""
    disable_additional_properties: bool | None = None
    """For JSON: an object whose schema names properties has no others, unless the schema allows them or has other rules
    for them. Left out: the engine's setting (`disable_additional_properties`)."""
    whitespace_pattern: str | None = None
    """For JSON: a regular expression for whitespace, wherever JSON allows it."""
    final_check: str = "report"
    """For `json`: what to do with a finished answer that breaks a part of its schema that no grammar can enforce
    (`not`, `uniqueItems`, ...). "report": its `stop_reason` is "schema_mismatch", or "schema_unchecked" if checking it
    takes too long. "error": the request fails in both cases. "refuse": a request with such a schema is refused."""

    @classmethod
    def from_optional(cls, **given: Any) -> StructuredOutputsParams:
        """Make parameters from fields that may be None. `json` may also be a pydantic class."""
        schema: Any = given.get("json")
        if hasattr(schema, "model_json_schema"):
            given["json"] = schema.model_json_schema()
        return cls(**{name: value for name, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(STRUCTURES)}, got {found}.",
                param="structured_outputs",
            )
        for name, meaning in (("json", "a JSON schema"), ("structural_tag", "a structural tag")):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | dict):
                _refuse(f"structured_outputs.{name}", value, f"{meaning}, as an object or as text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value and is_unicode(value)):
                _refuse(f"structured_outputs.{name}", value, "a non-empty string of valid Unicode")
        if self.choice is not None and not (
            isinstance(self.choice, list)
            and self.choice
            and all(isinstance(text, str) and text and is_unicode(text) for text in self.choice)
        ):
            _refuse("structured_outputs.choice", self.choice, "a list of non-empty strings of valid Unicode")
        if self.final_check not in FINAL_CHECKS:
            _refuse("structured_outputs.final_check", self.final_check, f"one of {', '.join(FINAL_CHECKS)}")
        flags = ("disable_fallback", "disable_any_whitespace")
        for name in ("json_object", "disable_additional_properties", *flags):
            value = getattr(self, name)
            if type(value) is not bool and (value is not None or name in flags):
                _refuse(f"structured_outputs.{name}", getattr(self, name), "true or false")


GuidedDecodingParams = StructuredOutputsParams  # vLLM's former name
FINAL_CHECKS = ("report", "error", "refuse")
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class SpeechRules(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a transcribing model may generate: see `octavo.sampling.timestamp_rules`."""

    suppressed: list[int]
    suppressed_first: list[int]  # also suppressed as the first token
    end: int  # the end token; all smaller ids are text
    first_timestamp: int  # all larger ids are timestamps
    has_times: bool = False  # whether the answer has timestamps
    last_initial: int | None = None  # largest timestamp allowed as the first token


# Parameters of vLLM or other libraries that Octavo lacks, with what to do instead.
_INSTEAD = {
    "do_sample": "temperature 0 is greedy, and any other samples",
    "flat_logprobs": "logprobs are a list of dictionaries",
    "guided_choice": "StructuredOutputsParams(choice=[...]) as structured_outputs",
    "guided_decoding_backend": "structured outputs are always made by llguidance",
    "guided_grammar": "StructuredOutputsParams(grammar=...) as structured_outputs",
    "guided_json": "StructuredOutputsParams(json=...) as structured_outputs",
    "guided_regex": "StructuredOutputsParams(regex=...) as structured_outputs",
    "max_new_tokens": "max_tokens bounds what is generated",
    "prompt_logprob_start": "prompt_logprobs are those of the whole prompt",
    "prompt_logprob_token_ids": "prompt_logprobs=-1 with max_logprobs=-1 has those of all tokens",
    "repetition_detection": "frequency_penalty and repetition_penalty keep answers from repeating themselves",
    "response_format": "StructuredOutputsParams(json=schema) as structured_outputs",
    "skip_clone": "the caller's parameters stay as they are",
    "skip_reading_prefix_cache": "a prompt with a cache_salt of its own finds nothing in the cache",
    "stop_strings": "stop is a list of texts",
    "stream_interval": "the engine has a stream_interval for all requests",
    "thinking_token_budget": "the server's chats have it",
    "trace_decode_token_ids": "allowed_token_ids restricts the tokens of the answer",
    "watermarking": "answers cannot be watermarked",
}


class _Named(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass whose constructor says what to do about an unknown keyword."""

    if not TYPE_CHECKING:  # type checkers use the constructor's signature

        def __call__(cls, *args: Any, **given: Any) -> Any:
            try:
                return super().__call__(*args, **given)
            except TypeError:
                unknown = sorted(given.keys() - set(cls.__struct_fields__))
                if not unknown:
                    raise
                for name in unknown:
                    if name in _INSTEAD and given[name] is not None and given[name] is not False:
                        raise RequestError(f"{name} is not built: {_INSTEAD[name]}.", param=name) from None
                strange = [name for name in unknown if name not in _INSTEAD]
                if not strange:  # callers pass None for values that they were not given
                    return cls(*args, **{name: value for name, value in given.items() if name not in unknown})
                close = [difflib.get_close_matches(name, cls.__struct_fields__, 1, 0.7) for name in strange]
                advice = [f" Did you mean {found[0]}?" for found in close if found]
                raise TypeError(f"{cls.__name__}() has no parameter {', '.join(strange)}.{''.join(advice)}") from None


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=_Named):
    """Sampling parameters of one request.

    Raises `RequestError` (a `ValueError`) naming the field, its value and the allowed range, also for a parameter of
    vLLM that is not built; `TypeError` for an unknown parameter.
    """

    n: int = 1
    """Completions to return. They share the blocks of their prompt."""
    best_of: int | None = None
    """Completions to generate; the `n` with the highest cumulative log-probability are returned."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that is in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time that it is in the output; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019, CTRL)."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of most likely tokens whose probabilities sum to at least this (Holtzman et al. 2020)."""
    top_k: int = 0
    """Number of most likely tokens to choose from; 0 or -1 is all."""
    min_p: float = 0.0
    """Least probability of a token, relative to the most likely one (Nguyen et al. 2024)."""
    seed: int | None = None
    """With a seed the request's tokens depend on the request alone, not on the rest of the batch. -1 is None, as in
    vLLM."""
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    bad_words: list[str] = msgspec.field(default_factory=list)
    """Words that must not be generated; the last token that would complete one is masked."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """Output tokens at most; None is as many as `max_model_len` allows."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked until this many tokens are generated."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of this many most likely ones, before penalties and temperature; -1 is
    all of the vocabulary. --max-logprobs bounds both."""
    logprob_token_ids: list[int] | None = None
    """Log-probabilities of these tokens, without ranks, instead of those of the most likely ones, and of the chosen
    token; at most `MAX_LOGPROB_TOKEN_IDS`, independent of --max-logprobs."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for each token of the prompt except the first."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's tokens; -1: as many as fit."""
    truncation_side: str = "left"
    """Where a prompt is cut: "left" keeps its last tokens, "right" its first."""
    logits_processors: list[Any] | None = None
    """Callables (prompt ids, output ids, logits [V] float32) -> logits; only in the process of the engine
    (`LLM`). Logits are a torch tensor; on a CPU where torch is not installed they are numpy's array."""
    use_beam_search: bool = False
    """Search for the `n` likeliest completions with `best_of` beams (or `n`), as `transformers` does. A temperature
    other than 0 scales the logits that beams are scored by."""
    length_penalty: float = 1.0
    """With beam search: scores are divided by output tokens ** this, so that values above 0 favour long completions."""
    early_stopping: bool | str = False
    """With beam search: True ends it as soon as there are as many completions as beams, False when better ones are
    unlikely, "never" when they are impossible."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the answer must be. `LLM` and the async engine also take a dictionary of its fields."""
    guided_decoding: StructuredOutputsParams | None = None
    """The former name of `structured_outputs`, which gets its value."""
    extra_args: dict[str, Any] | None = None
    """What classes of `LLM(logits_processors=[...])` read. Without such classes an error, unless empty."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    bad_words_token_ids: list[list[int]] | None = None
    """Filled in by the engine from `bad_words`; not the caller's to set."""
    grammar: str | None = None
    """Filled in by the engine from `structured_outputs`; not the caller's to set."""
    speech: SpeechRules | None = None
    """Set for transcriptions; not the caller's to set."""
    alignment_heads: list[tuple[int, int]] | None = None
    """Set for transcriptions: (layer, head) pairs whose attention from the prompt's tokens to the sound is wanted."""

    def __post_init__(self) -> None:
        if type(self.seed) is int and self.seed == -1:
            self.seed = None
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                setattr(self, name, [])
        if self.logit_bias is not None:
            try:
                biases = {int(token): float(bias) for token, bias in self.logit_bias.items()}
            except (TypeError, ValueError, AttributeError, OverflowError):
                _refuse("logit_bias", self.logit_bias, "a map of token ids to numbers")
            if any(isinstance(token, float) for token in self.logit_bias):  # `int` cuts off its fraction
                _refuse("logit_bias", self.logit_bias, "a map of token ids to numbers")
            self.logit_bias = biases
            if not all(map(math.isfinite, self.logit_bias.values())):
                _refuse("logit_bias", self.logit_bias, "a map of token ids to finite numbers")
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                _refuse("guided_decoding", self.guided_decoding, "left out beside structured_outputs")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            _refuse("extra_args", self.extra_args, "a dictionary, or null")
        structured: Any = self.structured_outputs
        if isinstance(structured, dict):
            unknown = structured.keys() - set(StructuredOutputsParams.__struct_fields__)
            if unknown:
                _refuse("structured_outputs", sorted(map(str, unknown)), "made of known fields")
            self.structured_outputs = StructuredOutputsParams(**structured)
        elif structured is not None and not isinstance(structured, StructuredOutputsParams):
            _refuse("structured_outputs", structured, "StructuredOutputsParams or null")
        values = msgspec.structs.astuple(self)
        given = set(compress(_DEFAULTS, map(operator.is_not, values, _DEFAULTS.values())))
        self._check_types(given)
        if self.logprob_token_ids:
            self.logprobs = 0
        self._check_ranges(given)

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Make parameters from values that may be None. None counts as left out, except for `max_tokens`: None allows
        as many tokens as `max_model_len`."""
        optional = {name for name in cls.__struct_fields__ if name != "max_tokens"}
        return cls(**{name: value for name, value in given.items() if value is not None or name not in optional})

    def checked(self) -> SamplingParams:
        """Return a copy whose values are checked: a caller may have changed fields since they were."""
        params = copy.copy(self)
        params.__post_init__()
        for name in ("grammar", "speech", "alignment_heads"):
            if (value := getattr(params, name)) is not None:
                _refuse(name, value, "null: the engine sets it, and structured_outputs take a grammar")
        return params

    def clone(self) -> SamplingParams:
        """Return a copy that shares only the logits processors."""
        processors = {id(processor): processor for processor in self.logits_processors or ()}
        return copy.deepcopy(self, processors)

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that the engine runs for this request; with beam search the number of
        beams."""
        return self.best_of or self.n

    @property
    def num_completions(self) -> int:
        """Return the number of completions from the engine: all sequences, or the best of a beam search."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def follows_output(self) -> bool:
        """Return whether the output so far changes the logits, apart from a grammar's masks."""
        return bool(
            self.min_tokens or self.has_penalties or self.bad_words_token_ids or self.needs_output_tokens_on_host
        )

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def needs_output_tokens_on_host(self) -> bool:
        """Return whether the host must know all tokens of the output to change the logits of the next one. The device
        counts for penalties what the host does not know yet."""
        return bool(
            self.logits_processors
            or self.speech is not None
            or (self.bad_words_token_ids and any(len(word) > 1 for word in self.bad_words_token_ids))
        )

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of log-probabilities of a position beside that of the chosen token, -1 for all; None if
        none are wanted."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the engine must report the log-probability of each sampled token."""
        return self.logprobs is not None or self.num_sequences > self.n or self.use_beam_search

    def _check_types(self, given: set[str]) -> None:
        """Check the types of the `given` fields, whose values differ from their defaults."""
        for name in filter(given.__contains__, _NUMBERS):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                _refuse(name, value, "a finite number")
            setattr(self, name, float(value))
        for name in filter(given.__contains__, ("n", "top_k", "min_tokens")):
            if not _is_integer(value := getattr(self, name)):
                _refuse(name, value, "a 64-bit integer")
        for name in filter(given.__contains__, _OPTIONAL_INTEGERS):
            value = getattr(self, name)
            if value is not None and not _is_integer(value, limit=2**64 if name == "seed" else 2**63):
                _refuse(name, value, "a 64-bit integer or null")
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            is_list = isinstance(value, list)
            if not is_list or (value and not all(isinstance(s, str) and s and is_unicode(s) for s in value)):
                _refuse(name, value, "a list of non-empty strings of valid Unicode")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            value = getattr(self, name)
            is_list = isinstance(value, list)
            if value is not None and (not is_list or (value and not all(type(t) is int and t >= 0 for t in value))):
                _refuse(name, value, "a list of token ids")
        for name in filter(given.__contains__, _BOOLEANS):
            if type(value := getattr(self, name)) is not bool:
                _refuse(name, value, "true or false")
        if type(kind := self.output_kind) is not RequestOutputKind:
            if type(kind) is not int or kind not in list(RequestOutputKind):
                _refuse("output_kind", kind, "a RequestOutputKind")
            self.output_kind = RequestOutputKind(kind)
        processors: object = self.logits_processors
        if processors is not None and not (isinstance(processors, list | tuple) and all(map(callable, processors))):
            _refuse("logits_processors", processors, "a list of functions, or null")

    def _check_ranges(self, given: set[str]) -> None:
        """Check the values of the fields that are `given`. All defaults are in their ranges."""
        for name in filter(given.__contains__, _RANGES):
            value = getattr(self, name)
            for is_within, expected in () if value is None and name in _OPTIONAL_INTEGERS else _RANGES[name]:
                if not is_within(self, value):
                    _refuse(name, value, expected.format(self))
        if self.stop and not self.detokenize:
            _refuse("stop", self.stop, "empty when detokenize is false: stop strings are found in the text")
        self._check_beam_search()
        if self.num_completions > self.n and self.output_kind is RequestOutputKind.DELTA:
            _refuse("best_of", self.best_of, f"equal to n ({self.n}) in a stream: the best are known only at the end")

    def _check_beam_search(self) -> None:
        if type(self.use_beam_search) is not bool:
            _refuse("use_beam_search", self.use_beam_search, "true or false")
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            _refuse("early_stopping", self.early_stopping, 'true, false or "never"')
        if not self.use_beam_search:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    _refuse(name, getattr(self, name), f"{default} without use_beam_search")
            return
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            _refuse("length_penalty", self.length_penalty, f"between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}")
        # Beam search supports neither parameters of random sampling nor stop strings.
        for name, is_idle in (
            ("top_p", self.top_p == 1),
            ("top_k", self.top_k <= 0),
            ("min_p", self.min_p == 0),
            ("stop", not self.stop),
            ("logprob_token_ids", not self.logprob_token_ids),
            ("structured_outputs", self.structured_outputs is None and self.grammar is None),
        ):
            if not is_idle:
                _refuse(name, getattr(self, name), "left out with use_beam_search")


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_NUMBERS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p", "length_penalty",
)  # fmt: skip
_BOOLEANS = (
    "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
_OPTIONAL_INTEGERS = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
# By field: a function that returns whether a value (never None) is in range, and the range in words.
_RANGES: dict[str, list[tuple[Callable[[SamplingParams, Any], bool], str]]] = {
    "n": [(lambda params, n: 1 <= n <= MAX_N, f"between 1 and {MAX_N}")],
    "best_of": [(lambda params, number: params.n <= number <= MAX_N, f"between n ({{0.n}}) and {MAX_N}")],
    "presence_penalty": [(lambda params, penalty: -2 <= penalty <= 2, "between -2 and 2")],
    "frequency_penalty": [(lambda params, penalty: -2 <= penalty <= 2, "between -2 and 2")],
    # Beyond these bounds float32 cannot hold the penalized logits.
    "repetition_penalty": [(lambda params, penalty: 1e-30 <= penalty <= 1e30, "between 1e-30 and 1e30")],
    "temperature": [(lambda params, temperature: temperature >= 0, "0 or more")],
    "top_p": [(lambda params, share: 0 < share <= 1, "greater than 0 and at most 1")],
    "top_k": [(lambda params, number: number >= -1, "-1 or 0 (all tokens), or more")],
    "min_p": [(lambda params, share: 0 <= share <= 1, "between 0 and 1")],
    "max_tokens": [(lambda params, number: number >= 1, "1 or more")],
    "min_tokens": [
        (lambda params, number: number >= 0, "0 or more"),
        (
            lambda params, number: params.max_tokens is None or number <= params.max_tokens,
            "at most max_tokens ({0.max_tokens})",
        ),
    ],
    "logit_bias": [
        (lambda params, biases: all(-100 <= bias <= 100 for bias in biases.values()), "between -100 and 100")
    ],
    "logprobs": [(lambda params, number: number >= -1, "-1 (all of the vocabulary), 0 or more")],
    "prompt_logprobs": [(lambda params, number: number >= -1, "-1 (all of the vocabulary), 0 or more")],
    "truncation_side": [(lambda params, side: side in ("left", "right"), '"left" or "right"')],
    "truncate_prompt_tokens": [(lambda params, number: number == -1 or number > 0, "-1 or 1 or more")],
    "allowed_token_ids": [(lambda params, ids: bool(ids), "null or not empty")],
    "logprob_token_ids": [
        (lambda params, ids: len(ids) <= MAX_LOGPROB_TOKEN_IDS, f"{MAX_LOGPROB_TOKEN_IDS} token ids at most")
    ],
}


class BeamSearchParams(msgspec.Struct, kw_only=False, omit_defaults=True):
    """Parameters of `LLM.beam_search`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def to_sampling_params(self) -> SamplingParams:
        """Return this search as sampling parameters of a request. Raises `RequestError` for values out of range."""
        if not _is_integer(self.beam_width) or not 1 <= self.beam_width <= MAX_N:
            _refuse("beam_width", self.beam_width, f"between 1 and {MAX_N}")
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=False,
            logprobs=min(2 * self.beam_width, MAX_LOGPROBS),
        )


def _refuse(name: str, value: object, expected: str) -> None:
    shown = repr(value)
    if len(shown) > 100:
        shown = shown[:100] + "..."
    raise RequestError(f"{name} must be {expected}, got {shown}.", param=name)


def _is_integer(value: object, limit: int = 2**63) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < limit


def is_unicode(text: str) -> bool:
    """Return whether `text` is valid Unicode. Lone surrogates, which JSON may contain, are valid only in Python's
    strings."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
