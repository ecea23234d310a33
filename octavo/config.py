"""Every engine flag once (`EngineArgs`), and the checked, frozen groups that the engine is built from (`EngineConfig`).

Command lines, `LLM(...)` keywords and YAML files all fill `EngineArgs`; `create_engine_config` finds the model, fills
in what was left open and refuses what cannot be honoured. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from octavo.errors import ConfigError
from octavo.loading.checkpoint import Checkpoint, resolve

LoadFormat = Literal["auto", "safetensors", "gguf", "pt", "dummy"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["recompute", "swap"]

DEFAULT_MAX_BATCHED_TOKENS = 2048
# What a model's generation_config.json may say for requests that leave it out.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GIB = 1 << 30


def _flag(default: Any, help: str, *, positive: bool = False, built: bool = True) -> Any:
    """A field of `EngineArgs` with the text of its flag; `positive` numbers are checked to be greater than zero.

    Flags that are not `built` take only their default, which asks for nothing, so that launch scripts which spell it
    out work; any other value is refused.
    """
    metadata = {"help": help if built else f"{help} Not built yet: only {default!r} is accepted.", "positive": positive}
    metadata["built"] = built
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class EngineArgs:
    """What a user can set. Field `max_model_len` is flag `--max-model-len` and keyword `max_model_len` of `LLM`."""

    model: str = _flag("", "Hugging Face id, folder or .gguf file; empty is SmolLM2-135M-Instruct.")
    tokenizer: str | None = _flag(None, "Hugging Face id, folder or .gguf file of the tokenizer; default: the model's.")
    served_model_name: list[str] = _flag([], "Names that the API answers to; default: the model's.")
    revision: str | None = _flag(None, "Branch, tag or commit on the hub.")
    download_dir: str | None = _flag(None, "Where downloads are kept; default: the hub's own cache.")
    load_format: LoadFormat = _flag("auto", "Format of the weights; 'dummy' makes seeded random ones.")
    dtype: Dtype = _flag("auto", "Type of weights and activations; auto is bfloat16, or float32 for float32 models.")
    quantization: str | None = _flag(None, "Weight quantization; 'gguf' for GGUF files. Others are not built yet.")
    generation_config: Literal["auto", "none", "vllm"] = _flag(
        "auto", "Where sampling defaults come from: the model's generation_config, or ('none', 'vllm') Octavo's own."
    )
    kv_cache_dtype: str = _flag("auto", "Type of the KV cache; auto is the model's. FP8 is not built yet.")
    max_model_len: int | None = _flag(
        None, "Tokens of prompt and output together; default: the model's.", positive=True
    )
    gpu_memory_utilization: float = _flag(0.90, "Share of a GPU's memory for weights, activations and KV cache.")
    cpu_memory_utilization: float = _flag(0.30, "Share of the free RAM, after the weights, for the KV cache on CPU.")
    num_gpu_blocks_override: int | None = _flag(None, "KV blocks to allocate, whatever the memory.", positive=True)
    block_size: int = _flag(16, "Tokens in a KV block: 8, 16 or 32.")
    swap_space: float = _flag(4.0, "GiB of host memory for the blocks of swapped requests.")
    max_num_seqs: int = _flag(256, "Sequences in a step at most.", positive=True)
    max_num_batched_tokens: int | None = _flag(None, "Tokens in a step at most; default 2048.", positive=True)
    enable_chunked_prefill: bool = _flag(True, "Let a prompt be computed over several steps.")
    enable_prefix_caching: bool = _flag(True, "Reuse the blocks of prompts that start alike.")
    preemption_mode: PreemptionMode = _flag("recompute", "What happens to a request that must give its blocks back.")
    scheduling_policy: SchedulingPolicy = _flag("fcfs", "Who goes first: the first come, or the lowest priority value.")
    enforce_eager: bool = _flag(False, "Run the model call by call, without captured graphs.")
    seed: int | None = _flag(None, "Seed of requests that bring none, and of dummy weights; default: not repeatable.")
    trust_remote_code: bool = _flag(False, "Run Python code that comes with a model. Not built yet.")
    device: Device = _flag("auto", "Where the model runs.")
    disable_log_stats: bool = _flag(False, "Do not log throughput and cache use every few seconds.")
    check_invariants: bool = _flag(
        False, "Check the scheduler's and the cache's invariants after each step (debugging)."
    )
    tensor_parallel_size: int = _flag(1, "Devices that share each layer.", built=False)
    pipeline_parallel_size: int = _flag(1, "Devices that share the layers.", built=False)
    data_parallel_size: int = _flag(1, "Copies of the model.", built=False)
    distributed_executor_backend: str | None = _flag(None, "mp or ray.", built=False)
    speculative_model: str | None = _flag(None, "Draft model.", built=False)
    num_speculative_tokens: int | None = _flag(None, "Tokens that are drafted in a step.", built=False)
    speculative_draft_tensor_parallel_size: int | None = _flag(None, "Devices of the draft model.", built=False)
    speculative_config: str | None = _flag(None, "Speculative decoding as JSON.", built=False)
    enable_lora: bool = _flag(False, "Serve LoRA adapters.", built=False)
    lora_modules: list[str] = _flag([], "Adapters as name=path.", built=False)
    max_loras: int = _flag(1, "Adapters in a step.", built=False)
    max_lora_rank: int = _flag(16, "Largest rank of an adapter.", built=False)
    num_scheduler_steps: int = _flag(1, "Steps between two schedules.", built=False)
    limit_mm_per_prompt: str | None = _flag(None, "Images and the like in a prompt.", built=False)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field, with `--no-…` forms for booleans."""
        group = parser.add_argument_group("engine")
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            add_dataclass_flag(group, f, hints[f.name])

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The fields of `cls` out of parsed arguments."""
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls)})

    def create_engine_config(self) -> EngineConfig:
        """Find the model, settle the defaults and check every combination.

        Raises `ConfigError` for a flag that cannot be honoured, `LoadError` for a model that cannot be found or read.
        """
        self._check()
        # Imported here because it needs the groups below and most users of EngineArgs never get this far.
        from octavo.models.decoder_config import DecoderConfig

        checkpoint = resolve(
            self.model,
            load_format=self.load_format,
            revision=self.revision,
            download_dir=self.download_dir,
            tokenizer=self.tokenizer,
        )
        decoder = DecoderConfig.from_hf(checkpoint.config)
        if self.quantization not in (None, checkpoint.format if checkpoint.format == "gguf" else None):
            raise ConfigError(
                f"--quantization {self.quantization} is not built yet for {checkpoint.format} weights; leave it out to "
                "serve the weights in --dtype."
            )
        max_model_len = self.max_model_len or decoder.max_position_embeddings
        if max_model_len > decoder.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {max_model_len} is more than the model's {decoder.max_position_embeddings} positions."
            )
        budget = self.max_num_batched_tokens or max(
            DEFAULT_MAX_BATCHED_TOKENS, 0 if self.enable_chunked_prefill else max_model_len
        )
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"--max-num-batched-tokens {budget} is less than --max-model-len {max_model_len}: a prompt that long "
                "could never run. Raise it, or leave chunked prefill on."
            )
        return EngineConfig(
            model=ModelConfig(
                checkpoint=checkpoint,
                served_model_names=list(self.served_model_name) or [checkpoint.name],
                dtype=self._dtype(checkpoint),
                max_model_len=max_model_len,
                vocab_size=decoder.vocab_size,
                seed=self.seed,
                default_sampling_params=self._default_sampling_params(checkpoint),
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks_override=self.num_gpu_blocks_override,
                cpu_memory_utilization=self.cpu_memory_utilization,
                gpu_memory_utilization=self.gpu_memory_utilization,
                swap_space_bytes=int(self.swap_space * GIB),
                enable_prefix_caching=self.enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=min(self.max_num_seqs, budget),
                max_num_batched_tokens=budget,
                enable_chunked_prefill=self.enable_chunked_prefill,
                policy=self.scheduling_policy,
                preemption_mode=self.preemption_mode,
                check_invariants=self.check_invariants,
            ),
            device="cpu",
            log_stats=not self.disable_log_stats,
        )

    def _check(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            flag = "--" + f.name.replace("_", "-")
            choices = typing.get_args(typing.get_type_hints(type(self))[f.name])
            if choices and all(isinstance(c, str) for c in choices) and value not in choices:
                raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value!r}.")
            default = f.default if f.default is not dataclasses.MISSING else []
            if not f.metadata["built"] and value != default:
                raise ConfigError(f"{flag} {value} is not built yet; only its default, {default!r}, is accepted.")
            if f.metadata["positive"] and value is not None and value <= 0:
                raise ConfigError(f"{flag} must be greater than 0, got {value}.")
        if self.block_size not in (8, 16, 32):
            raise ConfigError(f"--block-size must be 8, 16 or 32, got {self.block_size}.")
        for name in ("gpu_memory_utilization", "cpu_memory_utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be in (0, 1], got {getattr(self, name)}.")
        if self.swap_space < 0:
            raise ConfigError(f"--swap-space must be 0 or more GiB, got {self.swap_space}.")
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ConfigError("--preemption-mode swap needs --swap-space above 0.")
        if self.device == "cuda":
            raise ConfigError("--device cuda is not built yet; use --device cpu.")
        if self.dtype == "float16":
            raise ConfigError("--dtype float16 is not built for CPUs; use bfloat16 or float32.")
        if self.kv_cache_dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"--kv-cache-dtype {self.kv_cache_dtype} is not built yet; use auto.")
        if self.kv_cache_dtype not in ("auto", self.dtype):
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype} with --dtype {self.dtype}: on CPUs both must be the same."
            )
        if self.trust_remote_code:
            raise ConfigError("--trust-remote-code is not built yet: Octavo runs no code from checkpoints.")

    def _default_sampling_params(self, checkpoint: Checkpoint) -> dict[str, Any]:
        if self.generation_config != "auto":
            return {}
        given = checkpoint.generation_config
        return {name: given[name] for name in _SAMPLING_DEFAULTS if isinstance(given.get(name), int | float)}

    def _dtype(self, checkpoint: Checkpoint) -> str:
        if self.dtype != "auto":
            return self.dtype
        stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        return "float32" if stored == "float32" else "bfloat16"


@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` under the name that users of the async engine know."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, in which type, for sequences of which length."""

    checkpoint: Checkpoint
    served_model_names: list[str]
    dtype: str  # "float32" or "bfloat16"
    max_model_len: int
    vocab_size: int
    seed: int | None
    default_sampling_params: dict[str, Any] = field(default_factory=dict)  # for fields that a request leaves out


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How the KV cache is sized and shared."""

    block_size: int
    num_blocks_override: int | None
    cpu_memory_utilization: float
    gpu_memory_utilization: float
    swap_space_bytes: int
    enable_prefix_caching: bool


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of a step and the order of requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    policy: str
    preemption_mode: str
    check_invariants: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that an engine core needs to start. Plain data: it crosses to the core's process as JSON."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: str
    log_stats: bool


def add_dataclass_flag(group: argparse._ArgumentGroup, f: dataclasses.Field[Any], hint: Any) -> None:
    """Add the flag of one dataclass field whose metadata has a `help`. `hint` is its resolved type."""
    flag = "--" + f.name.replace("_", "-")
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    options: dict[str, Any] = {"default": default, "dest": f.name, "help": f.metadata["help"].replace("%", "%%")}
    if isinstance(hint, types.UnionType):  # "X | None"
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(hint) is list:
        group.add_argument(flag, action="extend", nargs="+", **options)
    elif typing.get_origin(hint) is Literal:
        group.add_argument(flag, choices=typing.get_args(hint), **options)
    else:
        group.add_argument(flag, type=hint, metavar=hint.__name__.upper(), **options)
