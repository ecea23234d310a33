"""A model that sees, as small as they get: a tower of three layers, four rows a picture, and a decoder of two."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.e2e.server import Server, openai_client

# That of LLaVA 1.5, with another way to end a turn.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def save_llava(folder: Path, tokenizer: Any, text: dict[str, Any], model_type: str = "llama") -> None:
    """A checkpoint of random weights with a processor, and `tokenizer`'s id for <image>."""
    import torch
    import transformers

    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    text_config = transformers.AutoConfig.for_model(
        model_type, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=256, **text,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text_config, image_token_id=tokenizer.convert_tokens_to_ids("<image>")
    )
    size = {"height": 28, "width": 28}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip
    save(folder, transformers.LlavaForConditionalGeneration(config), processor)


def save(folder: Path, model: Any, processor: Any) -> None:
    """Give a model random weights, and make a checkpoint of it and its processor."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():  # of the usual initialisation all pictures look alike
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer_that_sees(tiny_tokenizer: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer, additional_special_tokens=["<image>"])


@pytest.fixture(scope="session")
def llava(tmp_path_factory: pytest.TempPathFactory, tokenizer_that_sees: Any) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder, tokenizer_that_sees, {})
    return folder


@pytest.fixture(scope="session")
def draft_model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A language model that knows no picture's token."""
    import torch
    import transformers

    found = tmp_path_factory.mktemp("draft")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=259, max_position_embeddings=512,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(found)
    transformers.PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer).save_pretrained(found)
    return found


def picture(seed: int, width: int = 40, height: int = 60) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """Of the module's server."""
    with openai_client(server) as client:
        yield client
