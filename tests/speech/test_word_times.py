"""Times of words: the parts, beside those of `transformers`. Whole transcriptions are in `test_server`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from octavo import SamplingParams
from octavo.entrypoints.audio.transcriber import Transcriber, TranscriptionOptions
from octavo.errors import RequestError
from octavo.layers.rotary import identity_table
from octavo.multimodal.word_times import _median, attention, token_times, warp, words_of
from octavo.ops import LayerKVCache, cpu
from octavo.ops.cpu_cache import keys_of
from tests.speech.conftest import features, marks, sound
from tests.speech.test_whisper import asked, engine, generate
from tests.untimed import without_time

HEADS = [(1, 1), (0, 0)]
ALIGNED = SamplingParams(temperature=0, max_tokens=1, alignment_heads=HEADS)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (5, 40), (40, 30)])
def test_the_cheapest_way_is_that_of_transformers(shape: tuple[int, int]) -> None:
    for seed in range(5):
        draw = np.random.default_rng(seed)
        # Whole numbers meet in equal sums, where the order of choices shows.
        costs = draw.normal(size=shape) if seed % 2 else draw.integers(-2, 3, shape).astype(np.float64)
        rows, columns = _dynamic_time_warping(costs)
        assert warp(costs).tolist() == [int(columns[rows == row].min()) for row in range(shape[0])]


@pytest.mark.parametrize("width", [1, 3, 7])
def test_medians_are_those_of_transformers(width: int) -> None:
    for num_rows in (2, 4, 30):
        x = np.random.default_rng(num_rows).normal(size=(3, num_rows)).astype(np.float32)
        assert np.array_equal(_median(x, width), _median_filter(torch.tensor(x)[None], width)[0].numpy())


def test_rows_that_all_tokens_see_alike_say_nothing() -> None:
    weights = np.random.default_rng(0).random((2, 4, 9)).astype(np.float32)
    weights[:, :, 5] = 0
    assert np.isfinite(token_times(weights, 3)).all()
    assert token_times(weights[:, :1], 3).tolist() == [0.0]


TEXTS = [
    " Well, (he) said: “hello”",
    "a.b c",
    " 5,000 - yes!",
    "“",
    " ",
    " (",
    " née 东京 x",
    "\N{REPLACEMENT CHARACTER} a",
]


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_transformers(text: str) -> None:
    def decode(tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    tokens = list(text.encode())
    for language, name in (("en", "english"), ("yue", "cantonese")):
        tokenizer = SimpleNamespace(decode=decode, eos_token_id=256)
        words, _, places = _combine_tokens_into_words(tokenizer, tokens, name)
        assert words_of(tokens, decode, language) == list(zip(words, places, strict=True))


def test_text_that_breaks_off_within_a_character_has_no_word_of_it() -> None:
    tokens = list(" a é".encode())[:-1]
    assert words_of(tokens, lambda some: bytes(some).decode(errors="replace"), "en")[0] == (" a", [0, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_keys_are_read_as_they_were_written(dtype: str) -> None:
    cache: LayerKVCache = cpu.allocate_kv_cache(4, 8, 3, 16, dtype)
    written = "bfloat16" if dtype == "bfloat16" else "float32"
    found = np.random.default_rng(0).normal(size=(16, 3, 16)).astype(np.float32)
    key: Any = cpu.place(found.astype(written))
    slots: Any = np.concatenate([np.arange(24, 32), np.arange(8, 16)])
    no_rotation = identity_table(1)
    cpu.rotary_and_cache(key.copy(), key, key.copy(), np.zeros(16, np.int64), no_rotation, cache, slots)
    keys = keys_of(cache, [3, 1], [2, 0])
    tolerance = {"float32": 0, "bfloat16": 0.01, "int8": 0.02, "float8_e4m3fn": 0.15, "float8_e5m2": 0.3}[dtype]
    assert keys.shape == (2, 16, 16)
    np.testing.assert_allclose(keys, found.transpose(1, 0, 2)[[2, 0]], atol=tolerance)


def test_what_tokens_attend_to_is_that_of_transformers(whisper: Path, theirs: Any) -> None:
    prompt = [*marks(whisper, "startoftranscript", "en", "transcribe"), 40, 50, 60, 41, 51]
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        expected = theirs(
            input_features=features(whisper, sound(0)), decoder_input_ids=torch.tensor([prompt]), output_attentions=True
        ).cross_attentions
    llm = engine(whisper)
    [output] = generate(llm, asked(prompt, sound(0)), params=ALIGNED)
    llm.close()
    found = attention(output.alignment, len(prompt), len(HEADS), 1500)
    for weights, (layer, head) in zip(found, HEADS, strict=True):
        np.testing.assert_allclose(weights, expected[layer][0, head].numpy(), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_chunks_company_and_preemptions_change_no_bit_of_it(whisper: Path, mode: str) -> None:
    start = marks(whisper, "startoftranscript", "de", "transcribe")
    # The third is in the middle of its prompt when the others need its blocks.
    prompts = [asked(start + [40 + seed, 50, 60, 70, 41] * (5 if seed == 2 else 2), sound(seed)) for seed in range(3)]
    whole = engine(whisper)
    alone = [generate(whole, prompt, params=ALIGNED)[0].alignment for prompt in prompts]
    assert len(set(alone)) == 3
    plain = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    assert generate(whole, prompts[0], params=plain)[0].alignment is None
    whole.close()
    crowded = engine(
        whisper, max_num_batched_tokens=5, num_gpu_blocks_override=3 * 94 + 5, preemption_mode=mode, swap_space=0.01,
        block_size=16, max_num_seqs=3,
    )  # fmt: skip
    without_time(crowded.core)  # type: ignore[arg-type]
    long = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, alignment_heads=HEADS)
    assert [generate(crowded, prompt, params=long)[0].alignment for prompt in prompts] == alone
    together = generate(crowded, *prompts, params=long)
    crowded.close()
    assert [output.metrics.num_preemptions for output in together] == [0, 0, 1]
    assert [output.alignment for output in together] == alone


@pytest.mark.parametrize(("heads", "message"), [(None, "no alignment_heads"), ([[0, 2]], "does not have")])
def test_checkpoints_that_do_not_say_what_follows_the_sound_are_refused(heads: Any, message: str) -> None:
    names = ["startoftranscript", "en", "transcribe", "startofprev", "notimestamps", "endoftext"]
    checkpoint = SimpleNamespace(
        generation_config={"alignment_heads": heads}, config={"decoder_layers": 1, "decoder_attention_heads": 2}
    )
    asked_of: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(vocab={f"<|{name}|>": number for number, name in enumerate(names)}),
        config=SimpleNamespace(model=SimpleNamespace(checkpoint=checkpoint)),
    )
    with pytest.raises(RequestError, match=message):
        Transcriber(asked_of).check(TranscriptionOptions("transcribe", has_words=True))
    Transcriber(asked_of).check(TranscriptionOptions("transcribe"))
