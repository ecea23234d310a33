"""Packages import one way: no two of them import each other, directly or through others. The routes of a server
that starts import nothing that only some requests need."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import octavo
from octavo.entrypoints.http.app import LAZY_ROUTES

ROOT = Path(octavo.__file__).parent
NATIVE = "_cpu"  # a module without a source file


@functools.cache
def imports() -> dict[tuple[str, str], str]:
    """(importer, imported) of Octavo's top-level packages and modules -> where the import stands. Imports within
    functions and under `if TYPE_CHECKING` count."""
    found: dict[tuple[str, str], str] = {}
    for file in sorted(ROOT.rglob("*.py")):
        path = file.relative_to(ROOT)
        importer = path.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for imported in _imported(node):
                if imported != importer:
                    found.setdefault((importer, imported), f"octavo/{path}:{node.lineno}")  # type: ignore[attr-defined]
    return found


def _imported(node: ast.AST) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        first, *rest = name.split(".")
        if first == "octavo":
            # What is no module of its own comes from the package's __init__, which imports nearly everything.
            is_module = rest and (rest[0] == NATIVE or (ROOT / rest[0]).is_dir() or (ROOT / f"{rest[0]}.py").is_file())
            yield rest[0] if is_module else "__init__"


def find_cycle(edges: set[tuple[str, str]]) -> list[str] | None:
    """A shortest way from a node back to itself."""
    after: dict[str, list[str]] = {}
    for begin, end in sorted(edges):
        after.setdefault(begin, []).append(end)
    shortest: list[str] | None = None
    for start in after:
        ways, seen = [[start]], set[str]()
        while ways:
            way = ways.pop(0)
            for end in after.get(way[-1], ()):
                if end == start:
                    if shortest is None or len(way) < len(shortest) - 1:
                        shortest = [*way, start]
                    ways = []
                    break
                if end not in seen:
                    seen.add(end)
                    ways.append([*way, end])
    return shortest


def test_packages_import_one_way() -> None:
    found = imports()
    cycle = find_cycle(set(found))
    if cycle is not None:
        steps = [f"{a} imports {b} ({found[a, b]})" for a, b in itertools.pairwise(cycle)]
        raise AssertionError("packages import each other: " + "; ".join(steps))


def test_a_cycle_is_found_and_named() -> None:
    assert find_cycle({("a", "b"), ("b", "c"), ("c", "d")}) is None
    assert find_cycle({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "c")}) == ["c", "d", "c"]


def test_an_api_imports_no_other_api_but_openais() -> None:
    shared = {"http", "chat", "openai"}  # Responses and Messages become OpenAI's chats
    allowed = dict.fromkeys(("responses", "anthropic", "pooling", "audio", "batch"), shared)
    allowed |= {"openai": {"http", "chat", "cli", "utils"}, "chat": {"http", "openai"}}
    doors = ROOT / "entrypoints"
    for folder, may in allowed.items():
        files = sorted((doors / folder).rglob("*.py"))
        assert files
        for file in files:
            found = {name.split(".")[2] for name in re.findall(r"octavo\.entrypoints\.\w+", file.read_text("utf-8"))}
            assert found <= may | {folder}, file


def test_the_gateway_imports_nothing_of_the_engine() -> None:
    found = {imported for importer, imported in imports() if importer in ("gateway", "ollama")}
    assert found <= {
        "api_keys",
        "azure",
        "body_errors",
        "call_arguments",
        "errors",
        "field_names",
        "flags",
        "http_protocol",
        "http_server",
        "json_size",
        "logs",
        "messages_errors",
        "ollama",
        "page_files",
        "peer_addresses",
        "processes",
        "sse_reader",
        "trace_export",
        "version",
    }


def test_two_modules_of_the_doors_have_two_names() -> None:
    names = [file.name for file in (ROOT / "entrypoints").rglob("*.py") if file.name != "__init__.py"]
    twice = {name for name in names if names.count(name) > 1}
    assert twice <= {"api_server.py"}, "but for vLLM's import paths"


def test_the_map_has_all_kinds_of_imports() -> None:
    found = imports()
    assert ("bench", "entrypoints") in found
    assert ("engine", "metrics") in found, "only for type checkers"
    assert ("engine", "execution") in found, "only within functions"


def test_the_routes_import_nothing_that_only_some_requests_need() -> None:
    unwanted = [*LAZY_ROUTES, "octavo.entrypoints.pooling.pooling_protocol", "numpy", "torch", "transformers",
                "fastapi", "llguidance", "sqlite3"]  # fmt: skip
    code = (
        "import sys, octavo.entrypoints.http.uvicorn_server, octavo.entrypoints.cli.serve\n"
        f"print([name for name in {unwanted} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
