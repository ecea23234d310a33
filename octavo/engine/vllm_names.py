"""Attributes of an engine that programs for vLLM read, under vLLM's names. They follow from the configuration."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from octavo.config import EngineConfig, ModelConfig
from octavo.errors import RequestError

_TRANSFER = "weights of a running engine cannot be sent; sleep at level 2, replace the files, and wake up"
# Attributes of vLLM's engines and its `LLM` that Octavo lacks, with what to do instead.
ABSENT = {
    "apply_model": "models are not torch.nn.Modules; generate and encode return their results",
    "collective_rpc": "workers run no methods of callers; -tp and -pp are arguments of LLM",
    "compute_weight_checksums": "weights are those of the files",
    "enqueue_chat": "llm.llm_engine.add_request queues one request, step computes",
    "finish_weight_update": _TRANSFER,
    "get_weight_version": "weights are those of the files",
    "get_world_size": "config.parallel_config has the sizes",
    "init_weight_transfer_engine": _TRANSFER,
    "preprocess_chat": "llm.get_tokenizer().apply_chat_template renders messages",
    "enqueue": "llm.llm_engine.add_request queues one request, step computes",
    "release_kv_cache_memory": "sleep(level=1) frees the KV cache",
    "set_tokenizer": "tokenizer is an argument of LLM",
    "start_profile": "/ui and /metrics of a server show where time goes",
    "reset_encoder_cache": "rows of media are kept within media_cache_tokens",
    "reset_mm_cache": "media are kept within the bytes of mm_processor_cache_gb",
    "start_draft_weight_update": _TRANSFER,
    "start_weight_update": _TRANSFER,
    "stop_profile": "/ui and /metrics of a server show where time goes",
    "update_weight_version": _TRANSFER,
    "update_weights": _TRANSFER,
    "wait_for_completion": "llm.llm_engine.step returns outputs",
    "wait_for_requests_to_drain": "pause_generation(mode='wait') returns when the last request has ended",
}
_INSTEAD = {
    "chat_template": "the model's folder says how a query and a document make one text",
    "lora_request": "models that pool take no adapters",
    "mm_processor_kwargs": "the model's own settings are taken",
    "reset_running_requests": "running requests keep their blocks; a pause ends them",
    "stat_loggers": "get_metrics() and /metrics have the figures, and disable_log_stats silences the log",
    "tokenization_kwargs": "truncate_prompt_tokens cuts prompts",
    "trace_headers": "spans are the server's",
}


def refuse_kwargs(**given: object) -> None:
    """Raise `RequestError` for an argument of vLLM's that is not built, unless its value asks for nothing."""
    for name, value in given.items():
        if value:
            raise RequestError(f"{name} is not built: {_INSTEAD[name]}.", param=name)


def check_reset(config: EngineConfig, *, reset_running_requests: bool, reset_connector: bool) -> None:
    """Raise `RequestError` for a reset of the prefix cache that ends requests, or that leaves the cache on disk."""
    refuse_kwargs(reset_running_requests=reset_running_requests)
    if not reset_connector and config.cache.disk is not None:
        raise RequestError(
            "reset_connector=False is not built: the cache on disk is emptied with the one in memory.",
            param="reset_connector",
        )


class ConfigNames:
    """Attributes of an engine that has a `config`."""

    if TYPE_CHECKING:

        @property
        def config(self) -> EngineConfig: ...

    else:

        def __getattr__(self, name: str) -> object:
            """Called only for missing attributes."""
            advice = f": {ABSENT[name]}" if name in ABSENT else ""
            raise AttributeError(f"{type(self).__name__} has no {name}{advice}.", name=name, obj=self)

    vllm_config = property(attrgetter("config"))  # the groups below are its attributes too
    model_config = property(attrgetter("config.model_config"))
    cache_config = property(attrgetter("config.cache_config"))  # with `num_gpu_blocks` once the engine is ready
    scheduler_config = property(attrgetter("config.scheduler_config"))
    parallel_config = property(attrgetter("config.parallel_config"))
    lora_config = property(attrgetter("config.lora_config"))
    speculative_config = property(attrgetter("config.speculative_config"))


class AsyncConfigNames(ConfigNames):
    """`ConfigNames`, with the methods that are coroutines in asynchronous engines."""

    async def get_vllm_config(self) -> EngineConfig:
        return self.config

    async def get_model_config(self) -> ModelConfig:
        return self.config.model

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.config.supported_tasks
