"""The frozen groups of settings that an engine is built from. Plain data: nothing here reads a flag or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from octavo.loading.checkpoint import Checkpoint
from octavo.pooling_params import PoolingConfig
from octavo.sampling_params import MAX_LOGPROBS
from octavo.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from octavo.models.description import ModelDescription


class PoolerConfig(dict[str, Any]):
    """`pooler_config` as vLLM's scripts write it: `PoolerConfig(pooling_type="MEAN")`. The engine checks the fields."""

    def __init__(self, **fields: Any) -> None:
        super().__init__({name: value for name, value in fields.items() if value is not None})


class HfConfig(SimpleNamespace):
    """A configuration of `transformers` as attributes, those within it too, for programs that look at it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(
            **{
                name: HfConfig(value) if name.endswith("_config") and isinstance(value, Mapping) else value
                for name, value in settings.items()
            }
        )
        self._settings = settings

    def to_dict(self) -> dict[str, Any]:
        return dict(self._settings)

    def get_text_config(self) -> HfConfig:
        """That of the language model, where there is one apart."""
        found = getattr(self, "text_config", None)
        return found if isinstance(found, HfConfig) else self


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
    num_precise_layers: int = 0  # `ModelDescription.num_precise_layers`
    may_shorten: bool = False  # max_model_len, to what the KV cache holds
    chat_template: str | None = None  # a file, a template or a name of one, in the place of the model's own
    impl: str = "auto"  # "octavo" or "transformers": who computes it
    code_folder: str | None = None  # whose own Python code may be run
    default_sampling_params: dict[str, Any] = field(default_factory=dict)  # for fields that a request leaves out
    default_max_tokens: int | None = None  # for chats that leave it out; None: as many as fit
    pooling: PoolingConfig | None = None  # of a model that pools; others generate
    max_logprobs: int = MAX_LOGPROBS  # of a position that a request may ask for; -1: all

    @property
    def model(self) -> str:
        """What --model named."""
        return self.checkpoint.name

    @property
    def hf_config(self) -> HfConfig:
        """The settings of config.json, or what a GGUF file has in their place, as attributes."""
        return HfConfig(self.checkpoint.config)

    @property
    def hf_text_config(self) -> HfConfig:
        """Those of the language model, where config.json has them apart."""
        return self.hf_config.get_text_config()

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer's files are."""
        return self.checkpoint.tokenizer_path

    @property
    def served_model_name(self) -> str:
        return self.served_model_names[0]

    def get_vocab_size(self) -> int:
        return self.vocab_size


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
    memory_bytes: int | None = None  # of each device, in the place of a share
    is_scratch: bool = False  # nothing is kept from step to step: it holds the texts of a step, of one layer at a time
    # Blocks of the device and of the host, as vLLM calls them; None until the engine is ready.
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None

    @property
    def cache_dtype(self) -> str:
        return self.dtype


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
    starts_at_pictures: bool = False  # layers attend to pictures, to others from each picture's token on
    whole_pictures: bool = False  # the tokens of a picture see each other, so that a step computes all of them


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many workers and engines there are, as vLLM calls that: read off `EngineConfig`, which has it."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    data_parallel_rank: int
    data_parallel_size_local: int
    enable_expert_parallel: bool

    @property
    def world_size(self) -> int:
        """Workers of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def world_size_across_dp(self) -> int:
        return self.world_size * self.data_parallel_size


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """An adapter of --lora-modules."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Adapters: how many and how large, and where they may come from."""

    max_loras: int
    max_rank: int
    max_cpu_loras: int | None  # None: as many as the memory holds
    dtype: str
    target_modules: list[str] | None  # ends of modules' names; None: all
    modules: list[LoRAModule]
    roots: list[str]  # absolute
    may_update: bool  # clients may load and unload adapters
    download_dir: str | None = None
    memory_bytes: int | None = None  # of the device; None: of `max_loras` of the largest rank on all products
    takes_requests: bool = True  # callers name adapters; else a prompt's media choose among the model's own

    @property
    def max_lora_rank(self) -> int:
        return self.max_rank


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """Videos of a model that sees: what stands for them, and how many and how large."""

    token_id: int  # of the prompt, one for each row
    max_count: int  # of a prompt
    max_bytes: int  # of a file
    max_seconds: float
    max_pixels: int  # of all frames that are sampled
    num_frames: int  # that are sampled at most
    fps: float | None = None  # of a second at most; None: as many as these are
    positions_per_s: float = 1.0  # in time, where positions follow from seconds


@dataclass(frozen=True, slots=True)
class HeardConfig:
    """Sounds of a model that sees too: what stands for them, and how many and how large."""

    token_id: int  # of the prompt, one for each row
    max_count: int  # of a prompt
    max_bytes: int  # of a file


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Pictures or sounds: what stands for them, where their tower and processor are, and how many and how large."""

    kind: Literal["image", "audio", "video"]
    folder: str  # of the checkpoint
    token_id: int  # of the prompt, one for each row
    row_multiplier: float  # of the tower's rows, where a decoder multiplies whatever it is given
    max_count: int  # of a prompt
    max_bytes: int  # of a file
    max_pixels: int  # of a picture
    max_seconds: float  # of a sound
    cache_tokens: int
    video: VideoConfig | None = None  # None: no videos are taken
    audio: HeardConfig | None = None  # beside pictures; None: no sounds are taken there
    hidden_size: int = 0  # of a row of the tower
    num_parts: int = 1  # rows of a token: others are for early layers
    tile_rows: int = 0  # of one of a picture's tiles, which layers attend to; 0: rows stand in the place of tokens
    max_tiles: int = 0  # of a picture, of such a model
    has_grids: bool = False  # positions follow from those of pictures
    takes_embeddings: bool = False  # rows in the place of pictures
    kept_bytes: int = 1 << 30  # of media that are kept for later requests
    frames_prompts: bool = False  # marks behind the last picture and at the end of a prompt of text
    counts_pictures: bool = False  # a picture alone in its prompt is processed in another way than one of several
    longest_s: float | None = None  # what the model hears of a sound; None: all
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders: of a kind's prompts, the first that has media
    allowed_folder: str | None = None  # of file: URLs, without links in it; None: none are
    allowed_domains: list[str] = field(default_factory=list)  # in lower case; none: all are
    allows_private: bool = False  # addresses that are not of the public internet
    fetch_timeout_s: float = 10.0
    max_redirects: int = 3


@dataclass(frozen=True, slots=True)
class PromptEmbedsConfig:
    """Embeddings in the place of a prompt's tokens."""

    hidden_size: int
    max_rows: int
    multiplier: float  # of the rows, to make what the model's own embedding makes of tokens
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class SoundConfig:
    """Speech to write down: where its encoder and feature extractor are, and how much of it is taken."""

    folder: str  # of the checkpoint
    num_rows: int  # of the encoder's output
    max_bytes: int  # of a sound's file
    max_seconds: float
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """Hosts that share the stages, and which of them this is."""

    size: int = 1
    rank: int = 0
    master_addr: str = "127.0.0.1"  # of node 0, where the others join; empty: that which Ray has of it
    master_port: int = 29501
    ray_flags: dict[str, Any] | None = None  # `EngineArgs` of the other nodes, which Ray starts; None: by hand
    have_been_complete: bool = False  # so that one which is missing now is waited for


@dataclass(frozen=True, slots=True)
class EngineHostsConfig:
    """Hosts that engines are shared out among, and which engines are this one's."""

    num_local: int
    start_rank: int  # of its first engine; 0 on the host of the server, if there is one server
    address: str  # of that host, where the others join; empty: that which Ray has of it
    port: int
    ray_flags: dict[str, Any] | None = None  # `EngineArgs` of the other hosts, which Ray starts; None: by hand
    have_servers: bool = False  # each host one of its own, which no other joins


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
    tensor_parallel_size: int = 1  # workers that share each layer
    enable_expert_parallel: bool = False  # of which each has whole experts
    reproducible_parallel: bool | None = None  # bits are those of any number of them; None: where they can be
    pipeline_parallel_size: int = 1  # stages that share the layers out, of so many workers each
    pipeline_layer_partition: list[int] | None = None  # layers of each stage
    nodes: NodesConfig = NodesConfig()
    data_parallel_size: int = 1  # engines, of one server or several
    data_parallel_rank: int = 0  # of this one
    engine_hosts: EngineHostsConfig | None = None  # None: all of them are here
    cpu_threads: int | None = None  # None: as many as fit
    cpus: list[int] | None = None  # one for each thread
    speculative: SpeculativeConfig | None = None
    draft: ModelConfig | None = None  # the draft model; it drafts for sequences up to its max_model_len
    disable_additional_properties: bool = False  # where a schema names properties and says nothing of others
    lora: LoRAConfig | None = None  # None: no adapters are served
    media: MediaConfig | None = None  # None: neither pictures nor sounds are taken
    sound: SoundConfig | None = None  # None: it writes down no speech
    prompt_embeds: PromptEmbedsConfig | None = None  # None: prompts are tokens

    @property
    def num_slots(self) -> int:
        """Requests that run at once at most, in all engines of the server."""
        return self.scheduler.max_num_seqs * len(self.served_ranks)

    @property
    def model_config(self) -> ModelConfig:
        return self.model

    @property
    def cache_config(self) -> CacheConfig:
        return self.cache

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.scheduler

    @property
    def parallel_config(self) -> ParallelConfig:
        return ParallelConfig(
            self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size, self.data_parallel_rank,
            len(self.local_ranks), self.enable_expert_parallel,
        )  # fmt: skip

    @property
    def lora_config(self) -> LoRAConfig | None:
        return self.lora

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What requests may want, as vLLM calls that."""
        if self.model.pooling is not None:
            return self.model.pooling.tasks
        return ("generate",) if self.sound is None else ("generate", "transcription")

    @property
    def speculative_config(self) -> SpeculativeConfig | None:
        return self.speculative

    def stages(self, description: ModelDescription) -> list[range]:
        """The layers of each stage. Raises `ConfigError`."""
        from octavo.models.sharding import stage_layers

        return stage_layers(description, self.pipeline_parallel_size, self.pipeline_layer_partition)

    @property
    def local_ranks(self) -> range:
        """The engines that are on this host."""
        if self.engine_hosts is None:
            return range(self.data_parallel_size)
        first = self.engine_hosts.start_rank
        return range(first, first + self.engine_hosts.num_local)

    @property
    def place(self) -> int:
        """Of this engine among those of its host."""
        return self.data_parallel_rank - self.local_ranks.start

    @property
    def served_ranks(self) -> range:
        """The engines behind the server: all of them, or those of this host where each has a server of its own."""
        hosts = self.engine_hosts
        return self.local_ranks if hosts is not None and hosts.have_servers else range(self.data_parallel_size)

    def replica(self, rank: int) -> EngineConfig:
        """That of one of the engines of a host, with its share of the memory; GPUs are each one's own."""
        size, cache = len(self.local_ranks), self.cache
        num_bytes = cache.memory_bytes
        own = replace(
            cache,
            cpu_memory_utilization=cache.cpu_memory_utilization / size,
            memory_bytes=num_bytes if num_bytes is None or self.device != "cpu" else num_bytes // size,
            swap_space_bytes=cache.swap_space_bytes // size,
        )
        return replace(self, data_parallel_rank=rank, cache=own)

    def when_ready(self, max_model_len: int, num_blocks: int, num_host_blocks: int) -> EngineConfig:
        """With what the core has found."""
        cache = replace(self.cache, num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks)
        nodes = replace(self.nodes, have_been_complete=True)
        return replace(self.with_max_model_len(max_model_len), cache=cache, nodes=nodes)

    def with_max_model_len(self, length: int) -> EngineConfig:
        return replace(self, model=replace(self.model, max_model_len=length))
