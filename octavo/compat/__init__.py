"""vLLM's import paths, from one table.

`MODULES` says what each path stands for; `install`, which `octavo/__init__.py` calls, makes the paths importable. A
module is made when it is imported, and what it names is loaded when it is used. Code that only these paths need lives
in this package.
"""

from __future__ import annotations

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
    "envs": "octavo.compat.envs",
    "logger": "octavo.compat.logger",
    "logprobs": {"Logprob": "octavo.outputs", "PositionLogprobs": "octavo.outputs"},
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
    "utils.network_utils": {"get_open_port": "octavo.compat.script_utils"},
    "v1": {},
    "v1.engine": {},
    "v1.engine.async_llm": {"AsyncLLM": "octavo.engine.async_engine:AsyncLLMEngine"},
    "v1.engine.exceptions": {"EngineDeadError": "octavo.errors"},
    "v1.engine.llm_engine": {"LLMEngine": "octavo.engine.llm_engine"},
    "v1.metrics": {},
    "v1.metrics.reader": "octavo.metrics.reader",
}
_PROGRAMS = ("benchmark_latency", "benchmark_throughput")  # `python -m octavo.benchmark_latency`
_PACKAGE = "octavo."


class _PathFinder:
    """Finds and makes the modules of `MODULES`; an entry of `sys.meta_path`."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.removeprefix(_PACKAGE) not in MODULES or not fullname.startswith(_PACKAGE):
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
