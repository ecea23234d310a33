"""The frozen groups of settings that an engine is built from. Plain data: nothing here reads a flag or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
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
    """A configuration of `transformers` as attributes, for programs that read it. Nested configurations are attributes
    too."""

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
        """Return the language model's own configuration if there is one, otherwise this configuration."""
        found = getattr(self, "text_config", None)
        return found if isinstance(found, HfConfig) else self


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, the type of its activations, and its longest sequence."""

    checkpoint: Checkpoint
    served_model_names: list[str]
    dtype: str  # "float32", "bfloat16" or "float16", torch's names
    max_model_len: int
    vocab_size: int
    seed: int | None
    quantization: str | None = None  # how to quantize float weights while loading: "int8", "int4" or "fp8"
    num_precise_layers: int = 0  # `ModelDescription.num_precise_layers`
    may_shorten: bool = False  # max_model_len may be lowered to the size of the KV cache
    chat_template: str | None = None  # a file, a template or a template's name; None: the model's
    impl: str = "auto"  # "octavo" or "transformers": the code that computes the model
    code_folder: str | None = None  # folder whose Python code may run
    default_sampling_params: dict[str, Any] = field(default_factory=dict)  # for fields that a request leaves out
    default_max_tokens: int | None = None  # for chats that do not say max_tokens; None: as many as fit
    pooling: PoolingConfig | None = None  # None: the model generates
    max_logprobs: int = MAX_LOGPROBS  # a request may ask for so many a position; -1: all

    @property
    def model(self) -> str:
        """Return the value of --model."""
        return self.checkpoint.name

    @property
    def hf_config(self) -> HfConfig:
        """Return the settings of config.json, or their counterparts in a GGUF file, as attributes."""
        return HfConfig(self.checkpoint.config)

    @property
    def hf_text_config(self) -> HfConfig:
        """Return the language model's settings if config.json has them apart, otherwise all settings."""
        return self.hf_config.get_text_config()

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    @property
    def tokenizer(self) -> str:
        """Return the path of the tokenizer's files."""
        return self.checkpoint.tokenizer_path

    @property
    def served_model_name(self) -> str:
        return self.served_model_names[0]

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class DiskCacheConfig:
    """The folder of the cached blocks that outlive the engine."""

    folder: str
    limit_bytes: int  # of all its files


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """How events of the prefix cache are published, under vLLM's names. Each engine adds its rank to the ports."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"  # bound if it has a *, or connected to
    replay_endpoint: str | None = None  # where subscribers ask for messages that they have missed
    buffer_steps: int = 10_000  # messages kept for this
    # Messages that wait for a slow subscriber, at most: the smaller of both. Later ones are dropped for it.
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How the KV cache is sized and shared."""

    block_size: int
    num_blocks_override: int | None
    cpu_memory_utilization: float
    gpu_memory_utilization: float
    swap_space_bytes: int
    enable_prefix_caching: bool
    dtype: str  # the model's type, int8 or an eight-bit float
    memory_bytes: int | None = None  # on each device; replaces the share of memory
    host_bytes: int = 0  # of host memory, of all workers together, for blocks that leave GPUs
    disk: DiskCacheConfig | None = None  # None: blocks are in memory only
    events: KVEventsConfig | None = None  # None: no events are published
    is_scratch: bool = False  # no KV is kept between steps; the cache holds one step, one layer at a time
    # Blocks on the device and on the host, by vLLM's names; None until the engine is ready.
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None

    cache_dtype = property(attrgetter("dtype"))  # vLLM's name


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of a step and the order of requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    policy: str
    preemption_mode: str
    check_invariants: bool = False
    target_step_s: float | None = None  # longest step while streams wait; None: auto, 0: no bound
    starts_at_images: bool = False  # layers attend to images, to each from its token on
    whole_images: bool = False  # tokens of an image see each other: one step computes them all
    stream_interval: int = 1  # least tokens in an output; the first and the last may have fewer


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The numbers of workers and engines, under vLLM's names. `EngineConfig.parallel_config` makes it."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    data_parallel_rank: int
    data_parallel_size_local: int
    enable_expert_parallel: bool

    @property
    def world_size(self) -> int:
        """Return the number of workers of an engine."""
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
    memory_bytes: int | None = None  # on the device; None: enough for `max_loras` of the largest rank
    takes_requests: bool = True  # callers name adapters; False: a prompt's media choose the model's own

    max_lora_rank = property(attrgetter("max_rank"))  # vLLM's name


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """Videos of a model that sees: their token in a prompt, and their bounds in number and size."""

    token_id: int  # of the prompt, one for each row
    max_count: int  # of a prompt
    max_bytes: int  # of a file
    max_seconds: float
    max_pixels: int  # of all sampled frames together
    num_frames: int  # sampled at most
    fps: float | None = None  # frames sampled a second at most; None: up to num_frames
    positions_per_s: float = 1.0  # for models whose positions follow from seconds


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Media of a model: their token in a prompt, the folder of their tower and processor, and their bounds in number
    and size."""

    kind: Literal["image", "audio", "video"]
    folder: str  # of the checkpoint
    token_id: int  # of the prompt, one for each row
    row_multiplier: float  # for the tower's rows, if the model scales its embeddings
    max_count: int  # of a prompt
    max_bytes: int  # of a file
    max_pixels: int  # of a picture
    max_seconds: float  # of a sound
    cache_tokens: int
    video: VideoConfig | None = None  # None: no videos
    hidden_size: int = 0  # of a row of the tower
    num_parts: int = 1  # rows of each token: the first is its embedding, others are for early layers
    tile_rows: int = 0  # rows of a tile of a picture that layers attend to; 0: rows replace tokens
    max_tiles: int = 0  # of a picture, if tile_rows > 0
    has_grids: bool = False  # positions follow from the grids of media
    takes_embeddings: bool = False  # requests may bring rows in place of media
    kept_bytes: int = 1 << 30  # size of the cache of media for later requests
    frames_prompts: bool = False  # the processor adds marks behind the last picture and at the end of a text
    counts_pictures: bool = False  # a prompt's only picture is processed differently than one of several
    longest_s: float | None = None  # longest sound that the model hears; None: any
    adapter: str | None = None  # folder of the adapter that the model brings for prompts with media
    allowed_folder: str | None = None  # for file: URLs, links resolved; None: no file: URLs
    allowed_domains: list[str] = field(default_factory=list)  # lower case; empty: all domains
    allows_private: bool = False  # addresses beyond the public internet
    fetch_timeout_s: float = 10.0
    max_redirects: int = 3


@dataclass(frozen=True, slots=True)
class PromptEmbedsConfig:
    """Embeddings in place of a prompt's tokens."""

    hidden_size: int
    max_rows: int
    multiplier: float  # scales rows to the output of the model's own embedding
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class SoundConfig:
    """Speech for a model that transcribes: the folder of its encoder and feature extractor, and the bounds of a
    sound."""

    folder: str  # of the checkpoint
    num_rows: int  # of the encoder's output
    max_bytes: int  # of a sound's file
    max_seconds: float
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """Hosts that share the stages of a pipeline, and the number of this host."""

    size: int = 1
    rank: int = 0
    master_addr: str = "127.0.0.1"  # of node 0, where the others join; empty: its address in Ray
    master_port: int = 29501
    ray_flags: dict[str, Any] | None = None  # `EngineArgs` of nodes that Ray starts; None: started by hand
    have_been_complete: bool = False  # all nodes were there once: a missing node is waited for


@dataclass(frozen=True, slots=True)
class EngineHostsConfig:
    """Hosts that the engines are spread over, and the engines of this host."""

    num_local: int
    start_rank: int  # number of this host's first engine; 0 on the host of a shared server
    address: str  # of the host with the server, where the others join; empty: its address in Ray
    port: int
    ray_flags: dict[str, Any] | None = None  # `EngineArgs` of hosts that Ray starts; None: started by hand
    have_servers: bool = False  # each host has a server of its own, which no other host joins


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an engine core needs to start. Plain data: it goes to the core's process as JSON."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: str  # "cpu" or "cuda"
    log_stats: bool
    enforce_eager: bool = False  # no captured graphs
    tensor_parallel_size: int = 1  # workers that share each layer
    enable_expert_parallel: bool = False  # each worker has whole experts
    reproducible_parallel: bool | None = None  # same bits for any number of workers; None: if possible
    pipeline_parallel_size: int = 1  # stages that split the layers, each with tensor_parallel_size workers
    pipeline_layer_partition: list[int] | None = None  # layers of each stage
    nodes: NodesConfig = NodesConfig()
    data_parallel_size: int = 1  # engines, behind one server or several
    data_parallel_rank: int = 0  # number of this engine
    engine_hosts: EngineHostsConfig | None = None  # None: all engines are on this host
    cpu_threads: int | None = None  # None: as many as fit
    cpus: list[int] | None = None  # a processor for each thread
    speculative: SpeculativeConfig | None = None
    draft: ModelConfig | None = None  # the draft model; it drafts for sequences up to its max_model_len
    disable_additional_properties: bool = False  # for schemas that do not mention additional properties
    lora: LoRAConfig | None = None  # None: no adapters are served
    media: MediaConfig | None = None  # None: neither pictures nor sounds are taken
    sound: SoundConfig | None = None  # None: the model does not transcribe
    prompt_embeds: PromptEmbedsConfig | None = None  # None: prompts are tokens

    @property
    def num_slots(self) -> int:
        """Return the most requests that run at once, in all engines of the server."""
        return self.scheduler.max_num_seqs * len(self.served_ranks)

    # vLLM's names of the groups.
    model_config = property(attrgetter("model"))
    cache_config = property(attrgetter("cache"))
    scheduler_config = property(attrgetter("scheduler"))
    lora_config = property(attrgetter("lora"))
    speculative_config = property(attrgetter("speculative"))
    kv_events_config = property(attrgetter("cache.events"))

    @property
    def parallel_config(self) -> ParallelConfig:
        return ParallelConfig(
            self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size, self.data_parallel_rank,
            len(self.local_ranks), self.enable_expert_parallel,
        )  # fmt: skip

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that requests may ask for, by vLLM's names."""
        if self.model.pooling is not None:
            return self.model.pooling.tasks
        return ("generate",) if self.sound is None else ("generate", "transcription")

    def stages(self, description: ModelDescription) -> list[range]:
        """Return the layers of each stage. Raises `ConfigError`."""
        from octavo.models.sharding import stage_layers

        return stage_layers(description, self.pipeline_parallel_size, self.pipeline_layer_partition)

    @property
    def local_ranks(self) -> range:
        """Return the numbers of this host's engines."""
        if self.engine_hosts is None:
            return range(self.data_parallel_size)
        first = self.engine_hosts.start_rank
        return range(first, first + self.engine_hosts.num_local)

    @property
    def place(self) -> int:
        """Return this engine's index among its host's engines."""
        return self.data_parallel_rank - self.local_ranks.start

    @property
    def served_ranks(self) -> range:
        """Return the numbers of the engines behind the server: all, or this host's if each host has a server of its
        own."""
        hosts = self.engine_hosts
        return self.local_ranks if hosts is not None and hosts.have_servers else range(self.data_parallel_size)

    def replica(self, rank: int) -> EngineConfig:
        """Return the configuration of this host's engine `rank`, with its share of the host's memory. GPU memory is not
        shared: each engine has GPUs of its own."""
        size, cache = len(self.local_ranks), self.cache
        num_bytes = cache.memory_bytes
        own = replace(
            cache,
            cpu_memory_utilization=cache.cpu_memory_utilization / size,
            memory_bytes=num_bytes if num_bytes is None or self.device != "cpu" else num_bytes // size,
            swap_space_bytes=cache.swap_space_bytes // size,
            host_bytes=cache.host_bytes // size,
        )
        return replace(self, data_parallel_rank=rank, cache=own)

    def when_ready(self, max_model_len: int, num_blocks: int, num_host_blocks: int) -> EngineConfig:
        """Return the configuration with the sizes that the core has found."""
        cache = replace(self.cache, num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks)
        nodes = replace(self.nodes, have_been_complete=True)
        return replace(self.with_max_model_len(max_model_len), cache=cache, nodes=nodes)

    def with_max_model_len(self, length: int) -> EngineConfig:
        return replace(self, model=replace(self.model, max_model_len=length))
