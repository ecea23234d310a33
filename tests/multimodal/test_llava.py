"""A small LLaVA in the engine, beside the same model in `transformers`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from octavo import LLM, SamplingParams
from octavo.entrypoints.chat.chat_template import render_chat
from octavo.errors import ConfigError, RequestError
from octavo.media_kinds import IMAGE, KINDS, SentMedium
from octavo.models.multimodal_models import OTHER_NAMES
from octavo.multimodal.media_cache import MediaCache
from octavo.multimodal.processor_loader import load_processor
from octavo.multimodal.tower import Tower, TowerCache
from tests.multimodal.conftest import encoded, picture, save_llava
from tests.untimed import without_time
from tests.waiting import wait_until

A, B, C = picture(0), picture(1, 90, 33), picture(2)
# Name -> text and pictures. Prompts are longer than a step's 13 tokens, so that parts end within pictures.
PROMPTS: dict[str, tuple[str, list[Image.Image]]] = {
    "one": ("What is it? <image> Say it.", [A]),
    "first": ("<image>", [A]),
    "two of different sizes": ("<image>\nbeside this one:<image>", [A, B]),
    "the same twice": ("<image><image>twice", [B, B]),
    "none": ("There is no picture here at all.", []),
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)


def asked(name: str) -> dict[str, Any]:
    text, images = PROMPTS[name]
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


def generate(llm: LLM, *prompts: dict[str, Any], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate(list(prompts), params, use_tqdm=False)


def tower(llm: LLM) -> TowerCache:
    media = llm.core.executor.worker.tower_cache  # type: ignore[attr-defined]
    assert isinstance(media, TowerCache)
    return media


def engine(folder: Path, **args: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 13, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
    return LLM(str(folder), **{"dtype": "float32", "max_model_len": 128, "check_invariants": True} | sizes | args)


def assert_as_transformers(
    folder: Path, output: Any, text: str, media: list[Any], kind: str = "image", processor: Any = None
) -> None:
    """The prompt's tokens, the answer's, and log-probabilities within 1e-4."""
    [name] = transformers.AutoConfig.from_pretrained(folder).architectures
    builder = getattr(transformers, OTHER_NAMES.get(name, name))
    model = builder.from_pretrained(folder)
    processor = processor or load_processor(str(folder), 0)
    if prepare := getattr(processor, "prepare", None):
        prepare(model)
    inputs = processor(text=text, **{KINDS[kind].argument: media or None}, return_tensors="pt")
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].float()  # Llama 4's are bfloat16
    assert inputs["input_ids"][0].tolist() == output.prompt_token_ids
    [answer] = output.outputs
    expected = model.generate(
        **inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    assert answer.token_ids == expected.sequences[0][-8:].tolist()
    logprobs = torch.log_softmax(torch.stack(expected.logits)[:, 0], -1)
    for position, found in enumerate(answer.logprobs):
        for token, logprob in found.items():
            assert logprob.logprob == pytest.approx(logprobs[position, token].item(), abs=1e-4)


@pytest.fixture(scope="module")
def llm(llava: Path) -> Iterator[LLM]:
    llm = engine(llava)
    yield llm
    llm.close()


@pytest.mark.parametrize("name", PROMPTS)
def test_it_answers_as_transformers_does(llava: Path, llm: LLM, name: str) -> None:
    llm.reset_prefix_cache()
    [output] = generate(llm, asked(name))
    assert output.num_cached_tokens == 0
    assert_as_transformers(llava, output, *PROMPTS[name])


@pytest.mark.parametrize(("eager", "dtype"), [(False, "bfloat16"), (True, "bfloat16"), (True, "float32")])
def test_pictures_are_seen(llava: Path, eager: bool, dtype: str) -> None:
    llm = engine(llava, enforce_eager=eager, dtype=dtype)
    answers = [
        generate(llm, {"prompt": "<image> it is", "multi_modal_data": {"image": image}})[0].outputs[0]
        for image in (A, B, A)
    ]
    assert answers[0].logprobs == answers[2].logprobs != answers[1].logprobs
    llm.close()


def test_in_any_company_it_has_the_bits_that_it_has_alone(llm: LLM) -> None:
    alone = []
    for name in PROMPTS:
        llm.reset_prefix_cache()
        alone += generate(llm, asked(name))
    llm.reset_prefix_cache()
    together = generate(llm, *(asked(name) for name in PROMPTS))
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_a_second_turn_computes_no_picture_again(llm: LLM) -> None:
    llm.reset_prefix_cache()
    text = "Look at <image> and <image>, if you please."
    first = {"prompt": text, "multi_modal_data": {"image": [A, C]}}
    second = {"prompt": text + " And now?", "multi_modal_data": {"image": [A, C]}}
    alone = generate(llm, second)[0]
    llm.reset_prefix_cache()
    generate(llm, first)
    runs = tower(llm).num_runs
    again = generate(llm, second)[0]
    assert tower(llm).num_runs == runs
    assert again.num_cached_tokens == 32  # both pictures, and a part of the text after them
    assert again.outputs[0].logprobs == alone.outputs[0].logprobs
    others = {**second, "multi_modal_data": {"image": [A, B]}}
    assert generate(llm, others)[0].num_cached_tokens < 32  # another picture under the same tokens
    assert generate(llm, {**second, "cache_salt": "mine"})[0].num_cached_tokens == 0


def test_steps_know_of_the_tower_beside_them(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, llm = Tower.rows, engine(llava)
    cost = llm.core.cost  # type: ignore[attr-defined]

    def slow(self: Tower, given: Any) -> Any:
        wait_until(lambda: cost._ratios_with_tower)
        return rows(self, given)

    monkeypatch.setattr(Tower, "rows", slow)
    generate(llm, asked("none"), params=SamplingParams(max_tokens=4))
    assert not cost._ratios_with_tower
    generate(llm, asked("none"), asked("one"), params=SamplingParams(max_tokens=60, ignore_eos=True))
    assert cost._ratios_with_tower and not cost.tower_running
    llm.close()


def test_a_preempted_prompt_sees_its_pictures_again(llava: Path, llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=80, logprobs=1, ignore_eos=True)
    prompts = [{"prompt": f"{i}: <image>", "multi_modal_data": {"image": image}} for i, image in enumerate([A, B, C])]
    alone = [generate(llm, prompt, params=long)[0] for prompt in prompts]
    crowded = engine(llava, num_gpu_blocks_override=9, max_model_len=96, enable_prefix_caching=False)
    without_time(crowded.core)  # type: ignore[arg-type]
    generate(crowded, *prompts, params=SamplingParams(max_tokens=1))  # so that they come at the same time from here on
    together = generate(crowded, *prompts, params=long)
    assert sum(output.metrics.num_preemptions for output in together) > 0
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert tower(crowded).num_runs == 3
    crowded.close()


def test_rows_are_kept_within_their_bound_and_for_those_under_way(llava: Path) -> None:
    llm = engine(llava, max_model_len=48, media_cache_tokens=1)  # as many as a longest prompt
    prompts = [
        {"prompt": "<image><image>", "multi_modal_data": {"image": [picture(10 + i), picture(30 + i)]}}
        for i in range(12)
    ]
    alone = [generate(llm, prompt)[0].outputs[0].logprobs for prompt in prompts]
    llm.reset_prefix_cache()
    together = [output.outputs[0].logprobs for output in generate(llm, *prompts)]  # 96 rows, where 48 have room
    assert together == alone
    assert tower(llm).num_tokens <= 48
    runs = tower(llm).num_runs
    generate(llm, prompts[0])
    assert tower(llm).num_runs == runs + 2  # they had to go
    llm.close()


@pytest.mark.parametrize(("model_type", "text"), [("mistral", {"sliding_window": 9}), ("qwen2", {})])
def test_other_decoders(tmp_path: Path, tokenizer_that_sees: Any, model_type: str, text: dict[str, Any]) -> None:
    save_llava(tmp_path, tokenizer_that_sees, text, model_type)
    llm = engine(tmp_path)
    [output] = generate(llm, asked("two of different sizes"))
    assert_as_transformers(tmp_path, output, *PROMPTS["two of different sizes"])
    llm.close()


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "no place", "multi_modal_data": {"image": A}}, "0 placeholders and 1 pictures"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": [A]}}, "2 placeholders and 1 pictures"),
        ({"prompt": "<image>", "multi_modal_data": {"video": A}}, "takes no videos here, but pictures"),
        ({"prompt": "<image>", "multi_modal_data": {"depth": A}}, "other media are not taken here"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "file.png"}}, "must be a PIL.Image, got str"),
        ({"prompt": "<image>" * 9, "multi_modal_data": {"image": [A] * 9}}, "9 pictures, and 8 are the most"),
        ({"prompt": "<image>" + "x" * 125, "multi_modal_data": {"image": A}}, "the prompt has 129 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(llm: LLM, prompt: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_chats_of_scripts_have_pictures(llm: LLM) -> None:
    data = f"data:image/png;base64,{base64.b64encode(encoded(A)).decode()}"
    said = {"type": "text", "text": "Look"}
    answers = [
        llm.chat([{"role": "user", "content": [said, part]}], GREEDY, use_tqdm=False)[0].outputs[0].logprobs
        for part in (
            {"type": "image_pil", "image_pil": A},
            {"type": "image_url", "image_url": {"url": data}},
            {"type": "image_url", "image_url": data},
        )
    ]
    asked = {"prompt": "USER: <image>\nLook ASSISTANT:", "multi_modal_data": {"image": A}}
    assert answers == [generate(llm, asked)[0].outputs[0].logprobs] * 3
    for part, message in (
        ({"type": "image_pil", "image_pil": data}, "like .*PIL.Image"),
        ({"type": "image_url", "image_url": A}, "like .*image_url"),
        ({"type": "image_url", "uuid": "unknown"}, "nothing is kept under its uuid"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}, "not on the public internet"),
        ({"type": "input_audio", "input_audio": {}}, "like .*input_audio"),
        ({"type": "audio_url", "audio_url": "data:audio/wav;base64,"}, "takes no sounds here, but pictures"),
        ({"type": "video_url", "video_url": "data:"}, "takes no videos here, but pictures"),
        ({"type": "file", "file": {}}, "are not supported here"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.chat([{"role": "user", "content": [part]}])
    with pytest.raises(RequestError, match="only messages of the user"):
        llm.chat([{"role": "system", "content": [{"type": "image_pil", "image_pil": A}]}])
    parts: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": A}, {"type": "prompt_embeds", "data": "x"}]
    with pytest.raises(RequestError, match="needs --enable-prompt-embeds"):
        llm.chat([{"role": "user", "content": parts}])


def test_a_picture_is_known_by_its_uuid(llm: LLM) -> None:
    """To those with the same salt, until there is no room for it."""
    text = "<image> and <image>"

    def said(images: list[Any], uuids: list[str | None], salt: str | None = None) -> Any:
        more = {"cache_salt": salt} if salt else {}
        asked = {"prompt": text, "multi_modal_data": {"image": images}, "multi_modal_uuids": {"image": uuids}, **more}
        return generate(llm, asked)[0].outputs[0].logprobs

    alone = said([A, B], [None, None])
    assert said([A, B], ["a", "b"]) == said([None, None], ["a", "b"]) == said([A, None], [None, "b"]) == alone
    assert said([A, C], ["a", "b"]) == said([None, None], ["a", "b"]) != alone  # what was sent last
    one = {"prompt": "<image>", "multi_modal_data": {"image": None}, "multi_modal_uuids": {"image": "a"}}
    assert generate(llm, one)[0].outputs[0].logprobs == generate(llm, asked("first"))[0].outputs[0].logprobs
    for images, uuids, salt, reason in (
        ([None, A], ["c", None], None, "nothing is kept under its uuid"),
        ([None, A], ["a", None], "another's", "nothing is kept under its uuid"),
        ([None, A], [None, None], None, "must be a PIL.Image"),
        ([A, A], [1, None], None, "must be a string of 1 to 256"),
        ([A, A], ["x" * 257, None], None, "must be a string of 1 to 256"),
        ([A, A], ["a"], None, "multi_modal_uuids must be a dictionary"),
    ):
        with pytest.raises(RequestError, match=reason):
            said(images, uuids, salt)  # type: ignore[arg-type]


def test_a_second_turn_decodes_and_processes_no_picture_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, done = llm.inputs.media, list[str]()
    assert processor is not None
    owners: dict[str, Any] = {"from_bytes": processor._loaders["image"].reader, "_process": processor}
    for name, owner in owners.items():
        does = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, name=name, does=does: (done.append(name), does(*args))[1])
    sent = [SentMedium(IMAGE, f"data:image/png;base64,{base64.b64encode(encoded(picture(7))).decode()}", None)]

    def turn(salt: str | None) -> Any:
        return processor.expand("<image>", processor.decode(sent, {}, salt), salt, llm.tokenizer.encode)

    assert turn(None) == turn(None) == turn("")
    assert done == ["from_bytes", "_process"]
    turn("another's")
    assert done == ["from_bytes", "_process"] * 2


def test_what_is_kept_has_its_room() -> None:
    kept = MediaCache(30)
    for i in range(4):
        kept.keep(i, f"{i}", 10)
        assert kept.find(0) == "0"
    kept.keep("mine", "other", 10)
    assert [kept.find(key) for key in (0, 1, 2, 3, "mine")] == ["0", None, None, "3", "other"]
    kept.keep(0, "too large", 31)  # and nothing in its place
    assert kept.find(0) is None
    MediaCache(0).keep(0, "0", 1)


def test_a_template_that_knows_no_images_gets_placeholders_in_their_place(llm: LLM) -> None:
    parts = [{"type": "text", "text": "See"}, {"type": "image"}, {"type": "text", "text": "and say"}]
    messages = [{"role": "user", "content": parts}]
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert (
        render_chat(llm.tokenizer, messages, chat_template=plain, placeholders={"image": "<image>"})
        == "See\n<image>\nand say"
    )
    assert (
        render_chat(llm.tokenizer, messages, placeholders={"image": "<image>"})
        == "USER: <image>\nSee and say ASSISTANT:"
    )


def test_without_its_tower_it_is_a_language_model(llava: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = engine(llava, language_model_only=True)
    assert generate(blind, asked("none"))[0].outputs[0].logprobs == generate(llm, asked("none"))[0].outputs[0].logprobs
    with pytest.raises(RequestError, match=r"takes no pictures here; docs/media\.md says"):
        generate(blind, asked("one"))
    blind.close()
    monkeypatch.setattr("octavo.config.media_flags.find_spec", lambda module: None if module == "PIL" else module)
    with pytest.raises(ConfigError, match=r"takes pictures only with PIL: scripts/install vision"):
        engine(llava)


def test_a_model_without_a_processor_says_so(tmp_path: Path, llava: Path) -> None:
    for file in llava.iterdir():
        if "processor" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match="which says how it sees"):
        engine(tmp_path)


def test_a_model_that_does_not_see_refuses_the_flags(llava: Path) -> None:
    for more, said in (
        ({"speculative_config": {"method": "eagle", "model": "."}}, "not built yet with a draft head"),
        ({"limit_mm_per_prompt": {"video": 1}}, "has video; .* takes image"),
        ({"limit_mm_per_prompt": {"image": "x"}}, "must be a number of pictures"),
        ({"limit_mm_per_prompt": {"audio": 1}}, "has audio; .* takes image"),
    ):
        with pytest.raises(ConfigError, match=said):
            engine(llava, **more)
    with pytest.raises(ConfigError, match="--language-model-only is for models that see or hear"):
        LLM(language_model_only=True)
