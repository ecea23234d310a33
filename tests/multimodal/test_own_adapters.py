"""Adapters that a checkpoint brings, which prompts take by their media: Granite Speech's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from octavo import LLM
from octavo.errors import ConfigError, RequestError
from octavo.lora.request import LoRARequest
from octavo.multimodal.granite_speech import GraniteSpeechProcessor
from tests.multimodal.conftest import save
from tests.multimodal.granite_speech import MelSpectrogram, SavedGraniteSpeech, encoder, granite_speech, with_adapter
from tests.multimodal.test_llava import assert_as_transformers, generate
from tests.speech.conftest import sound

SIZES: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 13, "max_num_seqs": 4,
    "num_gpu_blocks_override": 40, "check_invariants": True,
}  # fmt: skip
FIRST, SECOND = sound(0, 0.5), sound(1, 1.1)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("granite")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer, extra_special_tokens={"audio_token": "<sound>"})
    text = {
        "model_type": "granite", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
    }  # fmt: skip
    config = transformers.GraniteSpeechConfig(
        text_config=text, audio_token_index=tokenizer.convert_tokens_to_ids("<sound>"), tie_word_embeddings=False,
        **encoder(),
    )  # fmt: skip
    save(folder, transformers.GraniteSpeechForConditionalGeneration(config), granite_speech(tokenizer))
    with_adapter(folder)
    return folder


def copy(granite: Path, folder: Path, adapter: dict[str, Any] | None, **config: Any) -> Path:
    """The checkpoint with another configuration, and its adapter with other settings, or without."""
    shutil.copytree(granite, folder)
    for name, changes in (("config.json", config), ("adapter_config.json", adapter)):
        if changes is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    return folder


def hear(text: str, *sounds: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"audio": list(sounds)}}


@pytest.mark.long
def test_prompts_with_sounds_take_the_adapter_and_others_do_not(granite: Path, tmp_path: Path) -> None:
    texts: dict[str, list[Any]] = {
        "Words alone are said by the model as it is.": [],
        "What is it? <sound> Say it.": [FIRST],
        "<sound> beside this one:<sound>": [FIRST, SECOND],
        "Words alone are said by the model, and more.": [],
    }
    asked = [hear(text, *sounds) if sounds else {"prompt": text} for text, sounds in texts.items()]
    with LLM(str(granite), **SIZES) as llm:
        alone = []
        for one, (text, sounds) in zip(asked, texts.items(), strict=True):
            alone += generate(llm, one)
            assert_as_transformers(granite, alone[-1], text, sounds, "audio", SavedGraniteSpeech(granite))
        llm.reset_prefix_cache()
        for one, other in zip(alone, generate(llm, *asked), strict=True):
            assert one.outputs[0].logprobs == other.outputs[0].logprobs
        # A text is not found behind another adapter: that of a prompt with a sound before its sound.
        text = "What is it that was said in the room? "
        [first] = generate(llm, hear(f"{text}<sound>", FIRST))
        [second] = generate(llm, {"prompt": f"{text}Nothing."})
        [third] = generate(llm, hear(f"{text}<sound>", SECOND))
        assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 0, 32)
        with pytest.raises(RequestError, match="'mine' needs --enable-lora"):
            llm.generate(["x"], lora_request=LoRARequest("mine", 1, str(granite)), use_tqdm=False)
    with LLM(str(copy(granite, tmp_path / "without", None, has_lora_adapter=False)), **SIZES) as llm:
        assert llm.config.lora is None
        found = generate(llm, *asked)
    for one, other, sounds in zip(alone, found, texts.values(), strict=True):
        assert (one.outputs[0].logprobs == other.outputs[0].logprobs) == (not sounds)


@pytest.mark.parametrize(
    "sizes", [{"pipeline_parallel_size": 2}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long)]
)
def test_several_workers_have_the_adapter(granite: Path, sizes: dict[str, int]) -> None:
    with LLM(str(granite), **SIZES, **sizes) as llm:
        text = "What is it? <sound> Say it."
        [output] = generate(llm, hear(text, FIRST))
        assert_as_transformers(granite, output, text, [FIRST], "audio", SavedGraniteSpeech(granite))


@pytest.mark.long
def test_what_the_adapter_asks_for_is_served(granite: Path, tmp_path: Path) -> None:
    with LLM(str(granite), language_model_only=True, **SIZES) as llm:
        assert llm.config.lora is None
    for i, (targets, expected) in enumerate(((["v_proj", "q_proj"], ["q_proj", "v_proj"]), (".*[qv]_proj", None))):
        folder = copy(granite, tmp_path / str(i), {"target_modules": targets})
        with LLM(str(folder), **SIZES) as llm:
            lora = llm.config.lora
            assert lora is not None and lora.max_loras == 1 and lora.max_rank == 4
            assert lora.target_modules == expected and not lora.takes_requests
            assert generate(llm, hear("<sound>", FIRST))


@pytest.mark.parametrize(
    ("adapter", "flags", "said"),
    [
        (None, {}, r"takes an adapter for sounds, and there is no adapter_config\.json in"),
        ({}, {"enable_lora": True}, "--enable-lora is not built with models that bring adapters"),
        (
            {}, {"tensor_parallel_size": 2, "reproducible_parallel": True},
            "--reproducible-parallel is not built with models that bring adapters",
        ),
        ({"r": 600}, {}, r"ranks must be 1 to 512, got \[600\]"),
        ({"rank_pattern": {"q_proj": "x"}}, {}, r"ranks must be 1 to 512, got \[4, 'x'\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_at_the_start(
    granite: Path, tmp_path: Path, adapter: dict[str, Any] | None, flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(str(copy(granite, tmp_path / "other", adapter)), **SIZES, **flags)


def test_an_adapter_that_has_gone_is_the_servers_fault(granite: Path, tmp_path: Path) -> None:
    folder = copy(granite, tmp_path / "other", {})
    with LLM(str(folder), **SIZES) as llm:
        (folder / "adapter_model.safetensors").unlink()
        with pytest.raises(RequestError, match="the adapter of the model's sounds") as refused:
            generate(llm, hear("<sound>", FIRST))
        assert refused.value.status == 500
        assert generate(llm, {"prompt": "x"})


@pytest.mark.parametrize("num_samples", [257, 400, 1599, 1600, 17_600])
def test_features_are_those_of_torchaudio(granite: Path, num_samples: int) -> None:
    """By the formula of its documentation, in float64."""
    samples = sound(4, 1.1)[:num_samples]
    found = GraniteSpeechProcessor(str(granite), 7)(audio=[samples])
    reference = MelSpectrogram(16000, 512, 400, 160, 80)(torch.tensor(samples)[None])[0].T
    logs = reference.clip(min=1e-10).log10()
    logs = torch.maximum(logs, logs.max() - 8) / 4 + 1
    features = torch.tensor(found["input_features"])[0].reshape(-1, 80)
    assert len(features) == len(logs) // 2 * 2 == (num_samples // 160 + 1) // 2 * 2
    torch.testing.assert_close(features, logs[: len(features)], atol=1e-4, rtol=0)
    steps = len(features) // 2
    assert found["input_ids"].tolist() == [7] * (-(-steps // 15) * 3)
    assert found["text_replacement_offsets"] == [[{"replacement": "<sound>" * len(found["input_ids"])}]]


def test_a_sound_whose_ends_cannot_be_mirrored_is_too_short(granite: Path) -> None:
    with LLM(str(granite), **SIZES) as llm, pytest.raises(RequestError, match="too short: the model would get no part"):
        generate(llm, hear("<sound>", sound(0, 0.5)[:256]))
