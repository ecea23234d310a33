"""Every engine flag once (`EngineArgs`), and the checked, frozen groups that the engine is built from (`EngineConfig`).

Command lines, `LLM(...)` keywords and YAML files all fill `EngineArgs`; `create_engine_config` finds the model, fills
in what was left open and refuses what cannot be honoured. Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.errors import ConfigError
from octavo.flags import Flags, flag, number_with_unit
from octavo.hardware import why_not_cuda
from octavo.loading.checkpoint import Checkpoint, resolve
from octavo.loading.overrides import longest_context, overridden
from octavo.pooling_params import PoolingConfig
from octavo.sampling_params import MAX_LOGPROBS
from octavo.speculative_config import DRAFT_METHODS, HEAD_METHODS, SpeculativeConfig, parse

if TYPE_CHECKING:
    from octavo.models.description import ModelDescription

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "safetensors", "gguf", "pt", "dummy"]
Dtype = Literal["auto", "float32", "float16", "bfloat16", "half", "float"]
_DTYPES = {"half": "float16", "float": "float32"}  # other names
Device = Literal["auto", "cpu", "cuda"]
AttentionBackend = Literal["auto", "triton", "flash_attn"]
SchedulingPolicy = Literal["fcfs", "priority", "deadline"]
PreemptionMode = Literal["recompute", "swap"]

DEFAULT_MAX_BATCHED_TOKENS = 2048
# What a model's generation_config.json may say for requests that leave it out.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GENERATION_OVERRIDES = (*_SAMPLING_DEFAULTS, "eos_token_id")
MAX_LORA_RANK = 512
AUTO_LENGTH = -1  # --max-model-len auto
# Methods of --quantization: of weights of floats as they are loaded, and those that files have been quantized with.
_QUANTIZATIONS = {"cpu": ("int8", "int4"), "cuda": ("int8", "int4", "fp8")}
_FILE_METHODS = (
    "gguf", "gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "mxfp4", "bitsandbytes",
)  # fmt: skip
_BLOCK_SIZES = {"cpu": (8, 16, 32), "cuda": (8, 16, 32, 64, 128, 256)}
# Of --kv-cache-dtype, what is another type than the model's. No CPU multiplies eight-bit floats: fp8 asks for bytes.
_CACHE_BYTES = {"int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
GIB = 1 << 30


def num_tokens(text: str) -> int:
    """The value of --max-model-len. Raises `ValueError`."""
    return AUTO_LENGTH if text == "auto" else number_with_unit(text)


def milliseconds(text: str) -> float | None:
    """The value of --target-step-time. Raises `ValueError`."""
    return None if text == "auto" else float(text)


@dataclass(kw_only=True)
class EngineArgs(Flags):
    """What a user can set. Field `max_model_len` is flag `--max-model-len` and keyword `max_model_len` of `LLM`."""

    model: str = flag("", "Hugging Face id, folder or .gguf file; empty is SmolLM2-135M-Instruct.")
    tokenizer: str | None = flag(None, "Hugging Face id, folder or .gguf file of the tokenizer; default: the model's.")
    served_model_name: list[str] = flag([], "Names that the API answers to; default: the model's.")
    revision: str | None = flag(None, "Branch, tag or commit on the hub.")
    download_dir: str | None = flag(None, "Where downloads are kept; default: the hub's own cache.")
    runner: Literal["auto", "generate", "pooling"] = flag(
        "auto", "Whether the model generates tokens or pools its hidden states into vectors (embeddings, classes, "
        "scores); auto is what its architecture or its sentence-transformers folder says.",
    )  # fmt: skip
    convert: Literal["auto", "none", "embed", "classify"] = flag(
        "auto", "What a decoder that pools gives: embeddings, or the classes of its classifier."
    )
    task: str = flag(
        "auto", "As older launch scripts say it: 'generate', or 'embed', 'classify', 'score', 'reward' for models that "
        "pool.",
    )  # fmt: skip
    pooler_config: dict[str, Any] | None = flag(
        None, "How a model pools, in the place of what its files say, as JSON: pooling_type (CLS, LAST, MEAN, MAX, "
        "MEAN_SQRT, WEIGHTED_MEAN, ALL), normalize, use_activation, dimensions, task.",
    )  # fmt: skip
    override_pooler_config: dict[str, Any] | None = flag(None, "The former name of --pooler-config.")
    load_format: LoadFormat = flag("auto", "Format of the weights; 'dummy' makes seeded random ones.")
    dtype: Dtype = flag(
        "auto",
        "Type of weights and activations; auto is bfloat16, or float32 for float32 models. GGUF's quantized weights "
        "stay as they are in bfloat16; float32 expands them and computes with float32 throughout, for reference.",
    )
    quantization: str | None = flag(
        None, "How weights are held: 'int8', 'int4' and, on GPUs, 'fp8' quantize weights of floats as they are loaded; "
        "'gguf', 'gptq', 'awq', 'compressed-tensors' and other methods of files insist on files of that method, which "
        "need no flag. Default: as the model's files have them.", short="-q",
    )  # fmt: skip
    generation_config: Literal["auto", "none", "vllm"] = flag(
        "auto", "Where sampling defaults come from: the model's generation_config, or ('none', 'vllm') Octavo's own."
    )
    override_generation_config: dict[str, Any] | None = flag(
        None, "Sampling defaults and eos_token_id in the place of the model's, as JSON or as "
        "--override-generation-config.temperature 0.5.",
    )  # fmt: skip
    hf_overrides: dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] | None = flag(
        None, "Settings in the place of config.json's, as JSON or as --hf-overrides.rope_parameters.factor 2; from "
        "Python also a function that gets and returns all of them.", may_be_function=True,
    )  # fmt: skip
    kv_cache_dtype: str = flag(
        "auto",
        "Type of the KV cache: auto is the model's; int8, fp8_e4m3 and fp8_e5m2 take half the memory of bfloat16, with "
        "a scale for each token and head. fp8 is fp8_e4m3 on GPUs and int8, which is more exact, on CPUs.",
    )
    calculate_kv_scales: bool = flag(
        False, "The scales of a KV cache of eight bits are those of the tokens, not of the checkpoint: always so."
    )
    max_model_len: int | None = flag(
        None, "Tokens of prompt and output together: a number, 32k (32,000), 32K (32,768), or 'auto' (or -1) for the "
        "model's, or as many as the cache holds if that is less; default: the model's.",
        parse=num_tokens,
    )  # fmt: skip
    gpu_memory_utilization: float = flag(0.90, "Share of a GPU's memory for weights, activations and KV cache.")
    cpu_memory_utilization: float = flag(0.30, "Share of the free RAM, after the weights, for the KV cache on CPU.")
    num_gpu_blocks_override: int | None = flag(None, "KV blocks to allocate, whatever the memory.", positive=True)
    block_size: int = flag(16, "Tokens in a KV block: 8, 16 or 32; on GPUs up to 256.")
    swap_space: float = flag(4.0, "GiB of host memory for swapped requests, with --preemption-mode swap.")
    max_num_seqs: int = flag(256, "Sequences in a step at most.", positive=True)
    max_num_batched_tokens: int | None = flag(None, "Tokens in a step at most; default 2048.", positive=True)
    enable_chunked_prefill: bool = flag(True, "Let a prompt be computed over several steps.")
    enable_prefix_caching: bool = flag(True, "Reuse the blocks of prompts that start alike.")
    preemption_mode: PreemptionMode = flag("recompute", "What happens to a request that must give its blocks back.")
    scheduling_policy: SchedulingPolicy = flag(
        "fcfs", "Who goes first: the first come; the lowest priority value; or whose first token is due first, which "
        "the request says or its prompt's length.",
    )  # fmt: skip
    target_step_time: float | None = flag(
        None, "Milliseconds that a step may take while somebody waits for a stream: prompts are cut to it. 'auto' is "
        "90, or more where the streams alone take long; 0 bounds steps by tokens only. Default: auto.",
        parse=milliseconds,
    )  # fmt: skip
    enforce_eager: bool = flag(False, "Run the model call by call, without captured graphs.")
    seed: int | None = flag(None, "Seed of requests that bring none, and of dummy weights; default: not repeatable.")
    chat_template: str | None = flag(
        None, "File with a Jinja chat template, the template, or the name of one of the model's; default: the model's."
    )
    model_impl: Literal["auto", "octavo", "transformers"] = flag(
        "auto", "Who computes the model: Octavo itself, or its modules of transformers; auto is Octavo where it can."
    )
    trust_remote_code: bool = flag(
        False, "Run Python code that comes with a model. Only models that transformers computes ever do."
    )
    allow_additional_properties: bool = flag(
        False, "Follow JSON schemas to the letter: an object that names its properties and says nothing of others may "
        "have any others. Without, it has none."
    )  # fmt: skip
    device: Device = flag("auto", "Where the model runs; auto takes a CUDA device if there is one.")
    attention_backend: AttentionBackend = flag(
        "auto", "Attention on GPUs: Octavo's kernel in Triton, FlashAttention, or whichever is faster at start and as "
        "sure to give a request the same answer whatever else is computed.",
    )  # fmt: skip
    cpu_threads: int | None = flag(
        None, "Threads that compute on CPU; default: the cores of one NUMA node, within affinity and quota.",
        positive=True,
    )  # fmt: skip
    cpu_threads_bind: str | None = flag(
        None, "Processors to keep one thread each on, as 0-3,8; default: any, or one node's where there are several."
    )
    max_logprobs: int = flag(
        MAX_LOGPROBS, f"Log-probabilities of a position that a request may ask for, {MAX_LOGPROBS} at most."
    )
    disable_log_stats: bool = flag(False, "Do not log throughput and cache use every few seconds.")
    check_invariants: bool = flag(
        False, "Check the scheduler's and the cache's invariants after each step (debugging)."
    )
    speculative_config: dict[str, Any] | None = flag(
        None, "How tokens are guessed that the model then checks, several in a step, as JSON: "
        '{"method": "ngram"} looks them up in the prompt, {"method": "suffix"} in recent answers too; {"model": "…"} '
        "has a smaller model guess. Answers stay as they are.",
    )  # fmt: skip
    speculative_model: str | None = flag(None, "An older way to say it: [ngram], or a model that guesses.")
    num_speculative_tokens: int | None = flag(None, "Tokens that are guessed for a sequence in a step at most.")
    speculative_draft_tensor_parallel_size: int | None = flag(None, "Devices of a model that guesses.", positive=True)
    ngram_prompt_lookup_max: int | None = flag(None, "Tokens that [ngram] compares at most; default 5.")
    ngram_prompt_lookup_min: int | None = flag(None, "Tokens that must agree for [ngram] to guess; default 5.")
    tensor_parallel_size: int = flag(1, "Devices that share each layer.", built=False, short="-tp")
    pipeline_parallel_size: int = flag(1, "Devices that share the layers.", built=False, short="-pp")
    data_parallel_size: int = flag(1, "Copies of the model.", built=False, short="-dp")
    distributed_executor_backend: str | None = flag(None, "mp or ray.", built=False)
    enable_lora: bool = flag(False, "Serve LoRA adapters beside the model.")
    lora_modules: list[str] = flag(
        [], 'Adapters to serve from the start, as name=path or {"name": ..., "path": ..., "base_model_name": ...}.'
    )
    max_loras: int = flag(
        1, "Adapters in a step at most. The device has memory for so many of the largest rank, or more smaller ones.",
        positive=True,
    )  # fmt: skip
    max_lora_rank: int = flag(16, "Largest rank of an adapter: 1 to 512.", positive=True)
    max_cpu_loras: int | None = flag(
        None, "Adapters that are kept in the host's memory; default: --max-loras.", positive=True
    )
    lora_dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto", "Type that adapters are held in; auto is the model's."
    )
    lora_target_modules: list[str] = flag(
        [], "Ends of the names of modules that adapters may change, such as o_proj; default: all."
    )
    fully_sharded_loras: bool = flag(False, "Share all of an adapter among devices.", built=False)
    lora_root: list[str] = flag(
        [], "Folders of adapters that requests may name: those are served as soon as they are asked for by the name of "
        "their folder, and only from below these may clients load others.",
    )  # fmt: skip
    enable_runtime_lora_updating: bool = flag(
        False, "Let clients load and unload adapters below --lora-root. Also OCTAVO_ALLOW_RUNTIME_LORA_UPDATING."
    )
    num_scheduler_steps: int = flag(1, "Steps between two schedules.", built=False)
    limit_mm_per_prompt: str | None = flag(None, "Images and the like in a prompt.", built=False)

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):
            self.served_model_name = [self.served_model_name]
        if isinstance(self.max_model_len, str):
            try:
                self.max_model_len = num_tokens(self.max_model_len)
            except ValueError:
                raise ConfigError(
                    f"--max-model-len must be a number of tokens, such as 32768 or 32K, or auto; got "
                    f"{self.max_model_len!r}."
                ) from None
        if isinstance(self.target_step_time, str) and self.target_step_time == "auto":
            self.target_step_time = None

    def create_engine_config(self) -> EngineConfig:
        """Find the model, settle the defaults and check every combination.

        Raises `ConfigError` for a flag that cannot be honoured, `LoadError` for a model that cannot be found or read.
        """
        device = self._check()
        # Imported here because it needs the groups below and most users of EngineArgs never get this far.
        from octavo.models.registry import describe

        checkpoint = resolve(
            self.model,
            load_format=self.load_format,
            revision=self.revision,
            download_dir=self.download_dir,
            tokenizer=self.tokenizer,
        )
        checkpoint = replace(
            checkpoint,
            config=overridden(checkpoint.config, self.hf_overrides),
            generation_config=checkpoint.generation_config | (self.override_generation_config or {}),
        )
        code_folder = self._code_folder(checkpoint)
        description = describe(checkpoint.config, self.model_impl, code_folder)
        pooling, checkpoint = self._pooling(checkpoint, description, device)
        enable_chunked_prefill = self.enable_chunked_prefill and not (pooling and pooling.whole_prompts)
        quantization = self._quantization(checkpoint, device)
        longest = longest_context(checkpoint.config, description.max_position_embeddings)
        max_model_len = self.max_model_len
        if max_model_len is None or max_model_len == AUTO_LENGTH:
            max_model_len = longest if pooling is None else min(longest, pooling.max_length or longest)
        if max_model_len > longest:
            raise ConfigError(
                f"--max-model-len {max_model_len} is more than the model's {longest} positions; --hf-overrides can "
                "give it another max_position_embeddings or rope scaling."
            )
        budget = self.max_num_batched_tokens or max(
            DEFAULT_MAX_BATCHED_TOKENS, 0 if enable_chunked_prefill else max_model_len
        )
        if not enable_chunked_prefill and budget < max_model_len:
            what_to_do = "lower --max-model-len" if self.enable_chunked_prefill else "leave chunked prefill on"
            raise ConfigError(
                f"--max-num-batched-tokens {budget} is less than --max-model-len {max_model_len}: a prompt that long "
                f"could never run. Raise it, or {what_to_do}."
            )
        dtype = self._dtype(checkpoint, device, description.is_bidirectional)
        model = ModelConfig(
            checkpoint=checkpoint,
            served_model_names=list(self.served_model_name) or [checkpoint.name],
            dtype=dtype,
            max_model_len=max_model_len,
            may_shorten=self.max_model_len == AUTO_LENGTH,
            vocab_size=description.vocab_size,
            seed=self.seed,
            quantization=quantization,
            impl=description.impl,
            code_folder=code_folder,
            chat_template=self.chat_template,
            default_sampling_params=self._default_sampling_params(checkpoint),
            max_logprobs=self.max_logprobs,
            pooling=pooling,
        )
        speculative = self._speculative()
        if speculative is not None and pooling is not None:
            raise ConfigError(f"{checkpoint.name} pools and samples no tokens; leave speculation out.")
        return EngineConfig(
            model=model,
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks_override=self.num_gpu_blocks_override,
                cpu_memory_utilization=self.cpu_memory_utilization,
                gpu_memory_utilization=self.gpu_memory_utilization,
                swap_space_bytes=int(self.swap_space * GIB),
                enable_prefix_caching=self.enable_prefix_caching and not (pooling and pooling.whole_prompts),
                is_scratch=pooling is not None and pooling.whole_prompts,
                dtype=self._cache_dtype(dtype, device),
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=min(self.max_num_seqs, budget),
                max_num_batched_tokens=budget,
                enable_chunked_prefill=enable_chunked_prefill,
                policy=self.scheduling_policy,
                preemption_mode=self.preemption_mode,
                check_invariants=self.check_invariants,
                target_step_s=self.target_step_time and self.target_step_time / 1e3,
            ),
            device=device,
            enforce_eager=self.enforce_eager,
            attention_backend=self.attention_backend,
            cpu_threads=self.cpu_threads,
            cpus=self._cpus(),
            allow_additional_properties=self.allow_additional_properties,
            log_stats=not self.disable_log_stats,
            lora=self._lora(description.impl, device, dtype),
            speculative=speculative,
            draft=self._draft(speculative, model, device),
        )

    def _lora(self, impl: str, device: str, dtype: str) -> LoRAConfig | None:
        """Raises `ConfigError` for what cannot be honoured."""
        if not self.enable_lora:
            for name in ("lora_modules", "lora_root", "lora_target_modules", "enable_runtime_lora_updating"):
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora.")
            return None
        if device != "cpu":
            raise ConfigError("--enable-lora is not built yet on GPUs; leave it out, or add --device cpu.")
        if impl != "octavo":
            raise ConfigError("--enable-lora is not built for models that transformers computes (--model-impl).")
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(f"--max-lora-rank must be at most {MAX_LORA_RANK}, got {self.max_lora_rank}.")
        if self.lora_dtype == "float16":
            raise ConfigError("--lora-dtype float16 is not built for CPUs; use auto, bfloat16 or float32.")
        max_cpu_loras = self.max_cpu_loras or self.max_loras
        if max_cpu_loras < self.max_loras:
            raise ConfigError(f"--max-cpu-loras {max_cpu_loras} is less than --max-loras {self.max_loras}.")
        for root in self.lora_root:
            if not Path(root).expanduser().is_dir():
                raise ConfigError(f"--lora-root {root} is no folder.")
        return LoRAConfig(
            max_loras=self.max_loras,
            max_rank=self.max_lora_rank,
            max_cpu_loras=max_cpu_loras,
            dtype=dtype if self.lora_dtype == "auto" else self.lora_dtype,
            target_modules=list(self.lora_target_modules) or None,
            modules=[lora_module(text) for text in self.lora_modules],
            roots=[str(Path(root).expanduser().resolve()) for root in self.lora_root],
            may_update=self.enable_runtime_lora_updating or bool(os.environ.get("OCTAVO_ALLOW_RUNTIME_LORA_UPDATING")),
            download_dir=self.download_dir,
        )

    def _quantization(self, checkpoint: Checkpoint, device: str) -> str | None:
        """The method by which weights of floats are quantized as they are loaded; one of files has to be theirs."""
        wanted = self.quantization
        if wanted is None:
            return None
        found = checkpoint.format
        if found != "gguf":
            found = (checkpoint.config.get("quantization_config") or {}).get("quant_method") or found
        if wanted == found:
            return None
        if wanted in _FILE_METHODS and wanted not in _QUANTIZATIONS[device]:
            kind = "GGUF files" if wanted == "gguf" else f"checkpoints quantized with {wanted}"
            raise ConfigError(
                f"--quantization {wanted} is for {kind}, but {checkpoint.name} has {found} weights; leave it out to "
                "serve them as they are."
            )
        return wanted

    def _pooling(
        self, checkpoint: Checkpoint, description: ModelDescription, device: str
    ) -> tuple[PoolingConfig | None, Checkpoint]:
        """How the model pools, or None where it generates; and the checkpoint, with the tokens that judge by number."""
        from octavo.loading.sentence_transformers import read_sentence_transformer
        from octavo.models.pooling import TASKS, Wanted, pooling_config

        runner: str = self.runner
        convert: str | None = None if self.convert in ("auto", "none") else self.convert
        if self.task == "generate":
            runner = "generate"
        elif self.task != "auto":
            if self.task not in TASKS:
                raise ConfigError(f"--task must be auto, generate, {_listed(TASKS, 'or')}, got {self.task!r}.")
            runner, convert = "pooling", convert or TASKS[self.task]
        sentence = read_sentence_transformer(checkpoint.path) if os.path.isdir(checkpoint.path) else None
        if names := checkpoint.config.get("classifier_from_token"):
            from octavo.loading.tokenizer import read_tokenizer

            tokens = read_tokenizer(checkpoint.tokenizer_path).convert_tokens_to_ids(names)
            checkpoint = replace(checkpoint, config=checkpoint.config | {"classifier_from_token": tokens})
        overrides = {**(self.override_pooler_config or {}), **(self.pooler_config or {})}
        wanted = Wanted(runner, convert, overrides, self.enable_chunked_prefill)
        pooling = pooling_config(checkpoint, description, sentence, wanted)
        if pooling is not None and device != "cpu":
            raise ConfigError("models that pool are not built for GPUs yet; use --device cpu.")
        if pooling is not None and sentence is not None:
            pooling = replace(pooling, max_length=sentence.max_length)
        return pooling, checkpoint

    def _device(self) -> str:
        if self.device == "auto":
            return "cpu" if why_not_cuda() else "cuda"
        if self.device == "cuda" and (reason := why_not_cuda()):
            raise ConfigError(f"--device cuda: {reason}. Or use --device cpu.")
        return self.device

    def _check(self) -> str:
        """Refuse what cannot be honoured on the device that is chosen. Returns that."""
        self.check_flags()
        device = self._device()
        if self.max_model_len is not None and self.max_model_len <= 0 and self.max_model_len != AUTO_LENGTH:
            raise ConfigError(f"--max-model-len must be greater than 0, got {self.max_model_len}.")
        unknown = set(self.override_generation_config or {}) - {*_GENERATION_OVERRIDES}
        if unknown:
            raise ConfigError(
                f"--override-generation-config has {', '.join(sorted(unknown))}, which nothing reads; "
                f"{_listed(_GENERATION_OVERRIDES, 'and')} are read."
            )
        if self.target_step_time is not None:
            if not 0 <= self.target_step_time < math.inf:
                raise ConfigError(f"--target-step-time must be 0 or more milliseconds, got {self.target_step_time}.")
            if self.target_step_time > 0 and not self.enable_chunked_prefill:
                raise ConfigError("--target-step-time cuts prompts, which --no-enable-chunked-prefill forbids.")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"--max-logprobs must be between 0 and {MAX_LOGPROBS}, got {self.max_logprobs}.")
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name must not be empty.")
        if self.block_size not in (sizes := _BLOCK_SIZES[device]):
            raise ConfigError(f"--block-size must be {_listed(sizes, 'or')}{_on(device)}, got {self.block_size}.")
        for name in ("gpu_memory_utilization", "cpu_memory_utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be in (0, 1], got {getattr(self, name)}.")
        if not 0 <= self.swap_space < math.inf:
            raise ConfigError(f"--swap-space must be 0 or more GiB, got {self.swap_space}.")
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ConfigError("--preemption-mode swap needs --swap-space above 0.")
        if device != "cpu":
            for name in ("cpu_threads", "cpu_threads_bind", "cpu_memory_utilization"):
                if getattr(self, name) != getattr(EngineArgs, name):
                    raise ConfigError(
                        f"--{name.replace('_', '-')} is for CPUs, and the device is a GPU; leave it out, or add "
                        "--device cpu."
                    )
        if self.attention_backend != "auto" and device == "cpu":
            raise ConfigError(f"--attention-backend {self.attention_backend} is for GPUs, and the device is the CPU.")
        if _DTYPES.get(self.dtype, self.dtype) == "float16" and device == "cpu":
            raise ConfigError(f"--dtype {self.dtype} is not built for CPUs; use bfloat16 or float32.")
        methods = (*_QUANTIZATIONS[device], *_FILE_METHODS)
        if self.quantization not in (None, *methods):
            raise ConfigError(
                f"--quantization {self.quantization} is not built yet{_on(device)}; {_listed(methods, 'and')} are. "
                "Leave it out to serve the weights as they are."
            )
        if self.kv_cache_dtype not in ("auto", "float32", "float16", "bfloat16", *_CACHE_BYTES):
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype} is not built yet; {_listed(('auto', *_CACHE_BYTES), 'and')} "
                "are."
            )
        self._speculative()
        return device

    def _speculative(self) -> SpeculativeConfig | None:
        return parse(
            self.speculative_config,
            model=self.speculative_model,
            num_speculative_tokens=self.num_speculative_tokens,
            draft_tensor_parallel_size=self.speculative_draft_tensor_parallel_size,
            prompt_lookup_max=self.ngram_prompt_lookup_max,
            prompt_lookup_min=self.ngram_prompt_lookup_min,
        )

    def _draft(self, speculative: SpeculativeConfig | None, target: ModelConfig, device: str) -> ModelConfig | None:
        """The model or head that guesses, if one does: with its own checkpoint and quantization."""
        if speculative is None or speculative.method not in DRAFT_METHODS:
            return None
        method, longest = speculative.method, speculative.max_model_len or target.max_model_len
        if speculative.use_heterogeneous_vocab:
            raise ConfigError(
                "use_heterogeneous_vocab is not built yet: what guesses must have the model's vocabulary."
            )
        if speculative.kv_cache_dtype not in (None, "auto"):
            raise ConfigError("kv_cache_dtype of --speculative-config is not built yet: --kv-cache-dtype is for both.")
        if speculative.draft_tensor_parallel_size not in (None, 1):
            raise ConfigError(
                f"draft_tensor_parallel_size {speculative.draft_tensor_parallel_size} is not built yet: what guesses "
                "runs on one device."
            )
        if method == "mtp":
            if speculative.model is not None:
                raise ConfigError("mtp guesses with modules of the model's own checkpoint; leave its model out.")
            return replace(target, max_model_len=min(longest, target.max_model_len))
        if speculative.model is None:
            raise ConfigError(f'{method} needs a model that guesses: --speculative-config {{"model": ...}}.')
        if target.impl != "octavo" and method in HEAD_METHODS:
            raise ConfigError(f"{method} needs a model that Octavo computes itself, not through transformers.")
        checkpoint = resolve(
            speculative.model,
            load_format="dummy" if self.load_format == "dummy" else "auto",
            revision=speculative.revision,
            download_dir=self.download_dir,
        )
        own = replace(self, quantization=speculative.quantization)
        dtype, vocab_size, impl = target.dtype, target.vocab_size, target.impl
        if method not in HEAD_METHODS:
            from octavo.models.registry import describe

            description = describe(checkpoint.config, self.model_impl)
            dtype = own._dtype(checkpoint, device, is_encoder=False)
            vocab_size, impl = description.vocab_size, description.impl
            longest = min(longest, longest_context(checkpoint.config, description.max_position_embeddings))
        return ModelConfig(
            checkpoint=checkpoint,
            served_model_names=[checkpoint.name],
            dtype=dtype,
            max_model_len=min(longest, target.max_model_len),
            vocab_size=vocab_size,
            seed=self.seed,
            quantization=own._quantization(checkpoint, device),
            impl=impl,
        )

    def _cache_dtype(self, dtype: str, device: str) -> str:
        if self.kv_cache_dtype == "fp8" and device == "cpu":
            logger.info("--kv-cache-dtype fp8 is int8 on CPUs; fp8_e4m3 insists on floats")
            return "int8"
        return _CACHE_BYTES.get(self.kv_cache_dtype, dtype)

    def _code_folder(self, checkpoint: Checkpoint) -> str | None:
        """The folder whose Python code may be run."""
        if not self.trust_remote_code or "auto_map" not in checkpoint.config or self.model_impl == "octavo":
            return None
        logger.warning("--trust-remote-code: Python code of %s runs in this server", checkpoint.path)
        return checkpoint.path

    def _cpus(self) -> list[int] | None:
        """The processors of --cpu-threads-bind, in order."""
        if self.cpu_threads_bind is None:
            return None
        cpus: list[int] = []
        for part in self.cpu_threads_bind.split(","):
            match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
            if match is None:
                raise ConfigError(f"--cpu-threads-bind {self.cpu_threads_bind} is not a list of processors like 0-3,8.")
            cpus += range(int(match[1]), int(match[2] or match[1]) + 1)
        if not cpus or len(set(cpus)) < len(cpus):
            raise ConfigError(f"--cpu-threads-bind {self.cpu_threads_bind} must name each of its processors once.")
        if self.cpu_threads not in (None, len(cpus)):
            raise ConfigError(
                f"--cpu-threads {self.cpu_threads} and the {len(cpus)} processors of --cpu-threads-bind "
                f"{self.cpu_threads_bind} contradict each other; leave --cpu-threads out."
            )
        return cpus

    def _default_sampling_params(self, checkpoint: Checkpoint) -> dict[str, Any]:
        given = checkpoint.generation_config if self.generation_config == "auto" else self.override_generation_config
        given = given or {}
        return {name: given[name] for name in _SAMPLING_DEFAULTS if isinstance(given.get(name), int | float)}

    def _dtype(self, checkpoint: Checkpoint, device: str, is_encoder: bool) -> str:
        dtype = _DTYPES.get(self.dtype, str(self.dtype))
        if dtype == "auto":
            stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
            if stored is None and is_encoder:  # of a time when none were stored as anything else
                stored = "float32"
            kept = ("float32", "float16") if device == "cuda" else ("float32",)
            dtype = str(stored) if stored in kept else "bfloat16"
        if self.kv_cache_dtype not in ("auto", dtype, *_CACHE_BYTES):
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype} with --dtype {dtype}: floats of the cache must be the "
                f"model's; {_listed(_CACHE_BYTES, 'and')} go with any."
            )
        return dtype


def _listed(values: Iterable[object], conjunction: str) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} {conjunction} {last}"


def _on(device: str) -> str:
    return " on CPUs" if device == "cpu" else ""


@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` under the name that users of the async engine know, with what `AsyncLLMEngine` logs of requests."""

    enable_log_requests: bool = flag(False, "Log requests.", is_flag=False)
    disable_log_requests: bool = flag(True, "The opposite, by the older name.", is_flag=False)
    max_log_len: int | None = flag(None, "Characters of a prompt in the log; default: all.", is_flag=False)

    @property
    def logs_requests(self) -> bool:
        return self.enable_log_requests or not self.disable_log_requests


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, in which type, for sequences of which length."""

    checkpoint: Checkpoint
    served_model_names: list[str]
    dtype: str  # "float32", "bfloat16" or "float16", as torch has them
    max_model_len: int
    vocab_size: int
    seed: int | None
    quantization: str | None = None  # of weights of floats, as they are loaded: "int8", "int4" or "fp8"
    may_shorten: bool = False  # max_model_len, to what the KV cache holds
    chat_template: str | None = None  # a file, a template or a name of one, in the place of the model's own
    impl: str = "auto"  # "octavo" or "transformers": who computes it
    code_folder: str | None = None  # whose own Python code may be run
    default_sampling_params: dict[str, Any] = field(default_factory=dict)  # for fields that a request leaves out
    pooling: PoolingConfig | None = None  # of a model that pools; others generate
    max_logprobs: int = MAX_LOGPROBS  # of a position that a request may ask for

    @property
    def model(self) -> str:
        """What --model named."""
        return self.checkpoint.name


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How the KV cache is sized and shared."""

    block_size: int
    num_blocks_override: int | None
    cpu_memory_utilization: float
    gpu_memory_utilization: float
    swap_space_bytes: int
    enable_prefix_caching: bool
    dtype: str  # of the cache; the model's, int8 or an eight-bit float's
    is_scratch: bool = False  # nothing is kept from step to step: it holds the texts of a step, of one layer at a time


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of a step and the order of requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    policy: str
    preemption_mode: str
    check_invariants: bool = False
    target_step_s: float | None = None  # that a step may take while streams wait for it; None: auto, 0: any


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """An adapter of --lora-modules."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_module(text: str) -> LoRAModule:
    """`name=path`, or a JSON object. Raises `ConfigError`."""
    fields: dict[str, Any] = {}
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError:
            raise ConfigError(f"--lora-modules {text} is not JSON.") from None
    else:
        fields["name"], _, fields["path"] = text.partition("=")
    wanted = {"name", "path", "base_model_name"}
    if not fields.get("name") or not fields.get("path") or not set(fields) <= wanted:
        raise ConfigError(
            f'--lora-modules {text} must be name=path or {{"name": ..., "path": ..., "base_model_name": ...}}.'
        )
    if not all(isinstance(value, str) for value in fields.values() if value is not None):
        raise ConfigError(f"--lora-modules {text} must have texts for values.")
    return LoRAModule(**fields)


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Adapters: how many and how large, and where they may come from."""

    max_loras: int
    max_rank: int
    max_cpu_loras: int
    dtype: str
    target_modules: list[str] | None  # ends of modules' names; None: all
    modules: list[LoRAModule]
    roots: list[str]  # absolute
    may_update: bool  # clients may load and unload adapters
    download_dir: str | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that an engine core needs to start. Plain data: it crosses to the core's process as JSON."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: str  # "cpu" or "cuda"
    log_stats: bool
    enforce_eager: bool = False  # nothing is captured, call by call
    attention_backend: str = "auto"
    cpu_threads: int | None = None  # None: as many as fit
    cpus: list[int] | None = None  # one for each thread
    speculative: SpeculativeConfig | None = None
    draft: ModelConfig | None = None  # the model that guesses; its max_model_len is how far
    allow_additional_properties: bool = False  # in objects whose schema names properties and says nothing of others
    lora: LoRAConfig | None = None  # None: no adapters are served

    def with_max_model_len(self, length: int) -> EngineConfig:
        return replace(self, model=replace(self.model, max_model_len=length))
