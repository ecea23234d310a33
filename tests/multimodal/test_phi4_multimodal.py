"""Phi-4-multimodal sees and hears: prompts with pictures, with sounds and with both, in its own adapters.
`test_families` has more of pictures, and of sounds.
"""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import PreTrainedTokenizerFast

from octavo import LLM
from octavo.errors import ConfigError, RequestError
from octavo.multimodal.phi4_multimodal import PictureTiles
from tests.multimodal.conftest import picture
from tests.multimodal.phi4_multimodal import ADAPTERS, Phi4
from tests.multimodal.small_media import save_case
from tests.multimodal.test_llava import GREEDY, assert_as_transformers, generate, tower
from tests.speech.conftest import sound
from tests.speech.test_sounds import wav

SIZES: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 13, "max_num_seqs": 4,
    "num_gpu_blocks_override": 40, "check_invariants": True,
}  # fmt: skip
FIRST, SECOND = sound(0, 0.5), sound(1, 1.1)
A, B = picture(0), picture(1, 90, 33)


@pytest.fixture(scope="module")
def phi4(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("phi4")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer)
    save_case(folder, "Phi4MultimodalForCausalLM (small tiles)", tokenizer)
    return folder


def ask(text: str, images: list[Any], sounds: list[Any]) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": images, "audio": sounds}}


def test_prompts_with_both_see_by_the_adapter_of_pictures_and_hear_by_a_projection_of_their_own(phi4: Path) -> None:
    prompts: dict[str, tuple[list[Any], list[Any]]] = {
        "Words alone are said by the model as it is.": ([], []),
        "What is it? <sound> Say it.": ([], [FIRST]),
        "What is it? <image> Say it.": ([A], []),
        "<sound> is that <image>, or <sound>?": ([B], [FIRST, SECOND]),
        "<image><image><sound>": ([A, B], [SECOND]),
    }
    tokenizer = PreTrainedTokenizerFast.from_pretrained(phi4)
    with LLM(str(phi4), **SIZES) as llm:
        lora = llm.config.lora
        assert lora is not None and (lora.max_loras, lora.target_modules, lora.max_rank) == (2, None, 4)
        alone = []
        for text, (images, sounds) in prompts.items():
            alone += generate(llm, ask(text, images, sounds) if images or sounds else {"prompt": text})
            if images or sounds:
                theirs: Any = Phi4.of(phi4, "image" if images else "audio", 28, sounds)
            else:
                theirs = lambda text, images, return_tensors: tokenizer(text, return_tensors="pt")  # noqa: E731
            assert_as_transformers(phi4, alone[-1], text, images, processor=theirs)
        # Two pictures, and each sound once alone and once beside them.
        assert tower(llm).num_runs == 2 + 1 + 2
        llm.reset_prefix_cache()
        asked = [ask(text, *media) if any(media) else {"prompt": text} for text, media in prompts.items()]
        for one, other in zip(alone, generate(llm, *asked), strict=True):
            assert one.outputs[0].logprobs == other.outputs[0].logprobs
        # What was computed with one adapter is not found with the other.
        text = "What is it that was there in the room? "
        assert generate(llm, ask(f"{text}<sound>", [], [FIRST]))[0].num_cached_tokens == 0
        assert generate(llm, ask(f"{text}<image>", [A], []))[0].num_cached_tokens == 0
        assert generate(llm, ask(f"{text}<image><sound>", [A], [FIRST]))[0].num_cached_tokens >= 32


def test_chats_have_both(phi4: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rounded = np.round(FIRST * 32767).astype(np.int16)
    data = {"data": base64.b64encode(wav(data=rounded.tobytes())).decode(), "format": "wav"}
    parts = [
        {"type": "image_pil", "image_pil": A},
        {"type": "input_audio", "input_audio": data},
        {"type": "text", "text": "Both?"},
    ]
    with LLM(str(phi4), **SIZES) as llm:
        messages = [{"role": "user", "content": parts}]
        [said] = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
        [expected] = generate(llm, ask("<image>\n<sound>\nBoth?", [A], [rounded / np.float32(32768)]))
        assert said.prompt_token_ids == expected.prompt_token_ids
        assert said.outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_shortest_sound_and_the_longest_picture(phi4: Path) -> None:
    with LLM(str(phi4), **SIZES) as llm:
        [shortest] = generate(llm, ask("<sound>", [], [FIRST[:400]]))
        assert len(shortest.prompt_token_ids) == 1
        with pytest.raises(RequestError, match="too short: nothing of it reaches"):
            generate(llm, ask("<sound>", [], [FIRST[:399]]))
        assert generate(llm, ask("<image>", [picture(0, 28, 10)], []))
        with pytest.raises(RequestError, match="too long for its width") as refused:
            generate(llm, ask("<image>", [picture(0, 56, 9)], []))
        assert refused.value.code == "invalid_image"


def test_what_it_does_not_take_is_refused(phi4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(phi4), limit_mm_per_prompt={"audio": 0}, **SIZES) as llm:
        assert llm.config.media is not None and set(llm.config.media.adapters) == {"image"}
        assert generate(llm, {"prompt": "<image>", "multi_modal_data": {"image": A}})
        with pytest.raises(RequestError, match="takes no sounds here, but pictures"):
            generate(llm, {"prompt": "<sound>", "multi_modal_data": {"audio": FIRST}})
    folder = tmp_path / "without"
    shutil.copytree(phi4, folder)
    shutil.rmtree(folder / ADAPTERS["audio"])
    with pytest.raises(ConfigError, match=r"takes an adapter for sounds, and there is no adapter_config\.json in"):
        LLM(str(folder), **SIZES)
    monkeypatch.setattr("octavo.config.media_flags.find_spec", lambda module: None if module == "soundfile" else module)
    with pytest.raises(ConfigError, match=r"hears by soundfile, which is not installed: pip install 'octavo\[audio\]'"):
        LLM(str(phi4), limit_mm_per_prompt={"audio": 1}, **SIZES)
    with LLM(str(folder), **SIZES) as llm:
        assert llm.config.media is not None and llm.config.media.audio is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"do_normalize": False}, "do_normalize of .* is False; True is built"),
        ({"resample": 2}, "resample of .* is 2; 3 is built"),
        ({"size": {"height": 450, "width": 450}}, "must be squares of patches"),
        ({"size": {"height": 448, "width": 28}}, "must be squares of patches"),
    ],
)
def test_settings_of_pictures_that_are_not_built_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PictureTiles(settings)


@pytest.mark.parametrize(
    "size",
    [
        (40, 60), (90, 33), (448, 448), (449, 448), (1000, 300), (300, 1000), (2600, 2400), (4100, 1200), (900, 8000),
        (30, 600), (8000, 500),
    ],
)  # fmt: skip
def test_tiles_are_those_of_transformers(size: tuple[int, int]) -> None:
    """To the bit, up to more tiles than a picture may have."""
    pytest.importorskip("torchvision")
    theirs = transformers.Phi4MultimodalImageProcessor()
    found, expected = PictureTiles(theirs.to_dict())(picture(0, *size)), theirs([picture(0, *size)])
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert np.array_equal(values, expected[name]), name
