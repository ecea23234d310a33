"""Engines whose launches are watched: models of every kind, weights in every layout, and what guesses or adapts beside
them. `Case.make` writes the files; `drive` and its like ask for all that requests may ask for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.lora.request import LoRARequest
from octavo.pooling_params import PoolingParams
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import BeamSearchParams, SpeechRules, StructuredOutputsParams
from tests.execution.test_draft_heads import DEEPSEEK_MODULE, SHAPE
from tests.lora.random_adapters import write_adapter_of
from tests.models.small_encoders import DECODERS, ENCODERS
from tests.models.small_experts import EXPERT_MODELS, GEMMA_4_MODELS
from tests.models.small_latent import LATENT_MODELS
from tests.models.small_models import MODELS, SmallModel
from tests.models.small_recurrent import RECURRENT_MODELS
from tests.multimodal.small_media import save_case
from tests.multimodal.test_devices import prompts_of
from tests.quantization.checkpoints import FORMATS, HIDDEN, tensors_of, write
from tests.speech.conftest import marks, save_whisper, sound

VOCAB = 320
_DIGITS = StructuredOutputsParams(regex=r"[0-9]{3,12}(, [a-z]{1,4}){0,4}")
# Of requests: each way to choose a token, and each thing that is told of it.
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, {"logprobs": 3}, {"prompt_logprobs": 2},
    {"n": 3, "temperature": 1.0}, {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.1},
    {"logit_bias": {5: 4.0, 6: -2.0}}, {"bad_words": ["ab", "c"], "min_tokens": 1}, {"allowed_token_ids": [5, 6, 9]},
    {"structured_outputs": _DIGITS}, {"prompt_logprobs": 0, "temperature": 0.5, "min_p": 0.2}, {"top_p": 0.5},
)  # fmt: skip
SIZES: dict[str, Any] = {
    "max_num_seqs": 40, "max_num_batched_tokens": 72, "max_model_len": 128, "block_size": 16, "swap_space": 0.01,
    "num_gpu_blocks_override": 100, "preemption_mode": "swap", "enforce_eager": True, "check_invariants": True,
    "reproducible_parallel": False, "seed": 0, "dtype": "bfloat16",
}  # fmt: skip

Make = Callable[[pytest.FixtureRequest, Path], dict[str, Any]]  # in a folder -> what `LLM` is to be given
Drive = Callable[[LLM, dict[str, Any]], None]  # an engine, and what `Make` has given


def drive(llm: LLM, given: dict[str, Any], lora: str | None = None) -> None:
    """Steps of any number of rows, tokens and samples: sequences come together and end one by one. Some of them have an
    adapter."""
    rng = random.Random(0)

    def generate(lengths: list[int], most: int, settings: tuple[dict[str, Any], ...] = SETTINGS) -> None:
        prompts = [{"prompt_token_ids": [rng.randrange(5, 100) for _ in range(length)]} for length in lengths]
        params = [
            SamplingParams(**{"temperature": 0.0, "max_tokens": 1 + i % most, "ignore_eos": True, "seed": i}
                           | settings[i % len(settings)])
            for i in range(len(prompts))
        ]  # fmt: skip
        adapters = [(lora and i % 3 != 1 and LoRARequest("a", 1, lora)) or None for i in range(len(prompts))]
        llm.generate(prompts, params, use_tqdm=False, lora_request=adapters if lora else None)
        # The second time much of them is cached.
        llm.generate(prompts[::4], params[::4], use_tqdm=False, lora_request=adapters[::4] if lora else None)

    generate([1], 1)
    generate([99, 41, 2, 5, 17], 3)  # in chunks, the second of which ends anywhere
    generate([1 + i % 5 for i in range(17)], 9, ({}, {"temperature": 1.0}))
    generate([1 + i % 19 for i in range(35)], 18)
    generate([90] * 24, 10, ({},))  # more than there are blocks for
    llm.beam_search([{"prompt_token_ids": [7, 8, 9]}], BeamSearchParams(beam_width=3, max_tokens=4))


def see(llm: LLM, given: dict[str, Any], name: str) -> None:
    drive(llm, given)
    prompts: Any = prompts_of(name)
    for settings in ({}, {"prompt_logprobs": 1}, {"n": 3, "temperature": 1.0}):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True} | settings)
        for count in (1, len(prompts)):
            llm.generate(prompts[:count], params, use_tqdm=False)


def see_across(llm: LLM, given: dict[str, Any]) -> None:
    from tests.multimodal.test_mllama import PROMPTS, asked

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    for name in PROMPTS:
        llm.generate([asked(name)], params, use_tqdm=False)
    llm.generate([asked(name) for name in PROMPTS], params, use_tqdm=False)


def listen(llm: LLM, given: dict[str, Any]) -> None:
    start, times = given.pop("start"), given.pop("first_timestamp")
    rules = SpeechRules([3], [4], times - 10, times, True, 5)
    for settings in ({}, {"logprobs": 2}, {"alignment_heads": [(0, 1), (1, 0)], "max_tokens": 1}, {"speech": rules}):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, "ignore_eos": True} | settings)
        for count in (1, 3):
            prompts: Any = [
                {"prompt_token_ids": start[: 2 + i], "multi_modal_data": {"audio": sound(i, 1.0)}} for i in range(count)
            ]
            llm.generate(prompts, params, use_tqdm=False)


def pool(llm: LLM, given: dict[str, Any]) -> None:
    config = llm.config.model.pooling
    assert config is not None
    params = config.settle(PoolingParams(use_activation=False))
    for lengths in ([1], [5, 17, 33], [1 + i % 7 for i in range(17)], [3] * 35, [63, 64, 2]):
        for i, length in enumerate(lengths):
            prompt = Prompt([5 + (i * 7 + j) % 90 for j in range(length)])
            llm.core.add(EngineRequest(str(i), prompt, SamplingParams(), [], 0, 0.0, pooling=params))
        while llm.core.has_work:
            assert not any(output.error for output in llm.core.step().outputs)


class Case(NamedTuple):
    """Weights are those of the files, or random ones, in a `format` of `octavo.planning.weight_formats` where there is
    one."""

    make: Make
    flags: dict[str, Any] | None = None
    format: str | None = None
    drive: Drive = drive


def saved(request: pytest.FixtureRequest, folder: Path, config: Any, architecture: str) -> dict[str, Any]:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    tokenizer = request.getfixturevalue("tiny_tokenizer")
    return {"model": str(folder), "tokenizer": str(tokenizer), "load_format": "dummy"}


def small(model: SmallModel, **settings: Any) -> Make:
    def make(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
        vocabulary = {name: VOCAB for name in ("vocab_size", "vocab_size_per_layer_input") if name in model.settings}
        config = model._replace(settings=model.settings | vocabulary | settings).config()
        return saved(request, folder, config, model.architecture)

    return make


def headed(method: str) -> Make:
    def make(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
        own = {"method": method, "num_speculative_tokens": 3, "model": str(request.getfixturevalue("heads")[method])}
        return {"model": str(request.getfixturevalue("deep")), "load_format": "dummy", "speculative_config": own}

    return make


def with_module(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(SHAPE | DEEPSEEK_MODULE | {"qk_rope_head_dim": 16}))
    tokenizer = request.getfixturevalue("tiny_tokenizer")
    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    return {
        "model": str(folder), "tokenizer": str(tokenizer), "load_format": "dummy", "speculative_config": speculative,
    }  # fmt: skip


def drafted(model: Make, draft: Make) -> Make:
    def make(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
        own, given = draft(request, folder / "draft")["model"], model(request, folder / "model")
        for file in Path(given["tokenizer"]).iterdir():
            for of_model in (own, given["model"]):
                (Path(of_model) / file.name).write_bytes(file.read_bytes())
        return given | {"speculative_config": {"method": "draft_model", "model": own, "num_speculative_tokens": 3}}

    return make


def quantized(name: str) -> Make:
    def make(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
        tensors, _ = tensors_of(FORMATS[name])
        tables = ("model.embed_tokens.weight", "lm_head.weight")
        tensors |= {table: np.ones((VOCAB, HIDDEN), np.float32) for table in tables}
        write(folder, tensors, FORMATS[name].settings, vocab_size=VOCAB, max_position_embeddings=256)
        return {"model": str(folder), "tokenizer": str(request.getfixturevalue("tiny_tokenizer"))}

    return make


def pooled(name: str) -> Make:
    def make(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
        model = (ENCODERS | DECODERS)[name]
        model = model._replace(settings={**model.settings, "hidden_size": 64})
        model.save(model.reference(0), folder)
        return {"model": str(folder), "tokenizer": str(request.getfixturevalue("tiny_tokenizer"))}

    return make


def seeing(name: str) -> Case:
    def make(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
        save_case(folder, name, request.getfixturevalue("tokenizer_of_media"))
        return {"model": str(folder)}

    flags = {"max_image_pixels": 20_000, "max_audio_seconds": 2.0}
    return Case(make, flags, drive=partial(see, name=name))


def across(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    return {"model": str(request.getfixturevalue("mllama"))}


def whisper(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    from transformers import WhisperFeatureExtractor

    save_whisper(folder, request.getfixturevalue("tiny_tokenizer"), max_source_positions=50)
    WhisperFeatureExtractor(feature_size=80, chunk_length=1).save_pretrained(folder)
    start = marks(folder, "startoftranscript", "de", "transcribe", "notimestamps")
    return {"model": str(folder), "start": start, "first_timestamp": marks(folder, "0.00")[0]}


def adapted(model: Make, sizes: dict[str, tuple[int, int]], weights: str | None = None, **flags: Any) -> Case:
    def make(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
        path = write_adapter_of(folder / "adapter", 0, 4, sizes, 1.0)
        return model(request, folder) | {"lora": str(path)}

    def with_adapters(llm: LLM, given: dict[str, Any]) -> None:
        drive(llm, given, given["lora"])

    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    return Case(make, lora | flags, weights, with_adapters)


_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
_WIDE = {"hidden_size": 256, "intermediate_size": 512}
_MOE = small(EXPERT_MODELS["qwen3 moe"], hidden_size=256, moe_intermediate_size=256)
_LLAMA = small(MODELS["llama, all biases"])
_PLAIN = small(MODELS["qwen3"], **_WIDE)
_MIXED = small(MODELS["gemma 2"])
_Q_PROJ = {"model.layers.0.self_attn.q_proj": (64, 48)}
_NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
_SUFFIX = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 5}}

DRAFT_CASES = (
    "eagle", "eagle3", "medusa", "mtp", "a draft model", "a draft model of few tokens", "a draft model with states"
)  # fmt: skip

CASES: dict[str, Case] = {
    "llama": Case(_LLAMA),
    "captured steps": Case(_LLAMA, {"enforce_eager": False}),
    "float32": Case(_LLAMA, {"dtype": "float32"}),
    # Attention.
    **{name: Case(small(MODELS[name])) for name in ("gemma 2", "bloom", "mpt", "gpt-neox", "cohere 2", "opt")},
    "gpt-oss": Case(small(EXPERT_MODELS["gpt-oss"])),
    "gemma 3n": Case(small(GEMMA_4_MODELS["gemma 3n"])),
    "gemma 4": Case(small(GEMMA_4_MODELS["gemma 4"], head_dim=16, global_head_dim=32)),
    **{
        f"{model}, a cache of {dtype}": Case(make, {"kv_cache_dtype": dtype} | more)
        for model, make in {"llama": _LLAMA, "gemma 2": _MIXED}.items()
        for dtype, more in {"fp8_e4m3": {"calculate_kv_scales": True}, "fp8_e5m2": {}, "int8": {}}.items()
    },
    # Latent attention.
    **{
        name: Case(small(LATENT_MODELS[name], **_LATENT))
        for name in ("deepseek v2", "deepseek v3", "mistral 4", "longcat flash", "minicpm 3")
    },
    "deepseek v3.2": Case(
        small(LATENT_MODELS["deepseek v3.2, of whose keys its index chooses 8"], **_LATENT)
    ),
    "glm moe dsa": Case(
        small(LATENT_MODELS["glm moe dsa, of whose keys indexes of some layers choose 8"], index_head_dim=16, **_LATENT)
    ),
    "deepseek v3, a cache of fp8": Case(
        small(LATENT_MODELS["deepseek v3"], **_LATENT), {"kv_cache_dtype": "fp8_e4m3"}
    ),
    # States.
    **{
        name: Case(small(RECURRENT_MODELS[name], **settings))
        for name, settings in {
            "mamba": {}, "falcon mamba": {}, "mamba 2": {}, "jamba": {"head_dim": 16}, "bamba": {},
            "granite hybrid, experts": {"head_dim": 16}, "falcon h1": {}, "nemotron h": {}, "zamba": {}, "zamba 2": {},
            "lfm 2": {}, "lfm 3": {}, "recurrent gemma": {}, "minimax": {}, "qwen3 next": {},
            "olmo hybrid": {"head_dim": 16}, "kimi linear": _LATENT, "bailing hybrid": _LATENT,
        }.items()
    },
    "bamba, ngrams": Case(small(RECURRENT_MODELS["bamba"]), _NGRAM),
    # Weights.
    **{
        f"llama in {name}": Case(_PLAIN, {}, name)
        for name in ("int8", "int4", "fp8", "q4_0", "q8_0", "q4_k_m", "q5_k_m")
    },
    **{
        f"experts in {name}": Case(_MOE, {}, name) for name in ("bf16", "int8", "int4", "fp8", "q4_0", "q4_k_m")
    },
    **{
        name: Case(quantized(name))
        for name in ("gptq 4 desc_act", "gptq 4 zeros", "awq", "w8a8", "fp8 blocks", "fp8", "nvfp4", "nf4")
    },
    # What guesses.
    **{method: Case(headed(method)) for method in ("eagle", "eagle3", "medusa")},
    "eagle of int8": Case(headed("eagle"), {}, "int8"),
    "medusa of int8": Case(headed("medusa"), {}, "int8"),
    "mtp": Case(with_module),
    "ngrams": Case(_LLAMA, _NGRAM),
    "suffixes": Case(_LLAMA, _SUFFIX),
    "a draft model": Case(drafted(_LLAMA, small(MODELS["qwen3"]))),
    "a draft model of few tokens": Case(drafted(_LLAMA, small(MODELS["qwen3"], vocab_size=200))),
    "a draft model with states": Case(drafted(_MIXED, small(RECURRENT_MODELS["bamba"]))),
    # Media.
    **{
        name: seeing(name)
        for name in (
            "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
            "Gemma3ForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
        )
    },
    "mllama": Case(across, {"limit_mm_per_prompt": {"image": 5}, "num_gpu_blocks_override": 400}, drive=see_across),
    "whisper": Case(whisper, {"max_model_len": None, "num_gpu_blocks_override": 400}, drive=listen),
    # Vectors.
    **{
        name: Case(pooled(name), {"max_model_len": 64}, drive=pool)
        for name in ("BertForSequenceClassification", "ModernBertForTokenClassification", "MPNetModel", *DECODERS)
    },
    # Adapters.
    "adapters": adapted(small(MODELS["qwen3"]), _Q_PROJ),
    "adapters of a mixed model": adapted(_MIXED, _Q_PROJ),
    "adapters of experts": adapted(small(EXPERT_MODELS["qwen3 moe"]), {"model.layers.0.self_attn.q_proj": (64, 64)}),
    "adapters of few bits": adapted(_PLAIN, {"model.layers.0.self_attn.q_proj": (64, 256)}, weights="q4_k_m"),
    "adapters of int8": adapted(_PLAIN, {"model.layers.0.self_attn.q_proj": (64, 256)}, weights="int8"),
    "adapters and ngrams": adapted(small(MODELS["qwen3"]), _Q_PROJ, **_NGRAM),
}  # fmt: skip
