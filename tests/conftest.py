"""What tests of several folders share: the default model, and a tokenizer for models made of random numbers."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import LoadError
from octavo.hardware import why_not_cuda
from tests import watchdog
from tests.seeds import seed_everything
from tests.selection import EVERYTHING, ImportGraph, base_of_changes, changed_files
from tests.tiers import affected, parse_shard, scopes, shard

# Nothing in the tests may reach a model hub: only the default model is fetched, from the package index.
os.environ["HF_HUB_OFFLINE"] = "1"
# torch's threads, which the references use, would otherwise spin against the native kernels'.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Triton's interpreter multiplies with numpy, whose kernels for AVX2 give a row other bits by its place in the matrix.
# It must be set before numpy is imported.
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
# Triton reads it when it is imported, which may be by whatever is collected first: without a GPU its kernels run in its
# interpreter.
if why_not_cuda():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts the tests in the background has them ignore these signals, and so would all processes that they
# start: PgBouncer would not end.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Hypothesis draws the same examples in every run, and no example has to be fast.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "same examples", derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    settings.load_profile("same examples")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("octavo")
    group.addoption("--all", action="store_true", help="Run the long tests too.")
    group.addoption("--shard", type=parse_shard, help="Run one of several parts of equal length, as 2/6.")
    group.addoption(
        "--changed-since", metavar="COMMIT", nargs="?", const="", help="Run the long tests too that changes since a "
        "commit can have broken; by default since every test has passed: the last release, or .ci/last-full-run."
    )  # fmt: skip
    group.addoption("--minutes", type=float, default=5.0, help="How long the tests that it adds may take.")
    group.addoption(
        "--only-long-in", metavar="FILE", action="append", default=[], help="Leave out this file's tests that are not "
        "long: they have run."
    )  # fmt: skip


LONG_S = 300.0  # that a long test may take, if it does not say
LEFT_OUT = pytest.StashKey[dict[str, int]]()
DISTANCES = pytest.StashKey[dict[str, int] | None]()
LONG_SPENT_S = pytest.StashKey[float]()
DEFAULT_PORT = pytest.StashKey[socket.socket]()


def hold_default_port() -> socket.socket:
    """Take the default port of servers: a test that starts one there always fails, not only beside another server."""
    held = socket.socket()
    with contextlib.suppress(OSError):  # another server has it, which does as well
        held.bind(("", ServerArgs.port))
    return held


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.stash[DEFAULT_PORT] = hold_default_port()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # what is collected stays: looking for garbage among it is a fifth of the time
    config.pluginmanager.register(watchdog, "watchdog")
    if config.getoption("changed_since") is None or config.getoption("all"):
        config.stash[DISTANCES] = None
    elif hasattr(config, "workerinput"):
        config.stash[DISTANCES] = config.workerinput["octavo_distances"]
    else:
        base = config.getoption("changed_since") or base_of_changes()
        graph = ImportGraph()
        changed = changed_files(base) if base else EVERYTHING
        print(f"long tests: {len(changed)} files have changed since {base or 'ever (no base is known here)'}")
        config.stash[DISTANCES] = graph.distances(changed)
    config.stash[LEFT_OUT] = {}
    config.stash[LONG_SPENT_S] = 0.0


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["octavo_distances"] = node.config.stash[DISTANCES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT].update(getattr(node, "workeroutput", {}).get("octavo_left_out", {}))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, long files in parts; the longest first, so that none works on alone at the end."""
    from xdist.scheduler import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):
        def schedule(self) -> None:
            if self.collection is None:
                parts = scopes(next(iter(self.registered_collections.values())))
                self.scope_of = {nodeid: scope for scope, tests in parts.items() for nodeid in tests}
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self.scope_of[nodeid]

    config.option.loadscopereorder = False
    return LongestFirst(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this tier or shard does not have."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))
    chosen = {item.nodeid for item in items}
    if not config.getoption("all"):
        long = [item.nodeid for item in items if item.get_closest_marker("long")]
        modules = {item.nodeid: item.module.__name__ for item in items if isinstance(item, pytest.Function)}
        if (distances := config.stash[DISTANCES]) is None:
            left_out = {"long tests": long}
        else:
            budget_s = config.getoption("minutes") * 60 * max(1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
            _, too_many, others = affected(long, modules.__getitem__, distances, budget_s)
            left_out = {"long tests that the change can have broken, for want of time": too_many,
                        "long tests that nothing of the change reaches": others}  # fmt: skip
        for why, nodeids in left_out.items():
            chosen.difference_update(nodeids)
            for nodeid in nodeids:
                place = f"{why}: {nodeid.partition('::')[0]}"
                config.stash[LEFT_OUT][place] = config.stash[LEFT_OUT].get(place, 0) + 1
    if have_run := {str(Path(file).absolute()) for file in config.getoption("only_long_in")}:
        chosen.difference_update(
            item.nodeid for item in items if str(item.path) in have_run and not item.get_closest_marker("long")
        )
    if config.getoption("shard"):
        chosen &= shard([item.nodeid for item in items if item.nodeid in chosen], *config.getoption("shard"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
    if hasattr(config, "workeroutput"):
        config.workeroutput["octavo_left_out"] = config.stash[LEFT_OUT]
        by_nodeid = {item.nodeid: item for item in items}
        items[:] = [by_nodeid[nodeid] for tests in scopes(by_nodeid).values() for nodeid in tests]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Estimates can be wrong: when the long tests of a change have taken their minutes, the rest of them is skipped."""
    config = item.config
    if config.stash[DISTANCES] is None or not item.get_closest_marker("long"):
        return (yield)
    if config.stash[LONG_SPENT_S] > config.getoption("minutes") * 60:
        item.add_marker(pytest.mark.skip(reason="long tests that the change can have broken, for want of time"))
    begin = time.monotonic()
    try:
        return (yield)
    finally:
        config.stash[LONG_SPENT_S] += time.monotonic() - begin


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[DISTANCES] is not None:
        for place, count in sorted(config.stash[LEFT_OUT].items()):
            terminalreporter.write_line(f"left out, {place} ({count})")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fetch the default model before any test's time counts: an index may be slow."""
    if hasattr(session.config, "workerinput") or session.config.getoption("collectonly"):
        return
    with contextlib.suppress(ImportError, LoadError):  # those who need it will say so
        from octavo.loading.default_model import fetch_default_model

        fetch_default_model()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Generator[None]:
    """Random numbers of a fixture depend on its name and parameter, and not on the tests before."""
    seed_everything(fixturedef.argname, str(getattr(request, "param", "")))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Random numbers of a test depend on its name, and not on the tests before."""
    seed_everything(item.name)
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def no_garbage_in_imports() -> Iterator[None]:
    """Collections of garbage, of which engines ask for some, look at nothing that importing all tests has left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def own_collector() -> Iterator[None]:
    """What a server sets about collections of garbage in this process ends with its test."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.fixture(scope="session", autouse=True)
def one_patch_of_tritons_language() -> None:
    """Triton's interpreter replaces the language's functions for a launch, and looks for all that there are to replace
    again whenever a kernel calls a function, which is nearly half of its time. Here they are replaced once and stay
    so: where kernels are interpreted nothing else uses them."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if os.environ.get("TRITON_INTERPRET") != "1" or not hasattr(interpreter, "_LangPatchScope"):
        return
    language = sys.modules["triton.language"]
    interpreter._patch_lang(SimpleNamespace(__globals__={"language": language, "core": language.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


@pytest.fixture(scope="session", autouse=True)
def one_store_of_certificates() -> None:
    """For each client httpx reads all certificate authorities, which takes 25 ms. Here they are read once."""
    with contextlib.suppress(ImportError):
        import httpx._transports.default as transports

        make = transports.create_ssl_context  # type: ignore[attr-defined]
        once = functools.cache(lambda authorities, **asked: make(**asked))
        transports.create_ssl_context = lambda **asked: once(os.environ.get("SSL_CERT_FILE"), **asked)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer of 256 + 3 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"}'
    )
    return folder
