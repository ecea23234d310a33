"""vLLM's import paths, from one table.

`MODULES` says what each path stands for; `install`, which `octavo/__init__.py` calls, makes the paths importable. A
module is made when it is imported, and what it names is loaded when it is used. Code that only these paths need lives
in this package.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, cast

# By path below `octavo`: the module that has all of it, or its names with the module (and name) that each comes from.
MODULES: dict[str, str | dict[str, str]] = {
    "benchmark_latency": {"latency": "octavo.bench.offline"},
    "benchmark_throughput": {"throughput": "octavo.bench.offline"},
    "config.pooler": {"PoolerConfig": "octavo.config"},
    "distributed.parallel_state": "octavo.compat.parallel_state",
    "engine.arg_utils": {"AsyncEngineArgs": "octavo.config", "EngineArgs": "octavo.config"},
    "engine.async_llm_engine": {"AsyncLLMEngine": "octavo.engine.async_engine"},
    "engine.protocol": {"EngineClient": "octavo.engine.engine_calls:EngineCalls"},
    "entrypoints.pooling.utils": dict.fromkeys(
        ("MetadataItem", "build_metadata_items", "decode_pooling_output"), "octavo.compat.client_utils"
    ),
    "envs": "octavo.compat.envs",
    "logger": "octavo.compat.logger",
    "logprobs": {"Logprob": "octavo.outputs", "PositionLogprobs": "octavo.outputs"},
    "multimodal.utils": dict.fromkeys(
        ("encode_image_base64", "encode_image_url", "fetch_image"), "octavo.compat.client_utils"
    ),
    "platforms": "octavo.compat.platforms",
    "tokenizers": {
        "TokenizerLike": "octavo.loading.tokenizer:ModelTokenizer",
        "cached_get_tokenizer": "octavo.compat.get_tokenizer:get_tokenizer",
        "get_tokenizer": "octavo.compat.get_tokenizer",
    },
    "transformers_utils": {},
    "transformers_utils.tokenizer": "octavo.compat.get_tokenizer",
    "usage": {},
    "usage.usage_lib": "octavo.compat.usage",
    "utils": {
        "FlexibleArgumentParser": "octavo.flags:FlagParser",
        "get_open_port": "octavo.compat.script_utils",
        "random_uuid": "octavo.compat.script_utils",
    },
    "utils.argparse_utils": {"FlexibleArgumentParser": "octavo.flags:FlagParser"},
    "utils.network_utils": {"get_ip": "octavo.compat.script_utils", "get_open_port": "octavo.compat.script_utils"},
    "utils.print_utils": {"print_embeddings": "octavo.compat.client_utils"},
    "utils.serial_utils": dict.fromkeys(
        ("EMBED_DTYPES", "ENDIANNESS", "binary2tensor", "tensor2base64"), "octavo.compat.client_utils"
    ),
    "v1": {},
    "v1.core": {},
    "v1.core.kv_cache_utils": {"ExternalBlockHash": "octavo.compat.script_utils"},
    "v1.engine": {},
    "v1.engine.async_llm": {"AsyncLLM": "octavo.engine.async_engine:AsyncLLMEngine"},
    "v1.engine.exceptions": {"EngineDeadError": "octavo.errors"},
    "v1.engine.llm_engine": {"LLMEngine": "octavo.engine.llm_engine"},
    "v1.metrics": {},
    "v1.metrics.reader": "octavo.metrics.reader",
    "v1.sample": {},
    "v1.sample.logits_processor": dict.fromkeys(
        ("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality", "RequestLogitsProcessor"),
        "octavo.sampling.processor_classes",
    ),
    "v1.sample.logits_processor.builtin": {"process_dict_updates": "octavo.sampling.processor_classes"},
}
# Modules and names of vLLM without a counterpart, and what to do instead. A module's entry is for all below it.
_CONNECTORS = "caches move by --kv-cache-peers and --kv-cache-disk only, see docs/gateway.md"
_SERVER = "octavo.entrypoints.openai.api_server has run_server and build_app"
_TRANSFER = "weights of a running engine cannot be sent; sleep at level 2, replace the files, and wake up"
_WHERE_TIME_GOES = "/ui and /metrics of a server show where time goes"
ABSENT = {
    **dict.fromkeys(
        (
            "ModelRegistry", "forward_context", "model_executor", "plugins", "utils.gpu_sync_debug",
            "utils.torch_utils", "v1.core.kv_cache_manager", "v1.core.sched", "v1.executor",
            "v1.kv_cache_interface", "v1.request", "v1.worker",
        ),
        "classes of vLLM's models and engine cannot be plugged in; model_impl='transformers' runs more models, and "
        "LLM takes logits_processors",
    ),
    "assets": "open files of your own, with PIL.Image.open or soundfile.read",
    "benchmarks": "the commands octavo bench serve, throughput and latency make requests",
    "config.KVTransferConfig": _CONNECTORS,
    "config.ProfilerConfig": _WHERE_TIME_GOES,
    "config.WeightTransferConfig": _TRANSFER,
    "config.kv_transfer": _CONNECTORS,
    "distributed.device_communicators": "-tp and -pp are flags, and their workers Octavo's own",
    "distributed.kv_transfer": _CONNECTORS,
    "distributed.weight_transfer": _TRANSFER,
    "entrypoints.launchers": _SERVER,
    "entrypoints.openai.protocol": "requests are dictionaries; the openai package has their types",
    "entrypoints.serve": _SERVER,
    "initialize_ray_cluster": "--distributed-executor-backend ray connects to the cluster",
    "multimodal.image": "PIL.Image.Image.convert changes the mode",
    "multimodal.media": "librosa.load or soundfile.read returns samples",
    "profiler": _WHERE_TIME_GOES,
    "renderers": "chat_template of LLM.chat is the text of a template",
    "transformers_utils.repo_utils": "huggingface_hub.HfApi is the hub's API",
    "utils.system_utils": "resource.setrlimit raises the limit of open files",
    "v1.metrics.loggers": "the log has a line for all engines; LLM.get_metrics() and /metrics have the figures",
    "v1.watermarking": "answers cannot be watermarked",
}  # fmt: skip
_PROGRAMS = ("benchmark_latency", "benchmark_throughput")  # `python -m octavo.benchmark_latency`
_PACKAGE = "octavo."


class _PathFinder:
    """Finds and makes the modules of `MODULES`; an entry of `sys.meta_path`."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith(_PACKAGE):
            return None
        below = fullname.removeprefix(_PACKAGE)
        if below in ABSENT:  # also for `from octavo import ModelRegistry`, which looks for a module of this name
            raise ImportError(f"Octavo has no {below}: {ABSENT[below]}.", name=fullname)
        if below not in MODULES:
            return None
        is_package = any(f"{_PACKAGE}{other}".startswith(f"{fullname}.") for other in MODULES)
        return ModuleSpec(fullname, cast(Any, self), origin=__name__, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """The import system makes an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        fullname = module.__name__
        content = MODULES[fullname.removeprefix(_PACKAGE)]
        if isinstance(content, str):
            sys.modules[fullname] = import_module(content)
            return

        def find(name: str) -> Any:
            if name not in content:
                raise AttributeError(f"module {fullname!r} has no attribute {name!r}")
            home, _, renamed = content[name].partition(":")
            return getattr(import_module(home), renamed or name)

        module.__dict__.update(__getattr__=find, __all__=list(content), __doc__=f"vLLM's names: see `{__name__}`.")

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m` runs."""
        content = MODULES[fullname.removeprefix(_PACKAGE)]
        if fullname.removeprefix(_PACKAGE) not in _PROGRAMS or isinstance(content, str):
            raise ImportError(f"{fullname} is no program.", name=fullname)
        [(function, home)] = content.items()
        source = f"import sys\nfrom {home} import {function}\nsys.exit({function}(prog={fullname!r}))\n"
        return compile(source, __name__, "exec")


def install() -> None:
    """Make the paths importable; once in a process."""
    if not any(isinstance(finder, _PathFinder) for finder in sys.meta_path):
        # Before the finder of files: a folder that an older checkout has left behind would be a package without names.
        sys.meta_path.insert(0, cast(Any, _PathFinder()))
