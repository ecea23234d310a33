"""Every family that sees, with small random weights and its real processor, beside itself in `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from octavo import LLM
from octavo.errors import LoadError, RequestError
from octavo.models.registry import describe
from octavo.models.vision import NOT_BUILT, VISION_FAMILIES
from octavo.multimodal.processor import _without_videos
from tests.multimodal.conftest import picture, save
from tests.multimodal.test_llava import assert_as_transformers, generate, tower

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
SQUARE = {"height": 28, "width": 28}
GRID = [[28, 56], [56, 28], [56, 56]]
TOKENS = {
    "image_token": "<image>", "start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>",
    "context_image_token": "<image>",
}  # fmt: skip
MORE_TOKENS = [
    "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|IMG_PATCH|>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 3) for j in range(1, 3)),
]  # fmt: skip


class Case(NamedTuple):
    """A family's configuration beside `text_config`, and its processor."""

    text: dict[str, Any]
    settings: Callable[[], dict[str, Any]]
    processor: Callable[[Any], Any]
    image_token: str = "<image>"  # which a row stands in the place of
    needs: str = "transformers"  # what its processor asks for


def pixtral(tokenizer: Any, merge: int) -> Any:
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=14 * merge)
    return transformers.PixtralProcessor(
        images, tokenizer, patch_size=14, spatial_merge_size=merge, image_token="<image>"
    )


def llava_next(tokenizer: Any) -> Any:
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=GRID
    )
    return transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def llava(tokenizer: Any) -> Any:
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SQUARE)
    return transformers.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def idefics3(tokenizer: Any) -> Any:
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=1)


def tiles() -> Any:
    return transformers.GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, max_patches=4)


def aya(tokenizer: Any) -> Any:
    return transformers.AyaVisionProcessor(tiles(), tokenizer, patch_size=14, img_size=28, downsample_factor=2)


def internvl(tokenizer: Any) -> Any:
    return _without_videos(transformers.InternVLProcessor)(tiles(), tokenizer, image_seq_length=1)


def onevision(tokenizer: Any) -> Any:
    images = transformers.LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=GRID)
    return _without_videos(transformers.LlavaOnevisionProcessor)(
        images, tokenizer, num_image_tokens=4, vision_feature_select_strategy="full"
    )


def smolvlm(tokenizer: Any) -> Any:
    images = transformers.SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return _without_videos(transformers.SmolVLMProcessor)(images, tokenizer, None, image_seq_len=1)


def aria(tokenizer: Any) -> Any:
    images = transformers.AriaImageProcessorPil(max_image_size=490, min_image_size=28)
    return transformers.AriaProcessor(images, tokenizer, size_conversion={490: 3, 980: 4})


def clip() -> Any:
    return transformers.CLIPVisionConfig(**SIZES)


CASES: dict[str, Case] = {
    "LlavaForConditionalGeneration": Case({"model_type": "llama"}, lambda: {"vision_config": clip()}, llava),
    "LlavaForConditionalGeneration (Pixtral)": Case(
        {"model_type": "mistral", "sliding_window": None},
        lambda: {
            "vision_config": transformers.PixtralVisionConfig(**SIZES | {"image_size": 84}),
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        lambda tokenizer: pixtral(tokenizer, 1),
        needs="torchvision",
    ),
    "LlavaNextForConditionalGeneration": Case(
        # Its rows are multiplied as embeddings are. transformers does not apply `logits_scaling` here.
        {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
        lambda: {"vision_config": clip(), "image_grid_pinpoints": GRID},
        llava_next,
    ),
    "VipLlavaForConditionalGeneration": Case(
        {"model_type": "llama"}, lambda: {"vision_config": clip(), "vision_feature_layers": [-1, -2]}, llava
    ),
    "Mistral3ForConditionalGeneration": Case(
        {"model_type": "mistral", "sliding_window": None},
        lambda: {
            "vision_config": transformers.PixtralVisionConfig(**SIZES | {"image_size": 84}), "spatial_merge_size": 2,
        },
        lambda tokenizer: pixtral(tokenizer, 2),
        needs="torchvision",
    ),
    "Idefics3ForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {"vision_config": transformers.Idefics3VisionConfig(**SIZES), "scale_factor": 2},
        idefics3,
    ),
    "SmolVLMForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {
            "vision_config": transformers.AutoConfig.for_model("smolvlm_vision", **SIZES), "scale_factor": 2,
        },
        smolvlm,
        needs="num2words",
    ),
    "LlavaOnevisionForConditionalGeneration": Case(
        {"model_type": "qwen2"},
        lambda: {
            "vision_config": transformers.SiglipVisionConfig(**SIZES), "image_grid_pinpoints": GRID,
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        onevision,
    ),
    "InternVLForConditionalGeneration": Case(
        {"model_type": "qwen3"},
        lambda: {
            "vision_config": transformers.InternVLVisionConfig(
                **SIZES | {"image_size": [28, 28], "patch_size": [14, 14]}
            ),
            "image_seq_length": 1,
        },
        internvl,
    ),
    "AyaVisionForConditionalGeneration": Case(
        {"model_type": "cohere2", "logit_scale": 1.0},  # which transformers does not apply here, and the model has
        lambda: {"vision_config": transformers.SiglipVisionConfig(**SIZES), "downsample_factor": 2},
        aya,
        "<|IMG_PATCH|>",
    ),
    "AriaForConditionalGeneration": Case(
        {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        lambda: {
            "vision_config": transformers.Idefics3VisionConfig(**SIZES | {"image_size": 490, "patch_size": 70}),
            "projector_patch_to_query_dict": {49: 3, 196: 4},
        },
        aria,
    ),
}  # fmt: skip
A, B = picture(0), picture(1, 90, 33)


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> Any:
    found = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer, extra_special_tokens=TOKENS)
    found.add_special_tokens({"additional_special_tokens": MORE_TOKENS})
    return found


def save_case(folder: Path, name: str, tokenizer: Any) -> None:
    case = CASES[name]
    text = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 512, **case.text,
    }  # fmt: skip
    builder = getattr(transformers, name.partition(" ")[0])
    settings = case.settings() | {"tie_word_embeddings": False}
    settings["image_token_id"] = tokenizer.convert_tokens_to_ids(case.image_token)
    config = builder.config_class(text_config=text, **settings)
    save(folder, builder(config), case.processor(tokenizer))


@pytest.mark.parametrize("name", CASES)
def test_it_answers_as_transformers_does(tmp_path: Path, tokenizer: Any, name: str) -> None:
    pytest.importorskip(CASES[name].needs)
    save_case(tmp_path, name, tokenizer)
    family = VISION_FAMILIES[name.partition(" ")[0]]
    llm = LLM(
        str(tmp_path), dtype="float32", max_model_len=256, max_num_batched_tokens=13, max_num_seqs=4,
        num_gpu_blocks_override=80, check_invariants=True,
    )  # fmt: skip
    two = "<image>\nbeside this one:<image>"
    prompts = {
        "one": ("What is it? <image> Say it.", [A]),
        "two of different sizes": (two, [A, B]),
        "a second turn": (f"{two} It is. And now?", [A, B]),
        "the same twice": ("<image><image>", [B, B]),
        "another": ("What is it? <image> Say it.", [picture(2)]),
    }
    asked = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in prompts.values()]
    alone = []
    for one, (text, images) in zip(asked, prompts.values(), strict=True):
        alone += generate(llm, one)
        # Nested, as chats of transformers have it; a flat list is one of pictures that are alone.
        assert_as_transformers(tmp_path, alone[-1], text, [images] if family.counts_pictures else images)
    assert alone[-1].prompt_token_ids == alone[0].prompt_token_ids
    assert alone[-1].outputs[0].logprobs != alone[0].outputs[0].logprobs
    assert alone[2].num_cached_tokens >= len(alone[1].prompt_token_ids) // 16 * 16
    llm.reset_prefix_cache()
    runs = tower(llm).num_runs
    for one, other in zip(alone, generate(llm, *asked), strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert tower(llm).num_runs == runs
    as_ids = {"prompt_token_ids": tokenizer(prompts["one"][0])["input_ids"], "multi_modal_data": {"image": A}}
    assert generate(llm, as_ids)[0].outputs[0].logprobs == alone[0].outputs[0].logprobs
    llm.close()


def test_every_family_has_its_case() -> None:
    assert {name.partition(" ")[0] for name in CASES} == {name for name, one in VISION_FAMILIES.items() if one.sees}
    assert {name for name, one in VISION_FAMILIES.items() if not one.sees} <= NOT_BUILT.keys()


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


@pytest.mark.parametrize("name", sorted(NOT_BUILT.keys() - VISION_FAMILIES.keys()))
def test_what_cannot_be_expressed_is_refused_by_name(name: str) -> None:
    with pytest.raises(LoadError, match=f"{name}: pictures are not built in which tokens"):
        describe({"architectures": [name], "text_config": {}})


def test_gemma_3_is_a_language_model(tmp_path: Path, tokenizer: Any) -> None:
    """Tokens of its pictures attend to later ones of the same picture."""
    text = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 512,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=SIZES)
    save(tmp_path, transformers.Gemma3ForConditionalGeneration(config), tokenizer)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=64, num_gpu_blocks_override=20, language_model_only=True)
    [output] = generate(llm, {"prompt": "Hello"})
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path)
    logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
    expected = torch.log_softmax(logits, -1)
    for token, found in output.outputs[0].logprobs[0].items():
        assert found.logprob == pytest.approx(expected[token].item(), abs=1e-4)
    with pytest.raises(RequestError, match=r"takes no pictures here: .* in which tokens of a picture attend to later"):
        generate(llm, {"prompt": "<image>", "multi_modal_data": {"image": A}})
    llm.close()
