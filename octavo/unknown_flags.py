"""Advice on unknown flags: a counterpart of vLLM's flag or the reason for its absence, or the right spelling.

`flags.FlagParser` asks for the words of a command line, `octavo serve` for the keys of its file, `LLM` for keywords.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from octavo.errors import similar

_NEEDLESS = "leave it out: "
_NOT_BUILT = "it is not built yet; leave it out"
_COMPILED = f"{_NEEDLESS}nothing is compiled at start, and graphs are captured for the sizes that steps have"
_GRAMMARS = f"{_NEEDLESS}structured outputs are always made by llguidance"
_OF_REQUESTS = f"{_NEEDLESS}requests ask for it by the field "
_MIXED = f"{_NEEDLESS}prompts are cut so that steps take a set time, see --target-step-time"
_OF_SPECULATION = f"{_NEEDLESS}each step verifies as many draft tokens as pay, see docs/speculation.md"
_NO_CLASSES = "classes of vLLM's cannot be plugged in; leave it out"
_KERNELS = f"{_NEEDLESS}kernels are chosen by device and model; --attention-backend has the one choice"
_OFFLOAD = "weights stay where the model runs; --quantization int8 or int4 makes them smaller"
_RANKS = f"{_NEEDLESS}engines of -dp step on their own, and one server sends them requests"
_OF_BENCH = "octavo bench does not have it; leave it out"
_MEASURED = "/ui and /metrics show where time goes"

# Flags that vLLM has (0.32 in November 2026), or had until a few versions ago, and that Octavo lacks; by field name.
_ADVICE = {
    **dict.fromkeys((
        "additional_config", "anthropic_disabled_thinking_effort", "aux_output_config", "cohere_format",
        "cohere_is_reasoning_model", "cp_kv_cache_interleave_size", "custom_histogram_buckets",
        "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "dcp_comm_backend",
        "dcp_kv_cache_interleave_size", "dcp_q_replicate", "decode_context_parallel_size", "default_mm_loras",
        "diffusion_config", "disable_chunked_mm_input", "disable_fastapi_docs", "ec_manager_config",
        "ec_transfer_config", "elastic_ep_max_dp_size", "enable_batch_sharded_sampling", "enable_dbo",
        "enable_elastic_ep", "enable_eplb", "enable_hc_sp", "enable_log_deltas", "enable_log_outputs",
        "enable_lora_bias", "enable_mamba_cache_stochastic_rounding", "enable_mamba_shared_prefix_checkpoint",
        "enable_mfu_metrics", "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "enable_nccl_comm_suspend",
        "enable_offline_docs", "enable_return_routed_experts", "enable_scale_out", "enable_tower_connector_lora",
        "enable_trace_replay", "engram_config", "eplb_config", "exclude_tools_when_tool_choice_none",
        "expert_placement_strategy", "grpc", "grpc_port", "insecure", "interleave_mm_strings",
        "io_processor_plugin", "kv_cache_dtype_skip_layers", "kv_cache_metrics", "kv_cache_metrics_sample",
        "kv_sharing_fast_prefill", "kv_transfer_config", "logits_processor_pattern", "long_lora_scaling_factors",
        "lora_extra_vocab_size", "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode",
        "mamba_cache_philox_rounds", "mamba_ssm_cache_dtype", "max_lora_cls_labels", "mm_device_do_normalize",
        "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path", "mm_encoder_only", "mm_encoder_tp_mode", "mm_processor_device",
        "mm_processor_kwargs", "model_loader_extra_config", "per_request_spec_decode_metrics",
        "prefill_context_parallel_size", "prefix_cache_retention_interval", "prefix_match_unit",
        "ray_workers_use_nsight", "reasoning_parser_plugin", "replayssm_buffer_len", "request_id_prefix",
        "return_sampling_mask", "scheduler_reserve_full_isl", "skip_tokenizer_init",
        "sleep_preserve_parameter_names", "tokens_only", "tool_server", "tool_strict_level",
        "trust_request_mm_kwargs", "use_fp64_gumbel", "use_replayssm", "video_pruning_method", "video_pruning_rate",
        "watermark", "watermark_config",
    ), _NOT_BUILT),
    **dict.fromkeys((
        "asr_max_audio_len_sec", "asr_min_audio_len_sec", "bfcl_categories", "blazedit_max_distance",
        "blazedit_min_distance", "disable_shuffle", "enable_multimodal_chat", "hf_enable_torch_compile",
        "hf_max_batch_size", "hf_name", "hf_output_len", "hf_split", "hf_subset", "lora_assignment", "num_warmups",
        "plot_dataset_stats", "plot_timeline", "prequeue_requests", "probe_request_rate", "random_batch_size",
        "random_mm_base_items_per_request", "random_mm_bucket_config", "random_mm_limit_mm_per_prompt",
        "random_mm_num_mm_items_range_ratio", "reranker", "self_timed", "spec_bench_category",
        "spec_bench_output_len", "speed_bench_category", "speed_bench_dataset_subset", "speed_bench_output_len",
        "stream", "timed_trace_chunk_hash_size", "timed_trace_label_hash_ids", "timed_trace_label_input_length",
        "timed_trace_label_output_length", "timed_trace_label_timestamp", "timed_trace_sec_multiplier",
        "timeline_itl_thresholds",
    ), _OF_BENCH),
    **dict.fromkeys((
        "attention_config", "enable_flash_late_interaction", "enable_flashinfer_autotune", "gdn_prefill_backend",
        "ir_op_priority", "kda_decode_backend", "kda_prefill_backend", "kernel_config", "linear_backend",
        "mamba_backend", "mamba_ssu_algorithm", "mm_encoder_attn_backend", "moe_backend",
        "sparse_indexer_topk_backend",
    ), _KERNELS),
    **dict.fromkeys((
        "cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size", "offload_num_in_group",
        "offload_params", "offload_prefetch_step",
    ), _OFFLOAD),
    **dict.fromkeys((
        "data_parallel_supervisor_port", "disable_nccl_for_dp_synchronization",
        "dp_supervisor_probe_failure_threshold", "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s",
        "dp_sync_interval",
    ), _RANKS),
    **dict.fromkeys((
        "enable_layerwise_nvtx_tracing", "enable_logging_iteration_details", "profile", "profiler_config",
    ), f"leave it out: {_MEASURED}"),
    **dict.fromkeys((
        "enable_shm_tensor_arena", "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc",
    ), f"{_NEEDLESS}media are kept within --mm-processor-cache-gb"),
    **dict.fromkeys(("cpu_distributed_timeout_seconds", "distributed_timeout_seconds"), "--engine-step-timeout"),
    **dict.fromkeys(("enable_fault_tolerance", "fault_tolerance_config"), "--max-engine-restarts"),
    **dict.fromkeys(("fingerprint_mode", "fingerprint_value"), f"{_NEEDLESS}system_fingerprint names the settings"),
    **dict.fromkeys(("log_level", "logging_config"), "--uvicorn-log-level and --log-format json"),
    **dict.fromkeys(("numa_bind", "numa_bind_cpus", "numa_bind_nodes"), "--cpu-threads-bind"),
    **dict.fromkeys((
        "safetensors_load_strategy", "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads",
    ), f"{_NEEDLESS}files are mapped"),
    **dict.fromkeys(("cumem_allocator", "enable_cumem_allocator"), "--enable-sleep-mode"),
    **dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), "use --max-queue-len or --max-ttft"),
    **dict.fromkeys((
        "cuda_graph_sizes", "cudagraph_capture_sizes", "cudagraph_metrics", "jit_monitor_mode", "jit_monitor_verbose",
        "max_context_len_to_capture", "max_cudagraph_capture_size", "max_seq_len_to_capture",
        "sleep_mode_offload_cudagraph", "specialize_active_lora",
    ), _COMPILED),
    **dict.fromkeys(("guided_decoding_backend", "guided_decoding_disable_fallback"), _GRAMMARS),
    **dict.fromkeys((
        "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "max_long_partial_prefills",
        "max_num_partial_prefills", "performance_mode", "prefill_schedule_interval", "scheduler_delay_factor",
    ), _MIXED),
    **dict.fromkeys(("model_class_overrides", "scheduler_cls", "worker_cls", "worker_extension_cls"), _NO_CLASSES),
    "allow_deprecated_quantization": f"{_NEEDLESS}no --quantization is deprecated",
    "aggregate_engine_logging": f"{_NEEDLESS}the log has a line for all engines",
    "all2all_backend": f"{_NEEDLESS}experts exchange their results in one way",
    "async_engine": "octavo bench serve measures a server",
    "code_revision": "--revision applies to the code too",
    "collect_detailed_traces": f"{_NEEDLESS}spans of --otlp-traces-endpoint have the phases of a request",
    "config_format": f"{_NEEDLESS}it is recognised",
    "chat_template_kwargs": "the server's --default-chat-template-kwargs",
    "custom_ensure_client_side_data": f"{_NEEDLESS}data sets are read from files",
    "data_parallel_multi_port_external_lb": "--data-parallel-external-lb, one server for each engine",
    "device_ids": "set CUDA_VISIBLE_DEVICES in the environment",
    "device_memory_utilization": "--gpu-memory-utilization on GPUs, --cpu-memory-utilization on CPUs",
    "disable_access_log_for_endpoints": "--disable-uvicorn-access-log is for all routes",
    "disable_async_output_proc": f"{_NEEDLESS}text is made in another process than tokens",
    "disable_cascade_attn": f"{_NEEDLESS}attention does not depend on the rest of the batch",
    "disable_custom_all_reduce": f"{_NEEDLESS}sums among workers are Octavo's own, the same in every run",
    "disable_frontend_multiprocessing": f"{_NEEDLESS}the engine has a process of its own",
    "disable_hybrid_kv_cache_manager": f"{_NEEDLESS}layers with windows give blocks back where the model has some",
    "disable_mm_preprocessor_cache": "--mm-processor-cache-gb 0",
    "disable_sliding_window": "windows are part of the model; shorten --max-model-len instead",
    "enable_ep_weight_filter": f"{_NEEDLESS}a worker reads its experts only",
    "enable_per_request_metrics": "spans of --otlp-traces-endpoint have the times of each request",
    "enable_reasoning": f"{_NEEDLESS}--reasoning-parser, or the model's template, says so",
    "enable_ssl_refresh": "restart the server when its certificate changes",
    "engine_use_ray": "--distributed-executor-backend ray",
    "fail_on_environ_validation": f"{_NEEDLESS}the start warns of variables of vLLM without effect",
    "h11_max_header_count": f"{_NEEDLESS}a request's head has 64 KiB at most",
    "h11_max_incomplete_event_size": f"{_NEEDLESS}a request's head has 64 KiB at most, its body --max-body-bytes",
    "hf_config_path": "--hf-overrides changes settings of config.json",
    "hf_token": "set HF_TOKEN in the environment",
    "ignore_patterns": f"{_NEEDLESS}only the weights that are used are fetched",
    "kv_offloading_backend": f"{_NEEDLESS}--kv-cache-host-gib has one",
    "kv_offloading_size": "--kv-cache-host-gib, of all workers together too",
    "log_config_file": "--log-format json and --uvicorn-log-level",
    "log_error_stack": f"{_NEEDLESS}an unexpected error is logged with its traceback",
    "logits_processors": "from Python LLM takes classes, and SamplingParams functions",
    "lora_path": "--enable-lora --lora-modules name=path",
    "max_num_active_seqs": "--max-num-seqs",
    "max_num_scheduled_tokens": "--max-num-batched-tokens",
    "max_parallel_loading_workers": f"{_NEEDLESS}weights are mapped and packed by all threads",
    "multi_step_stream_outputs": f"{_NEEDLESS}each token is streamed when it is there",
    "num_iters_cold": "--runs",
    "num_iters_warm": "--runs",
    "num_iters_warmup": f"{_NEEDLESS}octavo bench startup has no caches to warm",
    "num_lookahead_slots": _OF_SPECULATION,
    "prefix_caching_hash_algo": f"{_NEEDLESS}there is one",
    "output_tmp_dir": f"{_NEEDLESS}answers are written to the output file as they come",
    "pt_load_map_location": f"{_NEEDLESS}files are mapped into the host's memory",
    "qlora_adapter_name_or_path": "--enable-lora --lora-modules name=path",
    "quantization_config": "--quantization, or a checkpoint of that kind",
    "reasoning_config": f"{_NEEDLESS}the tags of reasoning are recognised; --reasoning-parser names another format",
    "renderer_num_workers": "--api-server-count",
    "rope_scaling": "--hf-overrides.rope_scaling JSON",
    "rope_theta": "--hf-overrides.rope_theta NUMBER",
    "show_hidden_metrics_for_version": f"{_NEEDLESS}no metric is hidden",
    "skip_mm_profiling": f"{_NEEDLESS}nothing is profiled at start",
    "spec_decoding_acceptance_method": f"{_NEEDLESS}draft tokens change no answer",
    "speculative_disable_by_batch_size": "--speculative-config.disable_by_batch_size NUMBER",
    "speculative_max_model_len": "--speculative-config.max_model_len NUMBER",
    "ssl_cert_reqs": "--ssl-ca-certs requires clients to show a certificate",
    "spec_method": "--speculative-config.method NAME",
    "spec_model": "--speculative-config.model MODEL",
    "spec_tokens": "--speculative-config.num_speculative_tokens NUMBER",
    "structured_outputs_config": f"{_GRAMMARS}; --disable-additional-properties is its one option",
    "swa_bounded_replay": f"{_NEEDLESS}layers with windows give blocks back",
    "tokenizer_revision": "--revision applies to the tokenizer too",
    "typical_acceptance_sampler_posterior_alpha": f"{_NEEDLESS}draft tokens change no answer",
    "typical_acceptance_sampler_posterior_threshold": f"{_NEEDLESS}draft tokens change no answer",
    "url": "--host and --port are the address of the metrics",
    "use_beam_search": f"{_OF_REQUESTS}use_beam_search",
    "use_tqdm_on_load": f"{_NEEDLESS}octavo serve shows a bar on a terminal, LLM none",
    "use_v2_block_manager": f"{_NEEDLESS}there is one block manager",
    "weight_transfer_config": "not built; sleep at level 2, replace the files, and wake up",
    "worker_use_ray": "--distributed-executor-backend ray",
}  # fmt: skip
# Names in SGLang and llama.cpp of flags that Octavo has.
_ELSEWHERE = {
    other: name
    for name, others in {
        "cpu_threads": ("threads",),
        "data_parallel_size": ("dp", "dp_size"),
        "gpu_memory_utilization": ("mem_fraction_static",),
        "lora_modules": ("lora", "lora_paths"),
        "max_model_len": ("context_length", "ctx_size", "num_ctx"),
        "max_num_batched_tokens": ("chunked_prefill_size", "ubatch_size"),
        "max_num_seqs": ("max_running_requests", "parallel"),
        "model": ("hf", "hf_repo", "model_path"),
        "served_model_name": ("alias", "name"),
        "speculative_config": ("model_draft", "speculative_algorithm"),
        "tensor_parallel_size": ("tp", "tp_size"),
    }.items()
    for other in others
}
# vLLM's other names of flags that Octavo has. What follows a dot is a key of an object.
SYNONYMS = {
    "-cc": "--compilation-config",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
    "--sse-keep-alive-interval": "--stream-keep-alive",
}
_SHORT = {
    "ac": "attention_config",
    "dc": "diffusion_config",
    "dcp": "decode_context_parallel_size",
    "dpm": "data_parallel_multi_port_external_lb",
    "pcp": "prefill_context_parallel_size",
}
_ON_IN_VLLM = {"multi_step_stream_outputs", "use_tqdm_on_load"}  # true by default in vLLM: False asks for something


def asks_for_nothing(name: str, value: object) -> bool:
    """Return whether `name` is a flag of vLLM that Octavo lacks, and `value` means the same as leaving it out."""
    return name in _ADVICE and (value is None or (not value and name not in _ON_IN_VLLM))


def known_arguments(caller: str, given: Mapping[str, object], known: Collection[str]) -> dict[str, Any]:
    """Return the known keywords. Keywords of vLLM that ask for nothing are dropped, because callers pass on defaults.
    Raises `TypeError` for other keywords, with advice."""
    asked = {name: value for name, value in given.items() if name in known or not asks_for_nothing(name, value)}
    if unknown := sorted(asked.keys() - set(known)):
        advice = advice_on(unknown, known)
        raise TypeError(" ".join([f"{caller}() has no argument {' or '.join(unknown)}.", *advice]))
    return asked


def advice_on(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return a line of advice for each of `names` that has any. `known` are the existing names. All are names of
    fields, or flags with hyphens."""
    known = list(known)
    lines = [(name, _advice(name, known)) for name in names]
    return [f"{name}: {advice}" for name, advice in lines if advice]


def _advice(name: str, known: list[str]) -> str | None:
    field = name.replace("-", "_")
    field = _SHORT.get(field, field)
    if found := _ADVICE.get(field.removeprefix("no_")):
        return f"{found}."
    same = _ELSEWHERE.get(field)
    meant = next((one for one in known if one.replace("-", "_") == same), None) or similar(name, known)
    return f"did you mean {meant}?" if meant else None
