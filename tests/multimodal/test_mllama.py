"""A small Llama 3.2 Vision, whose layers of cross attention see a picture, beside itself in `transformers`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast
from transformers.models.mllama.modeling_mllama import MllamaCrossAttentionDecoderLayer

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, LoadError, RequestError
from octavo.execution import executor
from octavo.lora.request import LoRARequest
from octavo.models.registry import describe
from octavo.multimodal.processor_loader import load_processor
from octavo.ops import cuda
from tests.e2e.server import openai_client, served
from tests.execution.late_device import LateDevice
from tests.multimodal.conftest import encoded, picture, save
from tests.multimodal.test_combinations import MATRICES, rewritten
from tests.multimodal.test_llava import GREEDY, generate, tower
from tests.multimodal.test_pictures import url
from tests.ops import torch_ref
from tests.ops.triton.conftest import DEVICE
from tests.quantization.checkpoints import FORMATS
from tests.untimed import without_time

MARK = "<|image|>"
ROWS = 5  # of a tile: four patches and the class token
WIDE, TALL = picture(0, 90, 30), picture(1, 40, 100)  # of several tiles each
ONE = picture(2, 28, 28)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|image|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
PROMPTS: dict[str, tuple[str, list[Image.Image]]] = {
    "a picture first": (f"{MARK}<s>What is it?", [WIDE]),
    "text before and after": (f"<s>This one here: {MARK} What is it?", [TALL]),
    "one tile": (f"<s>And {MARK}", [ONE]),
    "two, each before its text": (f"{MARK}<s>This one. {MARK}And that, which is another?", [WIDE, TALL]),
    "two together": (f"<s>Beside{MARK}{MARK} each other.", [ONE, WIDE]),
    "together and alone": (f"{MARK}{MARK}<s>Here.{MARK} There{MARK}{MARK}", [TALL, ONE, WIDE, ONE, TALL]),
    "none": ("<s>There is no picture here.", []),
}


def config_of(**text: Any) -> transformers.MllamaConfig:
    return transformers.MllamaConfig(
        text_config={
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 512, "pad_token_id": 0,
            "cross_attention_layers": [1, 3], **text,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 2, "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
        },
        image_token_index=259,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    found = tmp_path_factory.mktemp("mllama")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer, additional_special_tokens=[MARK])
    images = transformers.MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4)
    model = transformers.MllamaForConditionalGeneration(config_of())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.dim() == 1:  # which are 0 before training
                parameter.fill_(0.8)
    save(found, model, transformers.MllamaProcessor(images, tokenizer, chat_template=TEMPLATE))
    return found


def engine(folder: Path, **args: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 13, "max_num_seqs": 4, "num_gpu_blocks_override": 60}
    return LLM(str(folder), **{"dtype": "float32", "max_model_len": 128, "check_invariants": True} | sizes | args)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    found = engine(folder)
    yield found
    found.close()


def asked(name: str) -> dict[str, Any]:
    text, images = PROMPTS[name]
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


def mask_attention(model: Any) -> None:
    """Have tokens before a picture see nothing of it, as in the code that came with the weights: transformers masks
    what the feed-forward returns of them, and lets them attend to all of it, tiles of padding too."""

    def keep(layer: Any, args: Any, given: dict[str, Any]) -> None:
        layer.cross_attn.seen = given["full_text_row_masked_out_mask"]

    def mask(attention: Any, args: Any, found: Any) -> Any:
        return (found[0] if attention.seen is None else found[0] * attention.seen[:, 0], *found[1:])

    for layer in model.model.language_model.layers:
        if isinstance(layer, MllamaCrossAttentionDecoderLayer):
            layer.register_forward_pre_hook(keep, with_kwargs=True)
            layer.cross_attn.register_forward_hook(mask)


@pytest.mark.parametrize("name", PROMPTS)
def test_it_answers_as_transformers_does(llm: LLM, folder: Path, name: str) -> None:
    """Prompts are longer than a step's 13 tokens: parts end before a picture and behind it."""
    text, images = PROMPTS[name]
    [output] = generate(llm, asked(name))
    model = transformers.MllamaForConditionalGeneration.from_pretrained(folder)
    mask_attention(model)
    processor = load_processor(str(folder), 0)
    inputs = processor(images=[images] if images else None, text=text, return_tensors="pt", add_special_tokens=False)
    assert inputs["input_ids"][0].tolist() == output.prompt_token_ids
    expected = model.generate(
        **inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    [answer] = output.outputs
    assert answer.token_ids == expected.sequences[0][-8:].tolist()
    logprobs = torch.log_softmax(torch.stack(expected.logits)[:, 0], -1)
    for position, found in enumerate(answer.logprobs):
        for token, logprob in found.items():
            assert logprob.logprob == pytest.approx(logprobs[position, token].item(), abs=1e-4)


def test_pictures_are_seen_by_their_own_prompts_alone(llm: LLM) -> None:
    alone = [generate(llm, asked(name))[0].outputs[0].logprobs for name in PROMPTS]
    runs = tower(llm).num_runs
    together = generate(llm, *(asked(name) for name in PROMPTS), asked("none"))
    assert [one.outputs[0].logprobs for one in together] == [*alone, alone[-1]]
    assert tower(llm).num_runs == runs
    text, _ = PROMPTS["one tile"]
    other = {"prompt": text, "multi_modal_data": {"image": picture(3, 28, 28)}}
    assert generate(llm, other)[0].outputs[0].logprobs != alone[2]
    assert [output.num_cached_tokens for output in generate(llm, asked("one tile"), other)] == [0, 0]
    as_ids = {"prompt_token_ids": llm.get_tokenizer().encode(text), "multi_modal_data": {"image": ONE}}
    assert generate(llm, as_ids)[0].outputs[0].logprobs == alone[2]


def told(
    folder: Path, names: list[str], params: SamplingParams, *, has_same_bits: bool = True, **args: Any
) -> list[list[dict[int, Any]]]:
    """Log-probabilities of answers to these prompts, which are together the same as alone."""
    llm = engine(folder, **args)
    prompts = [asked(name) for name in names]
    answers = [output.outputs[0] for output in generate(llm, *prompts, params=params)]
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = generate(llm, prompt, params=params)[0].outputs[0]
        assert alone.token_ids == answer.token_ids and (alone.logprobs == answer.logprobs or not has_same_bits)
    llm.close()
    return [
        [{token: pytest.approx(one.logprob, abs=1e-4) for token, one in of.items()} for of in found]
        for found in (answer.logprobs for answer in answers)
    ]


@pytest.mark.parametrize(
    ("names", "more"),
    [
        (["two together", "none"], {}),
        *(pytest.param(list(PROMPTS), more, marks=pytest.mark.long) for more in ({}, {"enforce_eager": True})),
    ],
    ids=["few", "all", "all, call by call"],
)
def test_answers_are_the_cpus_on_a_device_that_is_late(
    monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str], more: dict[str, Any]
) -> None:
    device = LateDevice(1)
    expected = told(folder, names, GREEDY, **more)
    monkeypatch.setattr(executor, "_open_device", lambda config, worker_group: (device, torch_ref))
    assert told(folder, names, GREEDY, has_same_bits=False, **more) == expected
    assert (device.num_replays > 0) == (not more)


@pytest.mark.long
@pytest.mark.timeout(900)  # in the interpreter, beside others
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device that is late has the host's memory")
def test_answers_of_tritons_kernels_are_the_cpus(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    names = ["together and alone", "none"]
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=3, ignore_eos=True)
    expected = told(folder, names, params, reproducible_parallel=False)
    monkeypatch.setattr(executor, "_open_device", lambda config, worker_group: (LateDevice(0), cuda))
    assert told(folder, names, params, reproducible_parallel=False) == expected


def test_rows_are_those_of_a_picture_s_own_tiles(llm: LLM) -> None:
    generate(llm, asked("a picture first"), asked("text before and after"), asked("one tile"))
    counts = sorted(future.result().shape[1] for _, future in tower(llm)._entries.values())
    assert counts[0] == ROWS and counts[-1] in (3 * ROWS, 4 * ROWS)


@pytest.mark.parametrize(
    ("mode", "num_workers"),
    # Of four workers two have each head of keys.
    [
        ("swap", 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("recompute", 1), ("recompute", 2), ("swap", 4))),
    ],
)
def test_preempted_and_forked_prompts_see_the_same(folder: Path, mode: str, num_workers: int) -> None:
    params = SamplingParams(temperature=1, seed=5, max_tokens=60, logprobs=1, ignore_eos=True, n=2)
    prompts = [asked(name) for name in PROMPTS]
    llm = engine(folder)
    alone = [generate(llm, prompt, params=params)[0] for prompt in prompts]
    llm.close()
    crowded = engine(
        folder, num_gpu_blocks_override=17, limit_mm_per_prompt={"image": 5}, preemption_mode=mode,
        swap_space=0.01 if mode == "swap" else 0, tensor_parallel_size=num_workers, reproducible_parallel=True,
    )  # fmt: skip
    without_time(crowded.core)  # type: ignore[arg-type]
    generate(crowded, *prompts)  # so that no tower has to be waited for
    together = generate(crowded, *prompts, params=params)
    crowded.close()
    assert sum(output.metrics.num_preemptions for output in together) > 0
    for one, other in zip(alone, together, strict=True):
        assert [found.logprobs for found in one.outputs] == [found.logprobs for found in other.outputs]


def test_quantized_decoders_see(tmp_path: Path, folder: Path) -> None:
    """In float32 they are the values that the codes stand for, of layers of cross attention too."""
    form, generator = FORMATS["awq"], np.random.default_rng(0)
    stored: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        module = name.rpartition(".")[0]
        if "language_model" in name and module.endswith(MATRICES):
            codes, plain[name] = form.write(generator, *values.shape)
            stored |= {f"{module}.{of}": array for of, array in codes.items()}
        else:
            stored[name] = plain[name] = values
    quantized = rewritten(folder, tmp_path / "quantized", stored, quantization_config=form.settings)
    floats = rewritten(folder, tmp_path / "floats", plain)
    names = ["two, each before its text", "none"]
    assert told(quantized, names, GREEDY) == told(floats, names, GREEDY)


def write_adapter(folder: Path, path: Path) -> tuple[Path, dict[str, Any]]:
    """An adapter of layers of cross attention and others, and all tensors of the model with it."""
    generator, tensors = np.random.default_rng(0), load_file(folder / "model.safetensors")
    wanted = r"language_model.*(cross_attn\.[qkvo]|layers\.0\.self_attn\.q)_proj"
    modules = [name for name in tensors if re.match(wanted, name)]
    assert len(modules) == 9
    factors, merged = {}, dict(tensors)
    for name in modules:
        rows, columns = tensors[name].shape
        a, b = (generator.standard_normal(shape, np.float32) * 0.3 for shape in ((4, columns), (rows, 4)))
        peft_name = f"base_model.model.{name.removesuffix('.weight')}"
        factors |= {f"{peft_name}.lora_A.weight": a, f"{peft_name}.lora_B.weight": b}
        merged[name] = tensors[name] + 2 * b @ a  # alpha / r
    path.mkdir()
    save_file(factors, path / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path, merged


@pytest.mark.parametrize("sizes", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long)])
def test_adapters_change_what_is_read_of_a_picture(tmp_path: Path, folder: Path, sizes: dict[str, int]) -> None:
    """Keys and values of pictures are those of the request's adapter."""
    adapter, merged = write_adapter(folder, tmp_path / "adapter")
    names = ["two, each before its text", "text before and after"]
    expected = told(rewritten(folder, tmp_path / "merged", merged), names, GREEDY)
    llm = engine(folder, enable_lora=True, **sizes)
    prompts, request = [asked(name) for name in names], LoRARequest("a", 1, str(adapter))
    plain = [output.outputs[0].logprobs for output in generate(llm, *prompts)]
    mixed = llm.generate(prompts * 2, GREEDY, use_tqdm=False, lora_request=[request, request, None, None])
    llm.close()
    logprobs = [output.outputs[0].logprobs for output in mixed]
    assert logprobs[2:] == plain
    found = [[{token: one.logprob for token, one in of.items()} for of in answer] for answer in logprobs[:2]]
    assert found == expected


def test_without_its_tower_it_is_a_language_model(folder: Path, llm: LLM) -> None:
    blind = engine(folder, language_model_only=True, num_gpu_blocks_override=10)  # one picture's and a prompt's
    assert generate(blind, asked("none"))[0].outputs[0].logprobs == generate(llm, asked("none"))[0].outputs[0].logprobs
    with pytest.raises(RequestError, match="takes no pictures"):
        generate(blind, asked("one tile"))
    blind.close()


def test_the_picture_s_token_is_never_said(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=20, repetition_penalty=1.5, prompt_logprobs=1
    )
    [output] = generate(llm, asked("text before and after"), params=params)
    place = output.prompt_token_ids.index(259)
    assert output.prompt_logprobs[place][259].logprob < -1e4
    assert all(token < 259 for found in output.outputs[0].logprobs for token in found)


def test_chats_bring_a_picture(llm: LLM) -> None:
    part = {"type": "image_pil", "image_pil": TALL}
    message = {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}
    [found] = llm.chat([message], GREEDY, use_tqdm=False)
    as_text = {"prompt": f"USER: {MARK}What is it? ASSISTANT:", "multi_modal_data": {"image": TALL}}
    assert found.outputs[0].logprobs == generate(llm, as_text)[0].outputs[0].logprobs


@pytest.mark.slow
@pytest.mark.long
def test_a_server_says_the_same(tmp_path: Path, llm: LLM, folder: Path) -> None:
    as_text = {"prompt": f"USER: {MARK}What is it? ASSISTANT:", "multi_modal_data": {"image": TALL}}
    expected = [output.outputs[0].text for output in generate(llm, as_text, {"prompt": "<s>Without."})]
    part = {"type": "image_url", "image_url": {"url": url(encoded(TALL))}}
    messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    options: Any = {"model": "m", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    with (
        served(
            tmp_path, "--model", str(folder), "--served-model-name", "m", "--dtype", "float32",
            "--num-gpu-blocks-override", "64", "--max-model-len", "256",
        ) as server,
        openai_client(server) as client,
    ):  # fmt: skip
        chat = client.chat.completions.create(messages=messages, **options)
        text = client.completions.create(prompt="<s>Without.", **options)
        two = client.chat.completions.create(messages=[*messages, *messages], **options)
        with pytest.raises(openai.BadRequestError, match="9 pictures, and 8 are the most"):
            client.chat.completions.create(messages=messages * 9, **options)
    assert len(two.choices[0].message.content or "") > 0
    assert [chat.choices[0].message.content, text.choices[0].text] == expected


def test_what_is_not_built_is_refused(llm: LLM, folder: Path) -> None:
    nine = {"prompt": MARK * 9, "multi_modal_data": {"image": [ONE] * 9}}
    with pytest.raises(RequestError, match="9 pictures, and 8 are the most"):
        generate(llm, nine)
    with pytest.raises(RequestError, match="1 placeholders and 0 pictures"):
        generate(llm, {"prompt": MARK, "multi_modal_data": {"image": []}})
    for args, reason in (
        (
            {"num_gpu_blocks_override": 17},
            "lower --max-model-len to at most 112, or --limit-mm-per-prompt,",
        ),  # with eight pictures side by side
        ({"tensor_parallel_size": 3}, "cannot share out 4 attention heads; these sizes could: 1, 2, 4"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine(folder, **args)
    with pytest.raises(LoadError, match="tie_word_embeddings = True"):
        describe(
            {**config_of().to_dict(), "architectures": ["MllamaForConditionalGeneration"], "tie_word_embeddings": True}
        )
