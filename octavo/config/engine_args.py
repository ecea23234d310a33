"""Every engine flag once: command lines, `LLM(...)` keywords and YAML files all fill `EngineArgs`. The modules
`*_flags` only check flags, and make parts of the `EngineConfig`."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, cast

from octavo.config.engine_config import EngineConfig
from octavo.errors import ConfigError
from octavo.flags import Flags, flag, number_with_unit
from octavo.sampling_params import MAX_LOGPROBS

LoadFormat = Literal["auto", "safetensors", "gguf", "pt", "dummy"]
Dtype = Literal["auto", "float32", "float16", "bfloat16", "half", "float"]
Device = Literal["auto", "cpu", "cuda"]
AttentionBackend = Literal["auto", "triton"]
SchedulingPolicy = Literal["fcfs", "priority", "deadline", "fair"]
PreemptionMode = Literal["recompute", "swap"]

AUTO_LENGTH = -1  # --max-model-len auto


def num_tokens(text: str) -> int:
    """Parse the value of --max-model-len. Raises `ValueError`."""
    return AUTO_LENGTH if text == "auto" else number_with_unit(text, "auto or ")


def milliseconds(text: str) -> float | None:
    """Parse the value of --target-step-time. Raises `ValueError`."""
    try:
        return None if text == "auto" else float(text)
    except ValueError:
        raise ValueError(f"must be auto or a number of milliseconds, got {text!r}") from None


@dataclass(kw_only=True)
class EngineArgs(Flags):
    """Every flag of the engine. Field `max_model_len` is flag `--max-model-len` and keyword `max_model_len` of
    `LLM`."""

    model: str = flag("", "Hugging Face id, folder or .gguf file; empty is SmolLM2-135M-Instruct.")
    tokenizer: str | None = flag(None, "Hugging Face id, folder or .gguf file of the tokenizer; default: the model's.")
    served_model_name: list[str] = flag([], "Names that the API answers to; default: the model's.")
    tokenizer_mode: Literal["auto", "hf", "slow", "mistral"] = flag(
        "auto", "How the tokenizer is read: auto and hf read its fast form; slow and mistral are not built."
    )
    revision: str | None = flag(None, "Branch, tag or commit on the hub.")
    download_dir: str | None = flag(None, "Folder of downloads; default: the hub's own cache.")
    runner: Literal["auto", "generate", "pooling"] = flag(
        "auto", "generate: the model generates tokens. pooling: it pools its hidden states into vectors (embeddings, "
        "classes, scores). auto: as its architecture or its sentence-transformers folder says.",
    )  # fmt: skip
    convert: Literal["auto", "none", "embed", "classify"] = flag(
        "auto", "What a decoder that pools returns: embeddings, or the classes of its classifier."
    )
    task: str = flag(
        "auto", "As older launch scripts say it: 'generate', or 'embed', 'classify', 'score', 'reward' for models that "
        "pool.",
    )  # fmt: skip
    pooler_config: dict[str, Any] | None = flag(
        None, "How the model pools, as JSON, instead of as its files say: pooling_type (CLS, LAST, MEAN, MAX, "
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
        None, "'int8', 'int4' and, on GPUs, 'fp8' quantize float weights while they load. 'gguf', 'gptq', 'awq', "
        "'compressed-tensors' and other methods of files refuse files of another method; such files need no flag. "
        "Default: as the model's files have them.", short="-q",
    )  # fmt: skip
    precise_layers: int | None = flag(
        None, "Number of layers, from the first one, that multiply quantized weights (except gate and up) with "
        "inputs of sixteen bits instead of eight, on CPUs. Answers are closer to those of float32; prompts take half "
        "as long again in such a layer. Default: one of 10.",
    )  # fmt: skip
    generation_config: Literal["auto", "none", "vllm"] = flag(
        "auto", "Where sampling defaults come from: the model's generation_config, or ('none', 'vllm') Octavo's own."
    )
    override_generation_config: dict[str, Any] | None = flag(
        None, "Sampling defaults and eos_token_id instead of the model's, as JSON or as "
        "--override-generation-config.temperature 0.5.",
    )  # fmt: skip
    hf_overrides: dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] | None = flag(
        None, "Settings instead of config.json's, as JSON or as --hf-overrides.rope_parameters.factor 2. In Python "
        "also a function that takes and returns all settings.", may_be_function=True,
    )  # fmt: skip
    kv_cache_dtype: str = flag(
        "auto", "Type of the KV cache: auto is the model's. int8, fp8_e4m3 and fp8_e5m2 take half the memory of "
        "bfloat16 and store a scale for each token and head. fp8 means fp8_e4m3 on GPUs and int8, which is more "
        "exact, on CPUs.",
    )  # fmt: skip
    calculate_kv_scales: bool = flag(
        False, "Accepted without effect: a KV cache of eight bits always computes its scales from the tokens."
    )
    max_model_len: int | None = flag(
        None, "Tokens of prompt and output together: a number, 32k (32,000), 32K (32,768), or 'auto' (or -1): the "
        "model's length, or as many tokens as the cache holds if that is less; default: the model's length.",
        parse=num_tokens,
    )  # fmt: skip
    gpu_memory_utilization: float = flag(0.90, "Share of a GPU's memory for weights, activations and KV cache.")
    cpu_memory_utilization: float = flag(0.30, "Share of the free RAM, after the weights, for the KV cache on CPU.")
    kv_cache_memory_bytes: int | None = flag(
        None, "Bytes of each device's KV cache, instead of a share of its memory: a number, 4g (4e9) or 4G (2 ** 32).",
        positive=True, parse=number_with_unit,
    )  # fmt: skip
    num_gpu_blocks_override: int | None = flag(None, "KV blocks to allocate, whatever the memory.", positive=True)
    block_size: int = flag(16, "Tokens in a KV block: 8, 16 or 32; on GPUs up to 256.")
    swap_space: float = flag(4.0, "GiB of host memory for swapped requests, with --preemption-mode swap.")
    kv_cache_host_gib: float = flag(
        0.0, "GiB of host memory, of all workers together, for copies of the KV cache's blocks, on GPUs: prompts that "
        "begin like earlier ones get them back when the GPU has no room for them any more.",
    )  # fmt: skip
    kv_cache_disk: str | None = flag(
        None, "Folder that keeps blocks of the KV cache, also after a restart; on GPUs it needs "
        "--kv-cache-host-gib. Prompts that begin like earlier ones are read from it if reading is faster than "
        "computing.",
    )  # fmt: skip
    kv_cache_disk_gib: float = flag(16.0, "GiB that --kv-cache-disk may take; the blocks used longest ago go first.")
    kv_events_config: dict[str, Any] | None = flag(
        None, "Tells routers which blocks the prefix cache has, over ZeroMQ in vLLM's format. JSON: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": '
        '"kv-events"}. Default: off.',
    )  # fmt: skip
    max_num_seqs: int = flag(256, "The most sequences in a step.", positive=True)
    max_num_batched_tokens: int | None = flag(None, "The most tokens in a step; default: 2048.", positive=True)
    enable_chunked_prefill: bool = flag(True, "Let a prompt be computed over several steps.")
    enable_prefix_caching: bool = flag(True, "Reuse the blocks of prompts that start alike.")
    stream_interval: int = flag(
        1, "The fewest tokens in an event of a stream, except its first and its last.", positive=True
    )
    preemption_mode: PreemptionMode = flag(
        "recompute", "What happens to a request that must give its blocks back: its tokens are computed again, or "
        "its blocks are swapped to host memory.",
    )  # fmt: skip
    scheduling_policy: SchedulingPolicy = flag(
        "fair", "Order of waiting requests. fair: clients take turns; a client is an address, with its --api-key. "
        "fcfs: by arrival. priority: the lowest value first. deadline: the first token that is due first.",
    )  # fmt: skip
    target_step_time: float | None = flag(
        None, "Milliseconds that a step may take during a stream; prompts are cut to fit. 'auto' is 90, or more if "
        "the streams alone take long; with 0 only tokens bound a step. Default: auto.",
        parse=milliseconds,
    )  # fmt: skip
    enforce_eager: bool = flag(False, "Run the model call by call, without captured graphs.")
    async_scheduling: bool | None = flag(
        None, "Schedule a step while the one before is computed. GPUs always do and CPUs never do; the other value "
        "is refused.",
    )  # fmt: skip
    optimization_level: int = flag(
        2, "vLLM's choice between a fast start and compiled code. Nothing is compiled at start here.", built=False,
        short="-O",
    )  # fmt: skip
    compilation_config: dict[str, Any] | None = flag(None, "How vLLM compiles, as JSON.", built=False)
    seed: int | None = flag(None, "Seed of requests without one, and of dummy weights; default: not repeatable.")
    chat_template: str | None = flag(
        None, "File with a Jinja chat template, the template, or the name of one of the model's; default: the model's."
    )
    model_impl: Literal["auto", "octavo", "transformers"] = flag(
        "auto", "Who computes the model: Octavo, or the modules of transformers; auto is Octavo if it has the "
        "architecture.",
    )  # fmt: skip
    trust_remote_code: bool = flag(
        False, "Run Python code that comes with a model. Only models that transformers computes, and tokenizers "
        "without a tokenizer.json, ever run any.",
    )  # fmt: skip
    disable_additional_properties: bool = flag(
        False, "Structured outputs: if a JSON schema names an object's properties and does not mention others, allow "
        "no others. Without the flag others are allowed, as JSON Schema says.",
    )  # fmt: skip
    device: Device = flag("auto", "Where the model runs; auto takes a CUDA device if there is one.")
    attention_backend: AttentionBackend = flag("auto", "Attention on GPUs: Octavo's kernel in Triton is the only one.")
    cpu_threads: int | None = flag(
        None, "Threads that compute on a CPU; default: all physical cores within affinity and quota.", positive=True
    )
    cpu_threads_bind: str | None = flag(
        None, "Processors for the threads, one for each thread, as 0-3,8; default: any, or on several NUMA nodes one "
        "for each thread.",
    )  # fmt: skip
    max_logprobs: int = flag(
        MAX_LOGPROBS, "The most log-probabilities of a position that a request may ask for; -1: the whole vocabulary."
    )
    logprobs_mode: str = flag(
        "raw_logprobs", "What log-probabilities are of: the model's own logits, before penalties and temperature.",
        built=False,
    )  # fmt: skip
    enable_sleep_mode: bool = flag(
        False, "Accepted without effect: memory can always be freed while nothing runs, by LLM.sleep, or by /sleep "
        "of servers in dev mode.",
    )  # fmt: skip
    disable_log_stats: bool = flag(False, "Do not log throughput and cache use every few seconds.")
    check_invariants: bool = flag(
        False, "Check the scheduler's and the cache's invariants after each step (debugging)."
    )
    speculative_config: dict[str, Any] | None = flag(
        None, 'How draft tokens are made, as JSON; the model verifies several of them in a step. {"method": "ngram"} '
        'looks them up in the prompt, {"method": "suffix"} in recent answers too, and {"model": "…"} computes them '
        "with a smaller model. Answers do not change. Default: ngram on CPUs while at most four sequences run, in "
        'steps where it pays; {"method": "none"} turns it off.',
    )  # fmt: skip
    speculative_model: str | None = flag(None, "Older flag for --speculative-config: [ngram], or a draft model.")
    num_speculative_tokens: int | None = flag(None, "The most draft tokens of a sequence in a step.")
    speculative_draft_tensor_parallel_size: int | None = flag(
        None, "Workers of the draft model; only 1 is accepted.", positive=True
    )
    ngram_prompt_lookup_max: int | None = flag(None, "The most tokens that [ngram] compares; default: 5.")
    ngram_prompt_lookup_min: int | None = flag(
        None, "The fewest tokens that must match for a draft by [ngram]; default: 5."
    )
    tensor_parallel_size: int = flag(
        1, "Workers (processes) that share each layer. On CPUs they divide the processors or --cpu-threads; on GPUs "
        "each has a GPU of its own.", short="-tp", positive=True,
    )  # fmt: skip
    enable_expert_parallel: bool = flag(
        False, "Give each worker of --tensor-parallel-size whole experts instead of a part of each."
    )
    reproducible_parallel: bool | None = flag(
        None, "Give the same answers, to the bit, for any --tensor-parallel-size, or refuse to start; --no-… turns "
        "this off. Default: on where possible.",
    )  # fmt: skip
    pipeline_parallel_size: int = flag(
        1, "Stages that divide the layers; each stage has --tensor-parallel-size workers. As many steps as stages "
        "run at once, of different requests.", short="-pp", positive=True,
    )  # fmt: skip
    pipeline_layer_partition: str | None = flag(
        None, "Number of layers of each stage, such as 10,12,8; default: equal parts."
    )
    nnodes: int = flag(
        1, "Hosts that divide the stages of --pipeline-parallel-size equally. Run the same command on each host, "
        "with its own --node-rank.", positive=True,
    )  # fmt: skip
    node_rank: int = flag(0, "Number of this host: node 0 serves, the others are --headless.")
    master_addr: str = flag(
        "127.0.0.1", "Address of node 0, which the other nodes connect to. Connections from other hosts need a "
        "secret, OCTAVO_NODES_TOKEN.",
    )  # fmt: skip
    master_port: int = flag(29501, "Port of node 0 for the other nodes.")
    data_parallel_size: int = flag(
        1, "Engines behind one server, each with its own model and cache; they divide the processors and the memory "
        "for caches. A request goes to the engine that has most of its prompt cached, unless that engine has more to "
        "do.", short="-dp", positive=True,
    )  # fmt: skip
    data_parallel_size_local: int | None = flag(
        None, "Engines on this host; hosts of the other engines run the same command with --headless. Default: all.",
        positive=True,
    )  # fmt: skip
    data_parallel_start_rank: int = flag(
        0, "Number of this host's first engine, with --data-parallel-size-local: 0 on the host that serves."
    )
    data_parallel_address: str = flag(
        "127.0.0.1", "Address of the host that serves, which hosts with other engines connect to. Connections from "
        "other hosts need a secret, OCTAVO_NODES_TOKEN.",
    )  # fmt: skip
    data_parallel_rpc_port: int = flag(29550, "Port of the host that serves, for the other hosts.")
    data_parallel_rank: int | None = flag(
        None, "Number of this server's only engine. Each of the --data-parallel-size engines has its own server, and "
        "a balancer in front picks one for each request.",
    )  # fmt: skip
    data_parallel_external_lb: bool = flag(False, "The same as --data-parallel-rank, which it needs.")
    data_parallel_hybrid_lb: bool = flag(
        False, "Each host has its own server for --data-parallel-size-local engines, from number "
        "--data-parallel-start-rank on; a balancer in front picks a server for each request.",
    )  # fmt: skip
    data_parallel_backend: str = flag(
        "mp", "Who starts the engines on other hosts. mp: you, by the same command with --headless. ray: Octavo, on "
        "hosts of a Ray cluster, --data-parallel-size-local on each.",
    )  # fmt: skip
    distributed_executor_backend: str | None = flag(
        None, "How workers are run. mp: as processes of this host and of those of --nnodes. ray: Octavo starts the "
        "nodes of --pipeline-parallel-size on hosts of a Ray cluster, one host for each stage or as many hosts as "
        "--nnodes says. Without stages, or with stages on GPUs, all workers are on this host, and ray means mp.",
    )  # fmt: skip
    enable_lora: bool = flag(False, "Serve LoRA adapters beside the model.")
    lora_modules: list[str] = flag(
        [], 'Adapters to serve from the start, as name=path or {"name": ..., "path": ..., "base_model_name": ...}.'
    )
    max_loras: int = flag(
        1, "The most adapters in a step. The device has memory for this many of the largest rank, or for more "
        "smaller ones.", positive=True,
    )  # fmt: skip
    lora_memory_gb: float | None = flag(
        None, "GiB of the device's memory for adapters, if --max-loras gives too little: it does not count whole "
        "embeddings and output matrices. On CPUs, the memory of all adapters that are kept.",
        positive=True,
    )  # fmt: skip
    max_lora_rank: int = flag(16, "Largest rank of an adapter: 1 to 512.", positive=True)
    max_cpu_loras: int | None = flag(
        None, "The most adapters kept in the host's memory; default: as many as fit into a tenth of the free memory, "
        "or on CPUs into --lora-memory-gb.", positive=True,
    )  # fmt: skip
    lora_dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto", "Type of the adapters in memory; auto is the model's."
    )
    lora_target_modules: list[str] = flag(
        [], "Endings of the names of modules that adapters may change, such as o_proj; default: all."
    )
    fully_sharded_loras: bool = flag(False, "Share all of an adapter among devices.", built=False)
    lora_root: list[str] = flag(
        [], "Folders of adapters. A request that names a folder in one of them loads that adapter. Clients may load "
        "other adapters only from below these folders.",
    )  # fmt: skip
    enable_runtime_lora_updating: bool = flag(
        False, "Let clients load and unload adapters below --lora-root. Also OCTAVO_ALLOW_RUNTIME_LORA_UPDATING."
    )
    num_scheduler_steps: int = flag(1, "Steps between two schedules.", built=False)
    limit_mm_per_prompt: dict[str, Any] | None = flag(
        None, 'The most media in a prompt, as JSON; default: {"image": 8, "video": 1}, or {"audio": 8}.'
    )
    max_image_bytes: int = flag(10_000_000, "The most bytes of a picture's file.", positive=True)
    max_image_pixels: int = flag(
        33_554_432, "The most pixels of a picture; its header is checked before anything is decoded.", positive=True
    )
    media_cache_tokens: int = flag(
        16384, "Tokens of pictures and sounds whose rows are kept for later turns, beside those of running requests.",
        positive=True,
    )  # fmt: skip
    mm_processor_cache_gb: float = flag(
        1.0, "GiB of media that are kept for later requests, decoded and preprocessed, and found by their contents "
        "or by their uuid; 0 keeps none.",
    )  # fmt: skip
    media_io_kwargs: dict[str, Any] | None = flag(
        None, 'How media are read, as JSON. {"video": {"num_frames": 32}}, the default, samples at most 32 frames of '
        'a video; "fps" beside it limits the frames of a second.',
    )  # fmt: skip
    max_video_bytes: int = flag(50_000_000, "The most bytes of a video's file.", positive=True)
    max_video_seconds: float = flag(600.0, "The most seconds of a video.", positive=True)
    max_video_pixels: int = flag(
        67_108_864, "The most pixels of all frames together that are sampled of a video.", positive=True
    )
    enable_mm_embeds: bool = flag(
        False, "Accept a tower's output instead of media: image_embeds, audio_embeds and video_embeds."
    )
    enable_prompt_embeds: bool = flag(
        False, "Accept embeddings instead of a prompt's tokens: prompt_embeds of completions and of LLM.generate."
    )
    max_audio_bytes: int = flag(25_000_000, "The most bytes of a sound's file.", positive=True)
    max_audio_seconds: float = flag(
        600.0, "The most seconds of a sound. Its spectrum is computed at once and takes about 15 MB a minute.",
        positive=True,
    )  # fmt: skip
    allowed_local_media_path: str | None = flag(
        None, "Folder in which requests may name media by file: URLs; without the flag they may name none."
    )
    allowed_media_domains: list[str] = flag(
        [], "Hosts that media may be fetched from, also by redirects; default: all on the internet."
    )
    allow_private_media_addresses: bool = flag(
        False, "Fetch media also from addresses that are not public: private, loopback, link-local and others."
    )
    media_fetch_timeout: float = flag(
        10.0, "Seconds within which a medium must be fetched, redirects included.", positive=True
    )
    max_media_redirects: int = flag(3, "The most redirects between a medium's address and its file.")
    language_model_only: bool = flag(
        False, "Serve only the language model of a model that sees or hears: without its tower, and without media."
    )

    def __post_init__(self) -> None:
        for one in fields(self):  # programs pass None for values that they were not given
            if getattr(self, one.name) is None and one.default is not None:
                setattr(self, one.name, one.default if one.default_factory is MISSING else one.default_factory())
        if isinstance(self.served_model_name, str):
            self.served_model_name = [self.served_model_name]
        self.dtype = cast(Dtype, str(self.dtype).removeprefix("torch."))  # scripts may pass torch's types
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

    def create_engine_config(self, usage_context: object = None) -> EngineConfig:
        """Find the model, settle the defaults and check every combination. `usage_context` is accepted for vLLM's sake
        and ignored: Octavo collects no usage statistics.

        Raises `ConfigError` for a flag that cannot be honoured, `LoadError` for a model that cannot be found or read.
        """
        # Imported here, as that module imports this one, and most users of `EngineArgs` never create a configuration.
        from octavo.config.creation import create_engine_config

        return create_engine_config(self)


@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` under the name that users of the async engine know, with the flags for `AsyncLLMEngine`'s logs of
    requests."""

    enable_log_requests: bool = flag(False, "Log requests.", is_flag=False)
    disable_log_requests: bool = flag(True, "The opposite, by the older name.", is_flag=False)
    max_log_len: int | None = flag(None, "Characters of a prompt in the log; default: all.", is_flag=False)

    @property
    def logs_requests(self) -> bool:
        return self.enable_log_requests or not self.disable_log_requests
