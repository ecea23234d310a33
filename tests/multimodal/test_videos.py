"""Files of video, and models that see them."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from octavo import LLM
from octavo.config import VideoConfig
from octavo.errors import ConfigError, RequestError
from octavo.execution.media_table import grid_positions
from octavo.multimodal.processor_loader import load_processor
from octavo.multimodal.videos import Video, from_bytes, normalized
from octavo.request import MediaItem
from tests.multimodal.conftest import picture, save
from tests.multimodal.small_media import CASES
from tests.multimodal.small_processors import GRID, MORE_TOKENS, SQUARE, TOKENS, tiles
from tests.multimodal.test_llava import GREEDY, generate, tower

BOUNDS = VideoConfig(
    token_id=0, max_count=1, max_bytes=1_000_000, max_seconds=20.0, max_pixels=10**6, num_frames=4
)  # fmt: skip


def frames(seed: int, count: int = 6, height: int = 48, width: int = 64) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


def encoded(given: Any, rate: int = 4, codec: str = "mpeg4", form: str = "mp4") -> bytes:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format=form) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = *given.shape[1:3], "yuv420p"
        for one in given:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()


def shades(count: int, height: int = 48, width: int = 64) -> Any:
    """Frames each of which is one shade of grey, by which it is known again."""
    levels = np.linspace(20, 230, count).astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).copy()


def read(data: bytes, **bounds: Any) -> Video:
    return from_bytes(data, replace(BOUNDS, **bounds), 10**6)


@pytest.mark.parametrize(("codec", "form"), [("mpeg4", "mp4"), ("libvpx-vp9", "webm"), ("libx264", "matroska")])
def test_frames_are_sampled_at_equal_distances(codec: str, form: str) -> None:
    given = shades(16)
    found = read(encoded(given, codec=codec, form=form))
    assert found.indices == (0, 5, 10, 15) and found.total == 16
    assert found.rate == pytest.approx(4.0, rel=1e-3)
    assert found.frames.shape == (4, 48, 64, 3)
    assert np.abs(found.frames.mean((1, 2, 3)) - given[[0, 5, 10, 15]].mean((1, 2, 3))).max() < 8


def test_all_frames_of_short_videos_are_seen() -> None:
    assert read(encoded(shades(3))).indices == (0, 1, 2)
    assert read(encoded(shades(1))).indices == (0,)
    assert read(encoded(shades(16)), num_frames=1).indices == (0,)
    assert read(encoded(shades(16)), num_frames=9, fps=0.5).indices == (0, 15)


def forged(data: bytes, box: bytes, offset: int, value: bytes) -> bytes:
    """A file with another value in one of the boxes that its header consists of."""
    at = data.index(box) + offset
    return data[:at] + value + data[at + len(value) :]


def test_videos_of_phones_are_upright() -> None:
    """Files have the frames as the sensor lies, and a matrix that turns them."""
    given = shades(2)
    given[:, :24], given[:, 24:] = 255, 0
    for matrix, white in (((0, 1, -1, 0), np.s_[:, 24:]), ((0, -1, 1, 0), np.s_[:, :24]), ((-1, 0, 0, -1), np.s_[24:])):
        a, b, c, d = (one << 16 for one in matrix)
        value = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
        found = read(forged(encoded(given), b"tkhd", 44, value)).frames[0]
        assert found.shape == ((48, 64, 3) if a else (64, 48, 3))
        is_white = np.zeros(found.shape[:2], bool)
        is_white[white] = True
        assert found[is_white].mean() > 200 and found[~is_white].mean() < 55


WRONG: dict[str, tuple[Callable[[], bytes], dict[str, Any], str]] = {
    "nothing": (lambda: b"", {}, "only mp4, mov, webm and mkv are built"),
    "a playlist": (lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", {}, "only mp4, mov, webm"),
    "a script": (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", {}, "only mp4, mov, webm"),
    "an avi": (lambda: encoded(shades(2), form="avi"), {}, "only mp4, mov, webm"),
    "noise behind a signature": (lambda: b"\0\0\0\x18ftypisom" + random.Random(0).randbytes(3000), {}, "."),
    "another codec": (lambda: encoded(shades(2), codec="ffv1", form="matroska"), {}, "only h264, hevc"),
    "truncated": (lambda: encoded(frames(0))[:2000], {}, "not a readable file of video"),
    "no frames": (lambda: encoded(frames(0))[:48], {}, "."),
    "too many bytes": (lambda: encoded(frames(0)), {"max_bytes": 1000}, r"1000 bytes \(--max-video-bytes\)"),
    "too long": (lambda: encoded(shades(12), rate=1), {"max_seconds": 11.0}, r"longer than 11 s \(--max-video-seconds"),
    "too many pixels": (lambda: encoded(shades(4)), {"max_pixels": 9000}, r"than 9000 pixels .*\(--max-video-pixels\)"),
    "too large frames": (
        lambda: encoded(shades(1, 1008, 1008), codec="libx264"), {}, r"1008 x 1008 pixels; 1000000 are the most"
    ),
    "too narrow frames": (lambda: encoded(shades(2, 16, 1024), codec="libx264"), {}, "1024 x 16 pixels"),
    "a forged number of samples": (
        lambda: forged(encoded(frames(0)), b"stsz", 12, b"\x7f\xff\xff\xff"), {}, "."
    ),
    "a forged clock": (lambda: forged(encoded(frames(0)), b"mdhd", 16, b"\0\0\0\1"), {}, "."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_video_is_refused(name: str) -> None:
    pytest.importorskip("av")
    make, bounds, reason = WRONG[name]
    with pytest.raises(RequestError, match=reason) as refused:
        read(make(), **bounds)
    assert refused.value.status == 400 and refused.value.code == "invalid_video"
    assert "/" not in str(refused.value)


def test_damaged_files_are_read_or_refused() -> None:
    data, chance = encoded(shades(5)), random.Random(0)
    for _ in range(8):
        damaged = bytearray(data)
        for _ in range(20):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(RequestError):
            assert len(read(bytes(damaged)).frames)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("a.mp4", "must be an array of uint8 .*, got str"),
        (frames(0)[0], r"got uint8 \[48, 64, 3\]"),
        (frames(0).astype(np.float32), r"got float32"),
        (frames(0)[:0], r"got uint8 \[0, 48, 64, 3\]"),
        (frames(0, 60), "more than 100000 pixels"),
        (frames(0, 2, 1, 9), "9 x 1 pixels"),
        ((frames(0), 3), "may be a dictionary"),
        ((frames(0), {"fps": -1.0}), "fps must be a number"),
        ((frames(0), {"fps": 1e-300}), "fps must be a number"),
        ((frames(0), {"frames_indices": np.array([1, 2])}), "one place of total_num_frames each"),
        ((frames(0), {"frames_indices": [1, 2]}), "one place of total_num_frames each"),
    ],
)
def test_arrays_of_scripts_are_checked(given: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        normalized(given, replace(BOUNDS, max_pixels=100_000))


def test_positions_are_counted_as_they_are_made() -> None:
    """A prompt's length in positions is checked before they are made, and both round times in the same way."""
    for time, last in itertools.product(range(2, 20), range(1, 40)):
        item = MediaItem(0, time, b"", 0, (time, 1, 1), last / (time - 1))
        _, shift = grid_positions([item])
        assert item.num_positions == time + shift


def test_positions_go_on_from_the_largest() -> None:
    """Of time, which a video may have more of than rows and columns."""
    items = [MediaItem(2, 12, b"", 0, (3, 2, 2), 2.5), MediaItem(15, 2, b"", 0, (1, 1, 2))]
    found, shift = grid_positions(items)
    assert found[0].tolist() == [0, 1, *[2] * 4, *[4] * 4, *[7] * 4, 8, 9, 9]
    assert found[2].tolist() == [0, 1, *[2, 3] * 6, 8, 9, 10]
    assert shift == 11 - 17


class Case(NamedTuple):
    images: Callable[[], Any]
    videos: Callable[[], Any]
    more: dict[str, Any]
    prompt: str = "<video>"  # what templates write for a video
    mixes: bool = True  # whether transformers takes pictures beside videos
    processor: str | None = None  # its class, where another model's is used
    num_tokens: int = 384  # that the prompts of the test need


def _qwen(patch_size: int, videos: str) -> Case:
    size = {"shortest_edge": 56 * 56, "longest_edge": 84 * 84 * (1 if videos == "Qwen2VL" else 6)}
    return Case(
        lambda: transformers.Qwen2VLImageProcessorPil(size=size, patch_size=patch_size),
        lambda: getattr(transformers, f"{videos}VideoProcessor")(
            size=size, patch_size=patch_size, do_sample_frames=False
        ),
        {},
    )


GLM_SIZE = {"shortest_edge": 84 * 84 * 2, "longest_edge": 112 * 112 * 2}
VIDEO_CASES = {
    "Qwen2VLForConditionalGeneration": _qwen(14, "Qwen2VL"),
    "Qwen2_5_VLForConditionalGeneration": _qwen(14, "Qwen2VL"),
    "Qwen3VLForConditionalGeneration": _qwen(16, "Qwen3VL"),
    "Qwen3_5ForConditionalGeneration": _qwen(16, "Qwen3VL")._replace(processor="Qwen3VLProcessor"),
    "Qwen3VLMoeForConditionalGeneration": _qwen(16, "Qwen3VL")._replace(processor="Qwen3VLProcessor"),
    "LlavaOnevisionForConditionalGeneration": Case(
        lambda: transformers.LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=GRID),
        lambda: transformers.LlavaOnevisionVideoProcessor(size=SQUARE),
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "InternVLForConditionalGeneration": Case(
        tiles, lambda: transformers.InternVLVideoProcessor(size=SQUARE), {"image_seq_length": 1}
    ),
    "SmolVLMForConditionalGeneration": Case(
        lambda: transformers.SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        lambda: transformers.SmolVLMVideoProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        {"image_seq_len": 1},
        mixes=False,
    ),
    "Glm4vForConditionalGeneration": Case(
        lambda: transformers.Glm4vImageProcessorPil(size=GLM_SIZE),
        lambda: transformers.Glm4vVideoProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 84 * 84 * 6}),
        {},
        "<|begin_of_video|><video><|end_of_video|>",
        mixes=False,
    ),
}
VIDEO_CASES |= {
    "Qwen3VLMoeForConditionalGeneration": _qwen(16, "Qwen3VL")._replace(processor="Qwen3VLProcessor"),
    "Glm4vMoeForConditionalGeneration": VIDEO_CASES["Glm4vForConditionalGeneration"]._replace(
        processor="Glm4vProcessor"
    ),
    "Glm46VForConditionalGeneration": VIDEO_CASES["Glm4vForConditionalGeneration"]._replace(
        images=lambda: transformers.Glm46VImageProcessorPil(size=GLM_SIZE),
        videos=lambda: transformers.Glm46VVideoProcessor(
            size={"shortest_edge": 56 * 56, "longest_edge": 84 * 84 * 6}, do_sample_frames=False
        ),
    ),
    "Gemma4ForConditionalGeneration": Case(
        lambda: transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70),
        lambda: transformers.Gemma4VideoProcessor(patch_size=4, max_soft_tokens=70, do_sample_frames=False),
        {"feature_extractor": transformers.Gemma4AudioFeatureExtractor()},
        "<|video|>",
        num_tokens=768,
    ),
}
VIDEO_CASES |= {
    "MiniCPMV4_6ForConditionalGeneration": Case(
        lambda: transformers.MiniCPMV4_6ImageProcessorPil(scale_resolution=56, patch_size=7, max_slice_nums=4),
        lambda: transformers.MiniCPMV4_6VideoProcessor(
            scale_resolution=56, patch_size=7, max_slice_nums=4, do_sample_frames=False
        ),
        {},
    ),
    "VideoLlama3ForConditionalGeneration": Case(
        lambda: transformers.VideoLlama3ImageProcessorPil(min_tokens=4, max_tokens=16),
        lambda: transformers.VideoLlama3VideoProcessor(
            size={"shortest_edge": 56 * 56, "longest_edge": 84 * 84 * 6}, do_sample_frames=False
        ),
        {},
    ),
}
VIDEO_CASES["Gemma4ForConditionalGeneration (both ways)"] = VIDEO_CASES["Gemma4ForConditionalGeneration"]
GLM_TOKENS = [f"<|{end}_of_{kind}|>" for end in ("begin", "end") for kind in ("image", "video")]


def save_case(folder: Path, name: str, tiny_tokenizer: Path) -> None:
    marks = TOKENS | {"vision_start_token": "<img>", "vision_end_token": "</img>"}
    if name.startswith("MiniCPM"):
        ends = [f"{what}_{end}" for what in ("slice", "image_id") for end in ("start", "end")]
        marks |= {f"{end}_token": f"<{end}>" for end in ends}
        marks |= {"image_start_token": "<img>", "image_end_token": "</img>"}
    if name.startswith("Gemma4"):
        marks |= {"boi_token": "<img>", "eoi_token": "</img>", "video_token": "<|video|>"}
        marks |= {end: f"<{end}>" for end in ("audio_token", "boa_token", "eoa_token")}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer, extra_special_tokens=marks)
    tokenizer.add_special_tokens({"additional_special_tokens": MORE_TOKENS + GLM_TOKENS})
    architecture = name.partition(" ")[0]
    case, builder = VIDEO_CASES[name], getattr(transformers, architecture)
    made = getattr(transformers, case.processor or architecture.replace("ForConditionalGeneration", "Processor"))(
        image_processor=case.images(), tokenizer=tokenizer, video_processor=case.videos(), **case.more
    )
    text = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 768, **CASES[name].text,
    }  # fmt: skip
    tokens = {}
    for kind in ("image", "video"):
        end = "index" if hasattr(builder.config_class, f"{kind}_token_index") else "id"
        tokens[f"{kind}_token_{end}"] = tokenizer.convert_tokens_to_ids(marks[f"{kind}_token"])
    for kind in ("start", "end"):
        tokens[f"vision_{kind}_token_id"] = tokenizer.convert_tokens_to_ids("<img>" if kind == "start" else "</img>")
    config = builder.config_class(text_config=text, **CASES[name].settings(), tie_word_embeddings=False, **tokens)
    save(folder, builder(config), made)


def engine(folder: Path, **more: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 13, "max_num_seqs": 4, "num_gpu_blocks_override": 120}
    limits = {"image": 2, "video": 2}
    return LLM(
        str(folder), dtype="float32", check_invariants=True,
        **{"limit_mm_per_prompt": limits, "max_model_len": 384} | sizes | more,
    )  # fmt: skip


@pytest.mark.parametrize("name", VIDEO_CASES)
def test_videos_are_seen_as_transformers_sees_them(tmp_path: Path, tiny_tokenizer: Path, name: str) -> None:
    pytest.importorskip("av")
    pytest.importorskip("torchvision")
    save_case(tmp_path, name, tiny_tokenizer)
    length = VIDEO_CASES[name].num_tokens
    more: dict[str, Any] = {"max_num_batched_tokens": 90} if "both ways" in name else {}
    llm = engine(tmp_path, max_model_len=length, num_gpu_blocks_override=120 * length // 384, **more)
    # Of no more steps of time than columns or rows: from the larger of those transformers goes on behind a video.
    a, b, image = frames(0, 4, 60, 90), frames(1, 4, 90, 60), picture(0)
    still = np.concatenate([a[:1], a[:1], b[:1, :60].repeat(2, 2)[:, :, :90], a[:1]])
    sampled = (b, {"fps": 25.0, "frames_indices": [0, 8, 16, 24], "total_num_frames": 25})
    prompts: dict[str, tuple[str, dict[str, list[Any]]]] = {
        "one": ("What is it? <video> Say it.", {"video": [(a, {"fps": 4.0})]}),
        "one that was sampled": ("What is it? <video> Say it.", {"video": [sampled]}),
        "two": ("<video>\nbeside this one:<video>.", {"video": [(a, {"fps": 4.0}), sampled]}),
        "one that stands still": ("<video>", {"video": [(still, {"fps": 4.0})]}),
        "beside a picture": ("<video> and <image>?", {"video": [sampled], "image": [image]}),
        "behind a picture": ("<image> and <video>?", {"video": [sampled], "image": [image]}),
    }
    model = getattr(transformers, name.partition(" ")[0]).from_pretrained(tmp_path)
    made = load_processor(str(tmp_path), 0, sees_videos=True)
    case = VIDEO_CASES[name]
    prompts = {what: (text.replace("<video>", case.prompt), media) for what, (text, media) in prompts.items()}
    asked = [{"prompt": text, "multi_modal_data": media} for text, media in prompts.values()]
    alone = []
    for prompt, (text, media) in zip(asked, prompts.values(), strict=True):
        [output] = generate(llm, prompt)
        alone.append(output)
        if "image" in media and not case.mixes:
            continue
        metadata = [
            {
                "total_num_frames": more.get("total_num_frames", len(given)), "fps": more["fps"],
                "frames_indices": list(more.get("frames_indices", range(len(given)))),
                "duration": more.get("total_num_frames", len(given)) / more["fps"],
            }
            for given, more in media["video"]
        ]  # fmt: skip
        inputs = made(
            text=text, videos=[given for given, _ in media["video"]], images=media.get("image"),
            video_metadata=metadata, do_sample_frames=False, return_tensors="pt",
        )  # fmt: skip
        inputs = {key: value for key, value in inputs.items() if key != "video_metadata"}
        assert inputs["input_ids"][0].tolist() == output.prompt_token_ids
        with torch.inference_mode():
            expected = torch.log_softmax(model(**inputs).logits[0, -1], -1)
        for token, logprob in output.outputs[0].logprobs[0].items():
            assert logprob.logprob == pytest.approx(expected[token].item(), abs=1e-4)
    assert alone[0].outputs[0].logprobs != alone[1].outputs[0].logprobs
    if name.startswith("VideoLlama3"):  # what a frame has like the one before reaches no token
        counts = [output.prompt_token_ids.count(made.video_token_id) for output in alone]
        assert counts[3] < counts[0]
    llm.reset_prefix_cache()
    runs = tower(llm).num_runs
    for one, other in zip(alone, generate(llm, *asked), strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert tower(llm).num_runs == runs
    with pytest.raises(RequestError, match="3 videos, and 2 are the most"):
        generate(llm, {"prompt": case.prompt * 3, "multi_modal_data": {"video": [a, a, a]}})
    with pytest.raises(RequestError, match="1 placeholders and 0 videos"):
        generate(llm, {"prompt": f"{case.prompt}<image>", "multi_modal_data": {"image": image}})
    llm.close()


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "Glm4v"])
def test_rows_of_a_video_may_be_brought(tmp_path: Path, tiny_tokenizer: Path, name: str) -> None:
    """By models whose positions follow from its grid; times of frames say how far its places are apart, or are named in
    the prompt."""
    pytest.importorskip("torchvision")
    name = f"{name}ForConditionalGeneration"
    save_case(tmp_path, name, tiny_tokenizer)
    llm = engine(tmp_path, enable_mm_embeds=True)
    sampled = {"fps": 25.0, "frames_indices": [0, 8, 16, 24], "total_num_frames": 25}
    text = f"What is {VIDEO_CASES[name].prompt}?"

    def say(video: Any) -> Any:
        [output] = generate(llm, {"prompt": text, "multi_modal_data": {"video": video}})
        return output.prompt_token_ids, output.outputs[0].logprobs

    expected = say((frames(1, 4, 90, 60), sampled))
    [(_, made)] = tower(llm)._entries.values()
    rows = torch.tensor(made.result()).transpose(0, 1).flatten(1)  # those for early layers behind them
    processor = load_processor(str(tmp_path), 0, sees_videos=True)
    found = processor(
        text=text, videos=[frames(1, 4, 90, 60)], do_sample_frames=False, return_tensors="pt",
        video_metadata=[{**sampled, "duration": 1.0}],
    )  # fmt: skip
    grid = found["video_grid_thw"]
    given = {"video_embeds": rows, "video_grid_thw": grid, **sampled}
    assert say(given) == say([given]) == expected
    if "second_per_grid_ts" in found:
        assert say({**given, "fps": None, "second_per_grid_ts": found["second_per_grid_ts"]}) == expected
    assert say({**given, "fps": 5.0})[1] != expected[1]
    out = io.BytesIO()
    torch.save(rows, out)
    part = {
        "video_embeds": base64.b64encode(out.getvalue()).decode(), "video_grid_thw": grid[0].tolist(), **sampled,
    }  # fmt: skip
    messages = [{"role": "user", "content": [{"type": "video_embeds", "video_embeds": part}]}]
    template = text.replace(VIDEO_CASES[name].prompt, "{{ messages[0]['content'] }}")
    [chat] = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
    if VIDEO_CASES[name].prompt == "<video>":
        assert (chat.prompt_token_ids, chat.outputs[0].logprobs) == expected
    for wrong, reason in (
        ({"video_grid_thw": None}, "need video_grid_thw"),
        ({"video_grid_thw": [1, 4, 4]}, r"video_grid_thw \[1, 4, 4\] is not that of"),
        ({"frames_indices": [0]}, "frames_indices are 1, and the 2 places in time"),
        ({"frames_indices": [30] * 4}, "must be a list of places"),
        ({"fps": -1}, "fps must be a number"),
        ({"second_per_grid_ts": [1.0, 2.0]}, "second_per_grid_ts must be a number"),
        ({"total_num_frames": 0}, "total_num_frames must be"),
        ({"x": 1}, "an object with fps, frames_indices, second_per_grid_ts"),
        ({"video_embeds": rows[:, :3]}, "have the shape"),
    ):
        with pytest.raises(RequestError, match=reason) as refused:
            say(given | wrong)
        assert refused.value.code == "invalid_video"
    llm.close()


def test_rows_of_a_video_are_of_models_with_grids(tmp_path: Path, tiny_tokenizer: Path) -> None:
    pytest.importorskip("torchvision")
    save_case(tmp_path, "InternVLForConditionalGeneration", tiny_tokenizer)
    given = {"prompt": "<video>", "multi_modal_data": {"video": {"video_embeds": torch.zeros(4, 64)}}}
    for flags, reason in (({}, "with --enable-mm-embeds only"), ({"enable_mm_embeds": True}, "built for models whose")):
        llm = engine(tmp_path, **flags)
        with pytest.raises(RequestError, match=reason):
            generate(llm, given)
        llm.close()


def test_chats_have_videos(tmp_path: Path, tiny_tokenizer: Path) -> None:
    pytest.importorskip("torchvision")
    data = encoded(shades(9, 56, 56))
    save_case(tmp_path, "Qwen2VLForConditionalGeneration", tiny_tokenizer)
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(data)
    llm = engine(tmp_path, media_io_kwargs={"video": {"num_frames": 4}}, allowed_local_media_path=str(folder))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

    def say(part: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": [{"type": "text", "text": "See"}, part]}]
        [found] = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
        return found.outputs[0].logprobs

    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    video = from_bytes(data, BOUNDS, 10**6)
    more = {"fps": video.rate, "frames_indices": list(video.indices), "total_num_frames": video.total}
    asked = {"prompt": "See\n<video>", "multi_modal_data": {"video": (video.frames, more)}}
    alone = generate(llm, asked)[0].outputs[0].logprobs
    for part in (
        {"video_url": {"url": url}},
        {"video_url": url, "uuid": "a"},
        {"uuid": "a"},
        {"video_url": {"url": f"file://{folder}/a.mp4"}},
    ):
        assert say({"type": "video_url", **part}) == alone
    for given, reason in (
        (url[:400], "A video is refused"),
        ("data:image/png;base64,", "only mp4, mov, webm and mkv are built"),
        ("http://127.0.0.1/a.mp4", "not on the public internet"),
    ):
        with pytest.raises(RequestError, match=reason) as refused:
            say({"type": "video_url", "video_url": given})
        assert refused.value.code == "invalid_video" and refused.value.param == "video_url"
    llm.close()


def test_flags_of_videos_are_checked(tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    save_case(tmp_path, "Qwen2VLForConditionalGeneration", tiny_tokenizer)
    for given in (
        {"image": {}},
        {"video": 3},
        {"video": {"num_frames": 0}},
        {"video": {"fps": "x"}},
        {"video": {"x": 1}},
    ):
        with pytest.raises(ConfigError, match="--media-io-kwargs"):
            engine(tmp_path, media_io_kwargs=given)
    llm = engine(tmp_path, limit_mm_per_prompt={"video": 0})
    with pytest.raises(RequestError, match="takes no videos here, but pictures"):
        generate(llm, {"prompt": "<video>", "multi_modal_data": {"video": frames(0)}})
    llm.close()
    whole = json.loads((tmp_path / "processor_config.json").read_text())
    del whole["video_processor"]  # as where a processor is saved without torchvision
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match="has no processor of videos; leave --media-io-kwargs"):
        engine(tmp_path)
    monkeypatch.setattr("octavo.config.media_flags.find_spec", lambda module: None if module == "av" else module)
    with pytest.raises(ConfigError, match=r"takes videos only with av: scripts/install video"):
        engine(tmp_path)
