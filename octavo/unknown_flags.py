"""Advice on unknown flags: a counterpart of vLLM's flag or the reason for its absence, or the right spelling.

`flags.FlagParser` asks for the words of a command line, `octavo serve` for the keys of its file, `LLM` for keywords.
"""

from __future__ import annotations

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

# Flags that vLLM has, or had until a few versions ago, and that Octavo lacks; by field name.
_ADVICE = {
    **dict.fromkeys((
        "additional_config", "decode_context_parallel_size", "default_mm_loras", "disable_chunked_mm_input",
        "disable_fastapi_docs", "enable_dbo", "enable_eplb", "enable_log_outputs", "enable_lora_bias",
        "enable_return_routed_experts", "eplb_config", "exclude_tools_when_tool_choice_none", "insecure",
        "interleave_mm_strings", "kv_sharing_fast_prefill",
        "kv_transfer_config", "logits_processor_pattern", "long_lora_scaling_factors", "lora_extra_vocab_size",
        "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mm_encoder_tp_mode", "mm_processor_kwargs",
        "model_loader_extra_config", "prefill_context_parallel_size", "random_batch_size", "ray_workers_use_nsight",
        "reasoning_parser_plugin", "request_id_prefix", "skip_tokenizer_init", "video_pruning_rate",
    ), _NOT_BUILT),
    **dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), "use --max-queue-len or --max-ttft"),
    **dict.fromkeys((
        "cuda_graph_sizes", "cudagraph_capture_sizes", "max_context_len_to_capture", "max_seq_len_to_capture",
    ), _COMPILED),
    **dict.fromkeys(("guided_decoding_backend", "guided_decoding_disable_fallback"), _GRAMMARS),
    **dict.fromkeys((
        "long_prefill_token_threshold", "max_long_partial_prefills", "max_num_partial_prefills",
        "scheduler_delay_factor",
    ), _MIXED),
    **dict.fromkeys(("scheduler_cls", "worker_cls", "worker_extension_cls"), _NO_CLASSES),
    "aggregate_engine_logging": f"{_NEEDLESS}the log has a line for all engines",
    "all2all_backend": f"{_NEEDLESS}experts exchange their results in one way",
    "async_engine": "octavo bench serve measures a server",
    "code_revision": "--revision applies to the code too",
    "collect_detailed_traces": f"{_NEEDLESS}spans of --otlp-traces-endpoint have the phases of a request",
    "config_format": f"{_NEEDLESS}it is recognised",
    "cpu_offload_gb": "weights stay where the model runs; --quantization int8 or int4 makes them smaller",
    "disable_async_output_proc": f"{_NEEDLESS}text is made in another process than tokens",
    "disable_cascade_attn": f"{_NEEDLESS}attention does not depend on the rest of the batch",
    "disable_custom_all_reduce": f"{_NEEDLESS}sums among workers are Octavo's own, the same in every run",
    "disable_frontend_multiprocessing": f"{_NEEDLESS}the engine has a process of its own",
    "disable_hybrid_kv_cache_manager": f"{_NEEDLESS}layers with windows give blocks back where the model has some",
    "disable_mm_preprocessor_cache": "--mm-processor-cache-gb 0",
    "disable_sliding_window": "windows are part of the model; shorten --max-model-len instead",
    "enable_per_request_metrics": "spans of --otlp-traces-endpoint have the times of each request",
    "enable_reasoning": f"{_NEEDLESS}--reasoning-parser, or the model's template, says so",
    "enable_ssl_refresh": "restart the server when its certificate changes",
    "engine_use_ray": "--distributed-executor-backend ray",
    "h11_max_header_count": f"{_NEEDLESS}a request's head has 64 KiB at most",
    "h11_max_incomplete_event_size": f"{_NEEDLESS}a request's head has 64 KiB at most, its body --max-body-bytes",
    "hf_config_path": "--hf-overrides changes settings of config.json",
    "hf_token": "set HF_TOKEN in the environment",
    "ignore_patterns": f"{_NEEDLESS}only the weights that are used are fetched",
    "kv_offloading_backend": f"{_NEEDLESS}--kv-cache-host-gib has one",
    "kv_offloading_size": "--kv-cache-host-gib, of all workers together too",
    "log_config_file": "--log-format json and --uvicorn-log-level",
    "logits_processors": "SamplingParams takes some, from Python",
    "lora_path": "--enable-lora --lora-modules name=path",
    "max_parallel_loading_workers": f"{_NEEDLESS}weights are mapped and packed by all threads",
    "multi_step_stream_outputs": f"{_NEEDLESS}each token is streamed when it is there",
    "num_lookahead_slots": _OF_SPECULATION,
    "prefix_caching_hash_algo": f"{_NEEDLESS}there is one",
    "profile": f"{_NEEDLESS}/metrics and /ui show where time goes",
    "pt_load_map_location": f"{_NEEDLESS}files are mapped into the host's memory",
    "qlora_adapter_name_or_path": "--enable-lora --lora-modules name=path",
    "rope_scaling": "--hf-overrides.rope_scaling JSON",
    "rope_theta": "--hf-overrides.rope_theta NUMBER",
    "safetensors_load_strategy": f"{_NEEDLESS}files are mapped",
    "show_hidden_metrics_for_version": f"{_NEEDLESS}no metric is hidden",
    "skip_mm_profiling": f"{_NEEDLESS}nothing is profiled at start",
    "spec_decoding_acceptance_method": f"{_NEEDLESS}draft tokens change no answer",
    "speculative_disable_by_batch_size": "--speculative-config.disable_by_batch_size NUMBER",
    "speculative_max_model_len": "--speculative-config.max_model_len NUMBER",
    "ssl_cert_reqs": "--ssl-ca-certs requires clients to show a certificate",
    "structured_outputs_config": f"{_GRAMMARS}; --disable-additional-properties is its one option",
    "tokenizer_revision": "--revision applies to the tokenizer too",
    "typical_acceptance_sampler_posterior_alpha": f"{_NEEDLESS}draft tokens change no answer",
    "typical_acceptance_sampler_posterior_threshold": f"{_NEEDLESS}draft tokens change no answer",
    "use_beam_search": f"{_OF_REQUESTS}use_beam_search",
    "use_tqdm_on_load": f"{_NEEDLESS}octavo serve shows a bar on a terminal, LLM none",
    "use_v2_block_manager": f"{_NEEDLESS}there is one block manager",
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
    if found := _ADVICE.get(field.removeprefix("no_")):
        return f"{found}."
    same = _ELSEWHERE.get(field)
    meant = next((one for one in known if one.replace("-", "_") == same), None) or similar(name, known)
    return f"did you mean {meant}?" if meant else None
