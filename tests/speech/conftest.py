"""A Whisper as small as they get, with the real feature extractor, so that it hears thirty seconds at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

LANGUAGES = ("en", "de", "fr")
MAX_LENGTH = 40  # of a prompt and what is written down of a window


def save_whisper(folder: Path, tokenizer: Path, **sizes: Any) -> None:
    """A checkpoint of random weights, whose vocabulary is that of `tokenizer`, Whisper's own tokens behind it."""
    import torch
    import transformers

    marks = ["<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES), "<|translate|>", "<|transcribe|>"]
    marks += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    names = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
    names.add_special_tokens({"eos_token": "<|endoftext|>", "additional_special_tokens": marks})
    names.add_tokens([f"<|{number / 50:.2f}|>" for number in range(1501)])
    ids = {name: names.convert_tokens_to_ids(name) for name in ["<|endoftext|>", *marks]}
    end, first = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        **{
            "vocab_size": len(names), "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 48,
            "max_target_positions": MAX_LENGTH, "pad_token_id": end, "bos_token_id": end, "eos_token_id": end,
            "decoder_start_token_id": first, "suppress_tokens": None, "begin_suppress_tokens": None, **sizes,
        }
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():  # of the usual initialisation all sounds are alike
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "encoder.embed_positions" not in name:
                parameter.normal_(std=0.25)
        model.model.decoder.embed_tokens.weight[end] *= 0.5  # so that it says something before it ends
    settings: dict[str, Any] = {
        # What is written down is ASCII.
        "suppress_tokens": [0, 1, 2, *range(97, end), *list(ids.values())[1:]], "begin_suppress_tokens": [5, end],
        "max_length": MAX_LENGTH,
        "no_timestamps_token_id": ids["<|notimestamps|>"], "prev_sot_token_id": ids["<|startofprev|>"],
        "is_multilingual": True, "max_initial_timestamp_index": 50, "decoder_start_token_id": first,
        "eos_token_id": end, "pad_token_id": end, "bos_token_id": end, "return_timestamps": False,
    }  # fmt: skip
    settings["alignment_heads"] = [[0, 1], [1, 0], [1, 1]]
    settings["lang_to_id"] = {f"<|{name}|>": ids[f"<|{name}|>"] for name in LANGUAGES}
    settings["task_to_id"] = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    names.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    save_whisper(folder, tiny_tokenizer)
    return folder


def sound(seed: int, seconds: float = 2.0) -> NDArray[np.float32]:
    """Tones that come and go, at 16 kHz."""
    draw = np.random.default_rng(seed)
    times = np.arange(int(16_000 * seconds)) / 16_000
    tones = [np.sin(2 * np.pi * pitch * times) * (np.sin(times * speed) > 0) for pitch, speed in draw.uniform(
        [100, 1], [2000, 9], (4, 2))]  # fmt: skip
    return (sum(tones) / 8 + draw.normal(0, 0.01, len(times))).astype(np.float32)


@pytest.fixture(scope="session")
def theirs(whisper: Path) -> Any:
    """The same model in `transformers`."""
    import transformers

    return transformers.WhisperForConditionalGeneration.from_pretrained(whisper).eval()


def marks(folder: Path, *names: str) -> list[int]:
    """The tokens of these names."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names]


def features(folder: Path, samples: NDArray[np.float32]) -> Any:
    """Of a sound of any length, as the model's extractor makes them."""
    import transformers

    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    more = {"truncation": False, "padding": "longest"} if len(samples) > 480_000 else {}
    return extractor(samples, sampling_rate=16_000, return_tensors="pt", **more).input_features
