"""Every engine flag once: command lines, `LLM(...)` keywords and YAML files all fill `EngineArgs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
        "auto", "How the tokenizer is read: auto and hf are its fast form; slow and mistral are not built."
    )
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
    precise_layers: int | None = flag(
        None, "Layers, from the first one on, that multiply weights of few bits, but for gate and up, with inputs of "
        "sixteen bits and not of eight, on CPUs: answers are closer to those of float32, and prompts take half as long "
        "again in such a layer. Default: one of 10.",
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
    kv_cache_memory_bytes: int | None = flag(
        None, "Bytes of the KV cache of each device, in the place of a share of the memory: a number, 4g (4e9) or 4G "
        "(2 ** 32).", positive=True, parse=number_with_unit,
    )  # fmt: skip
    num_gpu_blocks_override: int | None = flag(None, "KV blocks to allocate, whatever the memory.", positive=True)
    block_size: int = flag(16, "Tokens in a KV block: 8, 16 or 32; on GPUs up to 256.")
    swap_space: float = flag(4.0, "GiB of host memory for swapped requests, with --preemption-mode swap.")
    kv_cache_disk: str | None = flag(
        None, "Folder that keeps blocks of the KV cache, on CPUs: prompts that begin like earlier ones are read from "
        "it when that is faster than to compute them, also after a restart.",
    )  # fmt: skip
    kv_cache_disk_gib: float = flag(16.0, "GiB that --kv-cache-disk may take; the blocks used longest ago go first.")
    kv_events_config: dict[str, Any] | None = flag(
        None, "How routers are told which blocks the prefix cache has, over ZeroMQ in vLLM's format, as JSON: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": '
        '"kv-events"}. Default: they are not told.',
    )  # fmt: skip
    max_num_seqs: int = flag(256, "Sequences in a step at most.", positive=True)
    max_num_batched_tokens: int | None = flag(None, "Tokens in a step at most; default 2048.", positive=True)
    enable_chunked_prefill: bool = flag(True, "Let a prompt be computed over several steps.")
    enable_prefix_caching: bool = flag(True, "Reuse the blocks of prompts that start alike.")
    stream_interval: int = flag(
        1, "Tokens in an event of a stream at least, but for the first and the last.", positive=True
    )
    preemption_mode: PreemptionMode = flag("recompute", "What happens to a request that must give its blocks back.")
    scheduling_policy: SchedulingPolicy = flag(
        "fair", "Order of waiting requests. fair: clients take turns; a client is an address, with its --api-key. "
        "fcfs: by arrival. priority: the lowest value first. deadline: the first token that is due first.",
    )  # fmt: skip
    target_step_time: float | None = flag(
        None, "Milliseconds that a step may take while somebody waits for a stream: prompts are cut to it. 'auto' is "
        "90, or more where the streams alone take long; 0 bounds steps by tokens only. Default: auto.",
        parse=milliseconds,
    )  # fmt: skip
    enforce_eager: bool = flag(False, "Run the model call by call, without captured graphs.")
    async_scheduling: bool | None = flag(
        None, "Schedule a step while the one before is computed: always so on GPUs, where True is taken, and never on "
        "CPUs, where False is."
    )  # fmt: skip
    optimization_level: int = flag(
        2, "vLLM's choice between a fast start and compiled code. Nothing is compiled at start here.", built=False,
        short="-O",
    )  # fmt: skip
    compilation_config: dict[str, Any] | None = flag(None, "How vLLM compiles, as JSON.", built=False)
    seed: int | None = flag(None, "Seed of requests that bring none, and of dummy weights; default: not repeatable.")
    chat_template: str | None = flag(
        None, "File with a Jinja chat template, the template, or the name of one of the model's; default: the model's."
    )
    model_impl: Literal["auto", "octavo", "transformers"] = flag(
        "auto", "Who computes the model: Octavo itself, or its modules of transformers; auto is Octavo where it can."
    )
    trust_remote_code: bool = flag(
        False,
        "Run Python code that comes with a model. Only models that transformers computes and tokenizers without "
        "a tokenizer.json ever do.",
    )
    disable_additional_properties: bool = flag(
        False, "Structured outputs: an object whose JSON schema names properties and says nothing of others has no "
        "others. Without, it may have any, as JSON Schema has it."
    )  # fmt: skip
    device: Device = flag("auto", "Where the model runs; auto takes a CUDA device if there is one.")
    attention_backend: AttentionBackend = flag("auto", "Attention on GPUs: Octavo's kernel in Triton is the only one.")
    cpu_threads: int | None = flag(
        None, "Threads that compute on CPU; default: all physical cores within affinity and quota.",
        positive=True,
    )  # fmt: skip
    cpu_threads_bind: str | None = flag(
        None, "Processors to keep one thread each on, as 0-3,8; default: any, or each its own on several NUMA nodes."
    )
    max_logprobs: int = flag(
        MAX_LOGPROBS, "Log-probabilities of a position that a request may ask for; -1: all of the vocabulary."
    )
    logprobs_mode: str = flag(
        "raw_logprobs", "What log-probabilities are of: the model's own logits, before penalties and temperature.",
        built=False,
    )  # fmt: skip
    enable_sleep_mode: bool = flag(
        False, "Let memory be freed while nothing runs. It always may be: LLM.sleep, and /sleep of servers in dev mode."
    )
    disable_log_stats: bool = flag(False, "Do not log throughput and cache use every few seconds.")
    check_invariants: bool = flag(
        False, "Check the scheduler's and the cache's invariants after each step (debugging)."
    )
    speculative_config: dict[str, Any] | None = flag(
        None, "How draft tokens are made, which the model verifies several in a step, as JSON: "
        '{"method": "ngram"} looks them up in the prompt, {"method": "suffix"} in recent answers too; {"model": "…"} '
        'has a smaller model make them. Answers stay as they are. Default: ngram on CPUs while at most four sequences '
        'run, in steps where that pays; {"method": "none"} turns it off.',
    )  # fmt: skip
    speculative_model: str | None = flag(None, "An older way to say it: [ngram], or a draft model.")
    num_speculative_tokens: int | None = flag(None, "The most draft tokens of a sequence in a step.")
    speculative_draft_tensor_parallel_size: int | None = flag(None, "Workers of the draft model: 1.", positive=True)
    ngram_prompt_lookup_max: int | None = flag(None, "Tokens that [ngram] compares at most; default 5.")
    ngram_prompt_lookup_min: int | None = flag(None, "Tokens that must agree for a draft by [ngram]; default 5.")
    tensor_parallel_size: int = flag(
        1, "Workers that share each layer, a process each, which share the processors or --cpu-threads, or have a GPU "
        "each.", short="-tp", positive=True,
    )  # fmt: skip
    enable_expert_parallel: bool = flag(
        False, "Give each worker of --tensor-parallel-size whole experts, in the place of a part of each."
    )
    reproducible_parallel: bool | None = flag(
        None, "Give the same answers to the bit for any --tensor-parallel-size, or refuse to start; --no-… gives that "
        "up. Default: where that is possible."
    )  # fmt: skip
    pipeline_parallel_size: int = flag(
        1, "Stages that share the layers out, as many workers each as share a layer. As many steps are under way, of "
        "different requests.", short="-pp", positive=True,
    )  # fmt: skip
    pipeline_layer_partition: str | None = flag(None, "Layers of each stage, such as 10,12,8; default equal parts.")
    nnodes: int = flag(
        1, "Hosts that share out the stages of --pipeline-parallel-size, equally many each. Each is given the same "
        "command with its own --node-rank.", positive=True,
    )  # fmt: skip
    node_rank: int = flag(0, "Number of this host: 0 is the one that serves, the others are --headless.")
    master_addr: str = flag(
        "127.0.0.1", "Address of node 0, where the other nodes join it. Beyond this host they need a secret, "
        "OCTAVO_NODES_TOKEN.",
    )  # fmt: skip
    master_port: int = flag(29501, "Port of node 0 for the other nodes.")
    data_parallel_size: int = flag(
        1, "Engines behind one server, each with the model and a cache of its own, which share the processors and the "
        "memory for the cache. A request goes where most of its prompt is cached, unless that one has more to do.",
        short="-dp", positive=True,
    )  # fmt: skip
    data_parallel_size_local: int | None = flag(
        None, "Those of them on this host; others are on hosts that run the same with --headless. Default: all.",
        positive=True,
    )  # fmt: skip
    data_parallel_start_rank: int = flag(
        0, "Number of the first engine of this host, where --data-parallel-size-local are: 0 on the one that serves."
    )
    data_parallel_address: str = flag(
        "127.0.0.1", "Address of the host that serves, where the others join it with their engines. Beyond this host "
        "they need a secret, OCTAVO_NODES_TOKEN.",
    )  # fmt: skip
    data_parallel_rpc_port: int = flag(29550, "Port of the host that serves for the others.")
    data_parallel_rank: int | None = flag(
        None, "Number of the one engine of this server: each of --data-parallel-size has a server of its own, and a "
        "balancer before them picks one for each request.",
    )  # fmt: skip
    data_parallel_external_lb: bool = flag(False, "As --data-parallel-rank says, which it needs.")
    data_parallel_hybrid_lb: bool = flag(
        False, "Each host has a server of its own for its engines, --data-parallel-size-local of them from "
        "--data-parallel-start-rank on, and a balancer before them picks one for each request.",
    )  # fmt: skip
    data_parallel_backend: str = flag(
        "mp", "Who starts engines on other hosts: mp, whoever runs the same with --headless there; or ray, on hosts of "
        "its cluster, --data-parallel-size-local on each.",
    )  # fmt: skip
    distributed_executor_backend: str | None = flag(
        None, "How workers are run: mp, processes of this host and those of --nnodes; or ray, which starts nodes on "
        "other hosts of its cluster for the stages of --pipeline-parallel-size, one each or as many as --nnodes says. "
        "Without stages all workers are on this host, and ray is mp.",
    )  # fmt: skip
    enable_lora: bool = flag(False, "Serve LoRA adapters beside the model.")
    lora_modules: list[str] = flag(
        [], 'Adapters to serve from the start, as name=path or {"name": ..., "path": ..., "base_model_name": ...}.'
    )
    max_loras: int = flag(
        1, "Adapters in a step at most. The device has memory for so many of the largest rank, or more smaller ones.",
        positive=True,
    )  # fmt: skip
    lora_memory_gb: float | None = flag(
        None, "GiB of the device's memory for adapters, where --max-loras says too little: whole embeddings and output "
        "matrices are not counted there. On CPUs, which have one memory, of all adapters that are kept.", positive=True,
    )  # fmt: skip
    max_lora_rank: int = flag(16, "Largest rank of an adapter: 1 to 512.", positive=True)
    max_cpu_loras: int | None = flag(
        None, "Adapters that are kept in the host's memory; default: as many as a tenth of what is free of it holds, "
        "or --lora-memory-gb on CPUs.", positive=True,
    )  # fmt: skip
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
    limit_mm_per_prompt: dict[str, Any] | None = flag(
        None, 'Media of a prompt at most, as JSON; default: {"image": 8, "video": 1}, or {"audio": 8}.'
    )
    max_image_bytes: int = flag(10_000_000, "Bytes of a picture's file at most.", positive=True)
    max_image_pixels: int = flag(
        33_554_432, "Pixels of a picture at most, as its header gives them before anything is decoded.", positive=True
    )
    media_cache_tokens: int = flag(
        16384, "Tokens of pictures and sounds whose rows are kept for later turns, beside those of requests under way.",
        positive=True,
    )  # fmt: skip
    mm_processor_cache_gb: float = flag(
        1.0, "GiB of media that are kept for later requests, decoded and as the model's processor makes them: by their "
        "contents, and by the uuid that they came with; 0 keeps none.",
    )  # fmt: skip
    media_io_kwargs: dict[str, Any] | None = flag(
        None, 'How media are read, as JSON: {"video": {"num_frames": 32}}, frames that are sampled of a video at most, '
        'which is the default; beside it "fps", of a second at most.',
    )  # fmt: skip
    max_video_bytes: int = flag(50_000_000, "Bytes of a video's file at most.", positive=True)
    max_video_seconds: float = flag(600.0, "Seconds of a video at most.", positive=True)
    max_video_pixels: int = flag(
        67_108_864, "Pixels of the frames that are sampled of a video, together, at most.", positive=True
    )
    enable_mm_embeds: bool = flag(
        False, "Take what a tower makes of media in their place: image_embeds, audio_embeds and video_embeds."
    )
    enable_prompt_embeds: bool = flag(
        False, "Take embeddings in the place of a prompt's tokens: prompt_embeds of completions and of LLM.generate."
    )
    max_audio_bytes: int = flag(25_000_000, "Bytes of a sound's file at most.", positive=True)
    max_audio_seconds: float = flag(
        600.0, "Seconds of a sound at most. Its spectrum is made at once, of about 15 MB a minute.", positive=True
    )
    allowed_local_media_path: str | None = flag(
        None, "Folder below which requests may name media by file: URLs; without it by none."
    )
    allowed_media_domains: list[str] = flag(
        [], "Hosts that media may be fetched from, and that redirects may lead to; default: all on the internet."
    )
    allow_private_media_addresses: bool = flag(
        False, "Fetch media from private, loopback, link-local and other addresses that are not public, too."
    )
    media_fetch_timeout: float = flag(
        10.0, "Seconds in which a medium must have been fetched, redirects included.", positive=True
    )
    max_media_redirects: int = flag(3, "Redirects at most between a medium's address and its file.")
    language_model_only: bool = flag(
        False, "Serve a model that sees or hears as a language model: without its tower, and without media."
    )

    def __post_init__(self) -> None:
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
