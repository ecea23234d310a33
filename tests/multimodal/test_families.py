"""Every family that sees or hears, with small random weights and its real processor, beside itself in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, LoadError, RequestError
from octavo.models.config_reader import _NULLABLE
from octavo.models.multimodal_models import MEDIA_FAMILIES, TEXT_DEFAULTS
from octavo.models.registry import describe
from tests.multimodal.conftest import picture
from tests.multimodal.small_media import CASES, kind_of, save_case
from tests.multimodal.small_processors import MORE_TOKENS, TOKENS
from tests.multimodal.test_llava import assert_as_transformers, generate, tower
from tests.speech.conftest import sound
from tests.untimed import without_time

# Of each kind two of different sizes and one of the first's.
MEDIA: dict[str, list[Any]] = {
    "image": [picture(0), picture(1, 90, 33), picture(2)], "audio": [sound(0, 0.5), sound(1, 1.1), sound(2, 0.5)],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> Any:
    found = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer, extra_special_tokens=TOKENS)
    found.add_special_tokens({"additional_special_tokens": MORE_TOKENS})
    return found


# Positions in several dimensions, pictures that see ahead, sounds; the others are long tests.
SHORT = {
    "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in CASES])
def test_it_answers_as_transformers_does(tmp_path: Path, tokenizer: Any, name: str) -> None:
    pytest.importorskip(CASES[name].needs)
    save_case(tmp_path, name, tokenizer)
    family, kind = MEDIA_FAMILIES[name.partition(" ")[0]], kind_of(name)
    is_whole = family.sees_ahead == "prompt"  # not to be cut
    length = CASES[name].num_tokens
    budget = 256 if is_whole else 13 * length // 256
    llm = LLM(
        str(tmp_path), dtype="float32", max_model_len=length, max_num_batched_tokens=budget, max_num_seqs=4,
        num_gpu_blocks_override=80 * length // 256, check_invariants=True,
    )  # fmt: skip
    (first, second, third), mark = MEDIA[kind], CASES[name].mark if kind == "image" else CASES[name].token
    theirs = CASES[name].theirs
    # Where grids make positions, `generate` of transformers goes on from those of the last token, be it a picture's.
    two = f"{mark}\nbeside this one:{mark}."
    prompts = {
        "one": (f"What is it? {mark} Say it.", [first]),
        "two of different sizes": (two, [first, second]),
        "a second turn": (f"{two} It is. And now?", [first, second]),
        # transformers takes pictures without a token between them for one, where their grids make positions.
        "the same twice": (f"{mark}{mark}." if family.sections is None else f"{mark} {mark}.", [second, second]),
        "another": (f"What is it? {mark} Say it.", [third]),
    }
    asked = [{"prompt": text, "multi_modal_data": {kind: media}} for text, media in prompts.values()]
    alone = []
    for one, (text, media) in zip(asked, prompts.values(), strict=True):
        alone += generate(llm, one)
        # Nested, as chats of transformers have it; a flat list is one of pictures that are alone.
        given = [media] if family.counts_pictures else media
        processor = theirs and theirs(tmp_path)
        assert_as_transformers(tmp_path, alone[-1], text, given, kind, processor)
    assert alone[-1].prompt_token_ids == alone[0].prompt_token_ids
    assert alone[-1].outputs[0].logprobs != alone[0].outputs[0].logprobs
    assert alone[2].num_cached_tokens >= (0 if is_whole else len(alone[1].prompt_token_ids) // 16 * 16)
    llm.reset_prefix_cache()
    runs = tower(llm).num_runs
    for one, other in zip(alone, generate(llm, *asked), strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert tower(llm).num_runs == runs
    if family.frames_prompts:  # of text alone
        llm.close()
        return
    as_ids = {"prompt_token_ids": llm.get_tokenizer().encode(prompts["one"][0]), "multi_modal_data": {kind: first}}
    assert generate(llm, as_ids)[0].outputs[0].logprobs == alone[0].outputs[0].logprobs
    llm.close()


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("Qwen3VLForConditionalGeneration", 4),
        ("Gemma3ForConditionalGeneration", 1),
        pytest.param("Qwen2AudioForConditionalGeneration", 1, marks=pytest.mark.long),
        pytest.param("Qwen3_5ForConditionalGeneration", 2, marks=pytest.mark.long),
    ],
)
def test_preempted_forked_and_found_prompts_see_the_same(tmp_path: Path, tokenizer: Any, name: str, shift: int) -> None:
    """Where positions or what a token sees follow from the picture, not from the token's place alone."""
    save_case(tmp_path, name, tokenizer)
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 112, "max_num_batched_tokens": 13, "max_num_seqs": 4}
    params = SamplingParams(temperature=1, seed=5, max_tokens=60, logprobs=1, ignore_eos=True, n=2)
    hears = MEDIA_FAMILIES[name].kind == "audio"
    media: dict[str, Any] = {"audio": sound(3, 0.5)} if hears else {"image": picture(3, 120, 110)}
    mark = "<sound>" if hears else "<image>"
    # In each the first block of 16 ends within the picture or the sound.
    texts = [f"number {i}: {'x' * (shift + i % 2)}{mark} and so on" for i in range(3)]
    prompts = [{"prompt": text, "multi_modal_data": media} for text in texts]
    llm = LLM(str(tmp_path), num_gpu_blocks_override=80, check_invariants=True, **sizes)
    alone = []
    for prompt in prompts:
        alone += generate(llm, prompt, params=params)
        one = alone[-1]
        assert one.prompt_token_ids[15] == one.prompt_token_ids[16] == llm.config.media.token_id
        [again] = generate(llm, prompt, params=params)
        assert again.num_cached_tokens >= 16
        assert [found.logprobs for found in again.outputs] == [found.logprobs for found in one.outputs]
    llm.close()
    crowded = LLM(
        str(tmp_path), num_gpu_blocks_override=13, check_invariants=True, enable_prefix_caching=False, **sizes
    )
    without_time(crowded.core)
    together = generate(crowded, *prompts, params=params)
    assert sum(output.metrics.num_preemptions for output in together) > 0
    for one, other in zip(alone, together, strict=True):
        assert [found.logprobs for found in one.outputs] == [found.logprobs for found in other.outputs]
    crowded.close()


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3VLForConditionalGeneration",
        pytest.param("Qwen2VLForConditionalGeneration", marks=pytest.mark.long),
        "LlavaNextForConditionalGeneration",
        pytest.param("Qwen2AudioForConditionalGeneration", marks=pytest.mark.long),
        "SmolVLMForConditionalGeneration",
    ],
)
def test_rows_of_the_tower_may_be_brought(tmp_path: Path, tokenizer: Any, name: str) -> None:
    pytest.importorskip(CASES[name].needs)
    save_case(tmp_path, name, tokenizer)
    family = MEDIA_FAMILIES[name]
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=256, num_gpu_blocks_override=80, enable_mm_embeds=True)
    medium, mark = MEDIA[family.kind][0], "<image>" if family.kind == "image" else CASES[name].token
    prompt = f"number {mark} and so on"
    alone = generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: medium}})[0]
    [(_, made)] = tower(llm)._entries.values()
    parts, num_rows, hidden_size = made.result().shape
    rows = torch.tensor(made.result()).transpose(0, 1).reshape(num_rows, parts * hidden_size)
    rows /= llm.config.media.row_multiplier  # type: ignore[union-attr]
    given: dict[str, Any] = {f"{family.kind}_embeds": rows}
    if family.sections is not None:
        assert llm.inputs.media is not None
        merge = llm.inputs.media._processor.image_processor.merge_size
        found = llm.inputs.media._processor.image_processor(images=[medium])["image_grid_thw"][0]
        assert found[0] * found[1] * found[2] == num_rows * merge**2
        with pytest.raises(RequestError, match="need image_grid_thw"):
            generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: rows}})
        for grid in ([1, 2, 2], [2, *found[1:]], [1, 0, 1], [1, 2]):
            with pytest.raises(RequestError, match="image_grid_thw"):
                generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: given | {"image_grid_thw": grid}}})
        given["image_grid_thw"] = torch.tensor(found)
    if name.startswith("SmolVLM"):
        with pytest.raises(RequestError, match="embeddings are not built for it"):
            generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: given}})
    else:
        brought = generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: given}})[0]
        assert brought.prompt_token_ids == alone.prompt_token_ids
        for one, other in zip(brought.outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
            assert {token: pytest.approx(of.logprob, abs=1e-4) for token, of in one.items()} == {
                token: of.logprob for token, of in other.items()
            }
    llm.close()


@pytest.mark.long
def test_experts_may_lie_as_qwen3_vl_files_have_them(tmp_path: Path, tokenizer: Any) -> None:
    save_case(tmp_path, "Qwen3VLMoeForConditionalGeneration", tokenizer)
    answers = []
    for _ in range(2):
        with LLM(str(tmp_path), dtype="float32", max_model_len=64, num_gpu_blocks_override=8) as llm:
            answers.append(generate(llm, {"prompt": "What is it?"})[0].outputs[0].logprobs)
        tensors = load_file(tmp_path / "model.safetensors")
        turned = {k: v.transpose(1, 2).contiguous() for k, v in tensors.items() if ".experts." in k}
        save_file(tensors | turned, tmp_path / "model.safetensors", {"format": "pt"})
    assert answers[0] == answers[1]


def test_prompts_that_see_themselves_are_not_without_pictures_nor_cut(tmp_path: Path, tokenizer: Any) -> None:
    save_case(tmp_path, "PaliGemmaForConditionalGeneration", tokenizer)
    for more, said in (
        ({"language_model_only": True}, "is no language model without pictures"),
        ({"max_num_batched_tokens": 13}, "--max-num-batched-tokens 13 is less than --max-model-len 64"),
    ):
        with pytest.raises(ConfigError, match=said):
            LLM(str(tmp_path), max_model_len=64, num_gpu_blocks_override=8, **more)


@pytest.mark.parametrize(
    ("name", "guessing", "text"),
    [
        ("Qwen3_5ForConditionalGeneration", "mtp.fc.weight", {}),
        # A layer after those of the model.
        (
            "GlmOcrForConditionalGeneration",
            "model.language_model.layers.2.eh_proj.weight",
            {"num_nextn_predict_layers": 1},
        ),
    ],
)
def test_tensors_of_a_head_that_guesses_are_passed_over(
    tmp_path: Path, tokenizer: Any, name: str, guessing: str, text: dict[str, Any]
) -> None:
    save_case(tmp_path, name, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= text
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {guessing: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 8}
    with LLM(str(tmp_path), language_model_only=True, **sizes) as llm:
        assert generate(llm, {"prompt": "x"})[0].outputs[0].token_ids
    save_file(tensors | {"other.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"other\.weight"):
        LLM(str(tmp_path), language_model_only=True, **sizes)


def test_every_family_has_its_case() -> None:
    of_test_mllama = {"MllamaForConditionalGeneration"}
    assert {name.partition(" ")[0] for name in CASES} | of_test_mllama == set(MEDIA_FAMILIES)


@pytest.mark.parametrize(
    ("name", "whole", "text", "is_tied"),
    [
        ("Mistral3ForConditionalGeneration", {}, {}, False),
        ("AyaVisionForConditionalGeneration", {}, {}, True),
        ("AyaVisionForConditionalGeneration", {"tie_word_embeddings": False}, {}, False),
        ("LlavaOnevisionForConditionalGeneration", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
        ("SmolVLMForConditionalGeneration", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
    ],
)
def test_whose_word_counts_on_tied_embeddings(
    name: str, whole: dict[str, Any], text: dict[str, Any], is_tied: bool
) -> None:
    config = {"architectures": [name], "image_token_id": 0, "text_config": text, **whole}
    assert describe(config).tie_word_embeddings == is_tied


@pytest.mark.parametrize("name", MEDIA_FAMILIES)
def test_null_is_as_if_it_were_left_out(name: str) -> None:
    whole = {"architectures": [name], "image_token_id": 0, "audio_token_id": 0}
    text = {"hidden_size": 4096, "num_attention_heads": 32}
    defaults = {"model_type": ""} | TEXT_DEFAULTS[MEDIA_FAMILIES[name].decoder]
    nulls: dict[str, Any] = {
        setting: None for setting, value in defaults.items() if setting not in _NULLABLE and not isinstance(value, bool)
    }
    of_sight = dict.fromkeys(["deepstack_visual_indexes", "image_size", "patch_size", "max_num_tiles"])
    given = {"text_config": nulls | text, "vision_config": of_sight, "image_token_index": None}
    assert describe(whole | given) == describe(whole | {"text_config": text})
    if not MEDIA_FAMILIES[name].sections:
        assert describe(whole | {"text_config": None}) == describe(whole)


def test_a_decoder_that_is_described_beside_the_rest_is_the_same() -> None:
    text = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "tie_word_embeddings": True,
    }  # fmt: skip
    whole = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": 7, "vision_config": {}}
    flat = describe(whole | text | {"model_type": "qwen2_5_vl"})
    assert flat == describe(whole | {"text_config": text})
    assert flat.tie_word_embeddings
    rope = flat.layers[0].attention.rope  # type: ignore[union-attr]
    assert rope is not None and rope.axes == (0, 0, 0, 0, 1, 1, 2, 2) and rope.theta == 5e5
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 2, 1]}
    with pytest.raises(LoadError, match=r"mrope_section \[4, 2, 1\] does not share out the 8 pairs of a head"):
        describe(whole | text)
