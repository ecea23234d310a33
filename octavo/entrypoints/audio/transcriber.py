"""Transcribes a sound window by window: asks a Whisper model about each window, and finds the start of the next.

The method is that of transformers' `generate`. A sound of up to thirty seconds is one answer if no times are asked for.
Otherwise the model writes timestamps of segments, and the next window begins where the last whole segment ends.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.errors import RequestError, aborted
from octavo.multimodal.languages import CODES, LANGUAGES
from octavo.multimodal.transcript import TIMESTAMP_FRAMES, TIMESTAMP_S, Segment, compression_ratio, split
from octavo.outputs import RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams, SpeechRules

if TYPE_CHECKING:
    from octavo.engine.engine_client import EngineClient
    from octavo.multimodal.audio_features import Spectrum
    from octavo.multimodal.word_times import Word
    from octavo.request import EngineRequest

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_LEAST_WINDOWS = 64
_MAX_TOKEN_CHARACTERS = 32  # of a prompt that is far too long only an end is tokenized


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    task: str  # "transcribe" or "translate"
    language: str | None = None  # language code; None: detect it
    prompt: str | None = None  # preceding text, in the wanted style
    temperature: float = 0.0
    seed: int | None = None
    has_times: bool = False  # times of segments are wanted
    is_measured: bool = False  # log-probabilities are wanted
    has_words: bool = False  # times of words are wanted, and so times of segments
    sampling: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `SamplingParams`


@dataclass(slots=True)
class WindowTranscript:
    """The part of a transcript that one window adds."""

    text: str
    segments: list[Segment]
    seek: int  # frame of the sound where the window begins
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    words: list[Word] = field(default_factory=list)


class SpeechTokens:
    """The tokens that tell a Whisper model what to do. Raises `RequestError` if a checkpoint lacks them."""

    def __init__(self, engine: EngineClient) -> None:
        self._vocabulary = vocabulary = engine.tokenizer.vocab
        settings: dict[str, Any] = engine.config.model.checkpoint.generation_config
        self.start = settings.get("decoder_start_token_id") or self._of("<|startoftranscript|>")
        self.end = self._of("<|endoftext|>")
        self.previous, self.no_timestamps = self._of("<|startofprev|>"), self._of("<|notimestamps|>")
        self.first_timestamp = self.no_timestamps + 1
        self.no_speech = self.no_timestamps - 1
        found = settings.get("lang_to_id") or {name: token for name, token in vocabulary.items() if token > self.start}
        self.languages = {match[1]: token for name, token in found.items() if (match := _LANGUAGE.fullmatch(name))}
        if not settings.get("is_multilingual", True):
            self.languages = {}
        self._suppressed = list(settings.get("suppress_tokens") or ())
        self._suppressed_first = list(settings.get("begin_suppress_tokens") or ())
        self._last_initial = settings.get("max_initial_timestamp_index")
        # (layer, head) of the attention heads that follow the sound.
        self.alignment_heads = [(int(layer), int(head)) for layer, head in settings.get("alignment_heads") or ()]

    def task(self, name: str) -> int:
        """Return the token of "transcribe" or "translate"."""
        return self._of(f"<|{name}|>")

    def rules(self, has_times: bool) -> SpeechRules:
        """Return the rules for the tokens of an answer."""
        last = None if self._last_initial is None else self.first_timestamp + self._last_initial
        suppressed = self._suppressed, self._suppressed_first
        return SpeechRules(*suppressed, self.end, self.first_timestamp, has_times, last)

    def _of(self, name: str) -> int:
        found = self._vocabulary.get(name)
        if found is None:
            raise RequestError(f"The model's tokenizer has no token {name}, which this request needs.")
        return int(found)


class Transcriber:
    """Transcribes sounds with one engine, for a `client` of `--scheduling-policy fair`. Raises `RequestError` if a part
    is aborted or misses the `deadline` (`time.monotonic`): an incomplete transcript would look complete. `answer` takes
    each request to the engine and its name; by default the engine alone does."""

    def __init__(
        self,
        engine: EngineClient,
        data_parallel_rank: int | None = None,
        deadline: float | None = None,
        client: str | None = None,
        answer: Callable[[EngineRequest, str], AsyncGenerator[RequestOutput, None]] | None = None,
    ) -> None:
        self._engine, self._rank, self._deadline, self._client = engine, data_parallel_rank, deadline, client
        self._answered = answer

    @cached_property
    def tokens(self) -> SpeechTokens:
        """Return the model's tokens for speech. Raises `RequestError` if it has none."""
        return SpeechTokens(self._engine)

    def language_of(self, name: str) -> str:
        """Return the code of a language, given its code or its English name. Raises `RequestError`."""
        code = CODES.get(name.lower(), name.lower())
        if code not in (self.tokens.languages or ("en",)):
            raise RequestError(f"The model does not transcribe the language {name!r:.40}.", param="language")
        return code

    def name_of(self, code: str) -> str:
        """Return the English name of a language."""
        return LANGUAGES.get(code, code)

    def check(self, options: TranscriptionOptions) -> int:
        """Return the number of tokens before an answer. Raises `RequestError` for options that the model does not
        support."""
        if options.task != "transcribe" and not self.tokens.languages:
            raise RequestError("The model knows English only, and translates nothing.", param="model")
        if options.has_words:
            self._check_heads()
        self._params(options, options.has_times)
        language = next(iter(self.tokens.languages), "en")
        return len(self._prompt(options, language, options.has_times))

    async def detect(self, spectrum: Spectrum, name: str) -> str:
        """Return the code of the language in the first window. `name` names the request in logs."""
        languages = self.tokens.languages
        if not languages:
            return "en"
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(languages.values()))
        window = spectrum.window(0, self._frames)
        [token] = (await self._answer([self.tokens.start], window, params, name)).outputs[0].token_ids
        return next(code for code, language in languages.items() if language == token)

    async def transcribe(
        self, spectrum: Spectrum, options: TranscriptionOptions, language: str, name: str
    ) -> AsyncGenerator[WindowTranscript, None]:
        """Yield the transcript as it comes: window by window, or token by token for a short sound without times."""
        prompt = self._prompt(options, language, with_times := options.has_times or spectrum.num_frames > self._frames)
        params = self._params(options, with_times)
        if not with_times:
            async for transcript in self._transcribe_once(spectrum, prompt, params, name):
                yield transcript
            return
        seek = num_windows = 0
        # Very short segments would transcribe the same sound many times.
        max_windows = max(_LEAST_WINDOWS, 8 * math.ceil(spectrum.num_frames / self._frames))
        while seek < spectrum.num_frames:
            window, num_frames = spectrum.window(seek, self._frames), min(self._frames, spectrum.num_frames - seek)
            answer = (await self._answer(prompt, window, params, name)).outputs[0]
            tokens = answer.token_ids
            tokens = tokens[:-1] if tokens[-1:] == [self.tokens.end] else tokens
            segments, step = split(tokens, self.tokens.first_timestamp, seek, num_frames)
            transcript = WindowTranscript(
                "".join(map(self.text, segments)), segments, seek, num_prompt_tokens=len(prompt)
            )
            transcript.num_tokens = len(answer.token_ids)
            if options.is_measured:
                transcript.avg_logprob = (answer.cumulative_logprob or 0.0) / max(1, len(answer.token_ids))
                transcript.no_speech_prob = await self._no_speech_prob(window, name)
            if options.has_words:
                num_heard = spectrum.num_heard_frames - seek
                times = await self._token_times(prompt, answer.token_ids, window, num_heard, name)
                transcript.words = self._words(segments, times, seek, language)
            yield transcript
            num_windows += 1
            seek += step if step > 0 and num_windows < max_windows else num_frames

    def text(self, segment: Segment) -> str:
        """Return the text of a segment, without timestamps and marks."""
        words = [token for token in segment.tokens if token < self.tokens.end]
        return str(self._engine.tokenizer.decode(words))

    async def _transcribe_once(
        self, spectrum: Spectrum, prompt: list[int], params: SamplingParams, name: str
    ) -> AsyncGenerator[WindowTranscript, None]:
        tokens: list[int] = []
        shown = ""
        async with contextlib.aclosing(self._outputs(prompt, spectrum, params, name)) as outputs:
            async for request_output in outputs:
                [output] = request_output.outputs
                tokens += output.token_ids
                text = self.text(Segment(0, 0, tokens))
                if not output.finished() and text.endswith("\N{REPLACEMENT CHARACTER}"):
                    continue  # an incomplete character
                new, shown = text[len(shown) :], text
                if new or output.finished():
                    yield WindowTranscript(new, [], 0, num_prompt_tokens=len(prompt), num_tokens=len(tokens))

    def _prompt(self, options: TranscriptionOptions, language: str, has_times: bool) -> list[int]:
        tokens, found = self.tokens, self._tokens_before(options)
        found.append(tokens.start)
        if tokens.languages:
            found += [tokens.languages[language], tokens.task(options.task)]
        return found if has_times else [*found, tokens.no_timestamps]

    def _params(self, options: TranscriptionOptions, has_times: bool) -> SamplingParams:
        return SamplingParams(
            **{"max_tokens": None, **options.sampling}, temperature=options.temperature, seed=options.seed,
            detokenize=False, logprobs=0 if options.is_measured else None, speech=self.tokens.rules(has_times),
            output_kind=RequestOutputKind.FINAL_ONLY if has_times else RequestOutputKind.DELTA,
        )  # fmt: skip

    def _tokens_before(self, options: TranscriptionOptions) -> list[int]:
        """Return the tokens of the text that precedes the sound, the mark before them included. Raises `RequestError`
        if they have other marks, which would tell the model what to do."""
        text = (options.prompt or "").strip()
        if not text:
            return []
        longest = self._engine.config.model.max_model_len // 2 - 1
        text = text[-longest * _MAX_TOKEN_CHARACTERS :]
        found = self._engine.inputs.encode(" " + text, add_special_tokens=False)[-longest:]
        if any(token >= self.tokens.end for token in found):
            raise RequestError("prompt has marks of the model, such as <|endoftext|>; leave them out.", param="prompt")
        return [self.tokens.previous, *found]

    async def _no_speech_prob(self, window: Spectrum, name: str) -> float:
        """Return the probability of the no-speech token in the place of the language token."""
        token = self.tokens.no_speech
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, allowed_token_ids=[token])
        found = await self._answer([self.tokens.start], window, params, name)
        return math.exp(found.outputs[0].cumulative_logprob or 0.0)

    def _check_heads(self) -> None:
        heads = self.tokens.alignment_heads
        if not heads:
            raise RequestError(
                "The model's generation_config.json has no alignment_heads, so words have no times.",
                param="timestamp_granularities",
            )
        sizes = [self._setting("decoder_layers", 4), self._setting("decoder_attention_heads", 6)]
        if not all(0 <= one < size for pair in heads for one, size in zip(pair, sizes, strict=True)):
            raise RequestError(
                "alignment_heads of the model's generation_config.json name layers or heads that it does not have.",
                param="timestamp_granularities",
            )

    async def _token_times(
        self, prompt: list[int], tokens: list[int], window: Spectrum, num_frames: int, name: str
    ) -> list[float]:
        """Return when each token of a window's transcript ends, in seconds from the window's beginning, where the sound
        has `num_frames` left. The decoder reads all tokens again in one step.

        As in transformers, the last token, usually the end token, gets the time of the token before it.
        """
        if len(tokens) < 2:
            return [0.0] * len(tokens)
        heads = self.tokens.alignment_heads
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, alignment_heads=heads)
        found = await self._answer(prompt + tokens[:-1], window, params, name)
        alignment, num_rows = found.alignment, self._frames // TIMESTAMP_FRAMES
        assert alignment is not None
        num_heard = min(max(1, num_frames // TIMESTAMP_FRAMES), num_rows)
        width = self._setting("median_filter_width", 7)

        def work() -> list[float]:
            from octavo.multimodal.word_times import attention, token_times  # with numpy, as others here

            weights = attention(alignment, len(found.prompt_token_ids), len(heads), num_rows)
            times = token_times(weights[:, len(prompt) :, :num_heard], width)
            return [*map(float, times), float(times[-1])]

        return await run_off_loop(work, length=MAX_INLINE_LENGTH + 1)

    def _words(self, segments: list[Segment], times: list[float], seek: int, language: str) -> list[Word]:
        """Return the words of a window's segments, in order. `times` has the end of each token."""
        from octavo.multimodal.word_times import Word, words_of

        offset, found, first = seek * TIMESTAMP_S / TIMESTAMP_FRAMES, [], 0
        decode: Callable[[list[int]], str] = self._engine.tokenizer.decode
        for segment in segments:
            places = [first + i for i, token in enumerate(segment.tokens) if token < self.tokens.end]
            words = [token for token in segment.tokens if token < self.tokens.end]
            first += len(segment.tokens)
            for text, of_word in words_of(words, decode, language):
                begin, last = places[of_word[0]], places[of_word[-1]]
                start = times[begin - 1] if begin else 0.0
                found.append(Word(text, offset + start, offset + times[last]))
        return found

    async def _answer(self, prompt: list[int], window: Spectrum, params: SamplingParams, name: str) -> RequestOutput:
        async with contextlib.aclosing(self._outputs(prompt, window, params, name)) as outputs:
            found = [output async for output in outputs]
        return found[-1]

    async def _outputs(
        self, prompt: list[int], window: Spectrum, params: SamplingParams, name: str
    ) -> AsyncGenerator[RequestOutput, None]:
        given = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": window}}
        inputs = self._engine.inputs
        request = await run_off_loop(
            lambda: inputs.process(given, params, data_parallel_rank=self._rank), length=MAX_INLINE_LENGTH + 1
        )
        request = msgspec.structs.replace(request, deadline=self._deadline, client=self._client)
        begin = self._engine.generate_from if self._answered is None else self._answered
        outputs = begin(request, f"{name}-{request.request_id}")
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if output.outputs[0].finish_reason == "abort":
                    raise aborted(output.outputs[0].stop_reason)
                yield output

    def _setting(self, name: str, default: int) -> int:
        """Return a setting of config.json, which omits transformers' defaults."""
        return int(self._engine.config.model.checkpoint.config.get(name, default))

    @property
    def _frames(self) -> int:
        listener = self._engine.inputs.listener
        assert listener is not None
        return listener.window_frames


def segment_measures(transcript: WindowTranscript, text: str, temperature: float) -> dict[str, Any]:
    """Return the fields of a segment in verbose answers, apart from its text and times."""
    return {
        "seek": transcript.seek,
        "temperature": temperature,
        "avg_logprob": transcript.avg_logprob,
        "compression_ratio": compression_ratio(text),
        "no_speech_prob": transcript.no_speech_prob,
    }
