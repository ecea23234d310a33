"""What tests of several folders share: the default model, and a tokenizer for models made of random numbers."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.hardware import why_not_cuda
from tests.seeds import seed_everything

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

# Hypothesis draws the same examples in every run, and no example has to be fast.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "same examples", derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    settings.load_profile("same examples")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="Run the long tier too, as CI does.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
    items[:] = [item for item in items if not item.get_closest_marker("long")]


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
