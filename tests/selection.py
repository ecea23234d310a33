"""Which tests a change can have broken: the import graph of Octavo and its tests, read from the sources.

The conftest runs the long tests that import what has changed since a base, directly or through others, nearest first.
Nothing is imported here. An import counts within functions too, but not under `if TYPE_CHECKING`. So does the name of a
module in a string, and a program of Octavo's that a test starts. A package whose `__init__` loads names when they are
used is two nodes: `octavo` for modules below it, `octavo:names` for whoever imports its names.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON_PACKAGES = ("octavo", "tests", "benchmarks")  # whose modules import each other by name
FOLDERS = (*PYTHON_PACKAGES, "examples", "docs", "deploy")  # with modules that tests import or run
NATIVE = "octavo._cpu"  # made of everything in csrc/
SERVER = "octavo.entrypoints.cli.main"  # the program `octavo`
NAMES = ":names"
EVERYTHING = ("pyproject.toml", "constraints.txt")  # a change of these can break any test
_LEAVES = (ast.expr_context, ast.Name)  # which say nothing of imports, and are most of a module
_MODULE_NAME = re.compile(r"\b(?:octavo|tests|benchmarks)(?:\.[A-Za-z_]\w*)+|\boctavo\b")
_FILE_NAME = re.compile(r"[\w./-]*\w\.(?:py|yml|yaml|json|md|toml|conf|service|html|js|css|sh|txt|jinja|csv)\b")


class ImportGraph:
    """Modules by name, what each imports, and the distance of a test from a change."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
        self.paths = {_module_name(file.relative_to(root)): file for file in files}
        self.packages = {name for name, path in self.paths.items() if path.name == "__init__.py"}
        self.imports_of_names: dict[str, set[str]] = {}
        self.imports = {name: set(self._imports_of(name, file)) for name, file in self.paths.items()}
        self.imports.update(self.imports_of_names)
        self.importers: dict[str, set[str]] = {}
        for name, imported in self.imports.items():
            for each in imported:
                self.importers.setdefault(each, set()).add(name)

    def _imports_of(self, name: str, file: Path) -> Iterator[str]:
        """Modules that the file imports or names, and the packages that they lie in: their `__init__` runs first."""
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file.name == "__init__.py":
            yield from self._with_packages(name, self._names_in(name, file, tree.body, nested=False))
            self.imports_of_names[f"{name}{NAMES}"] = {
                name,
                *self._with_packages(name, self._names_in(name, file, tree.body, nested=True)),
            }
            return
        found = set(self._names_in(name, file, tree.body, nested=True))
        if name.startswith("tests."):  # pytest imports the conftest of each folder above a test
            parts = name.split(".")[:-1]
            found.update(".".join([*parts[:depth], "conftest"]) for depth in range(1, len(parts) + 1))
        yield from self._with_packages(name, found)

    def _names_in(self, name: str, file: Path, body: list[ast.stmt], nested: bool) -> Iterator[str]:
        """What these statements import; with `nested` also what functions do and what strings name."""
        ways: deque[ast.AST] = deque(body)
        while ways:
            node = ways.popleft()
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name
                    yield f"{alias.name}{NAMES}"
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
                    base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
                yield base
                for alias in node.names:
                    module = f"{base}.{alias.name}"
                    yield module if module in self.paths or module == NATIVE else f"{base}{NAMES}"
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                ways.extend(node.orelse)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                pass  # a docstring
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if nested:
                    yield from self._named_in(name, node.value)
            elif nested or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                ways.extend(each for each in ast.iter_child_nodes(node) if not isinstance(each, _LEAVES))

    def _with_packages(self, name: str, found: Iterable[str]) -> Iterator[str]:
        for each in found:
            module, names, _ = each.partition(NAMES)
            if names and module in self.packages:
                yield each
            parts = module.split(".")
            for depth in range(1, len(parts) + 1):
                module = ".".join(parts[:depth])
                if module != name and (module in self.paths or module == NATIVE):
                    yield module

    def _named_in(self, name: str, text: str) -> Iterator[str]:
        """Modules and programs that a string names, as commands and scripts for a child process do."""
        for match in _MODULE_NAME.finditer(text):
            if match[0] != "octavo":
                known = match[0] in self.paths or match[0] == NATIVE
                yield match[0] if known else f"{match[0].rpartition('.')[0]}{NAMES}"
            elif not name.startswith("octavo"):
                yield SERVER
                yield f"octavo{NAMES}"
        for match in _FILE_NAME.finditer(text):
            if match[0].endswith(".py"):
                yield from self._by_file_name.get(match[0].rpartition("/")[2], ())

    @property
    def _by_file_name(self) -> dict[str, list[str]]:
        """Programs that tests start by their files' names: those of folders that are no packages of Octavo."""
        if not hasattr(self, "_programs"):
            self._programs: dict[str, list[str]] = {}
            for name, path in self.paths.items():
                if not name.startswith(("octavo", "tests")):
                    self._programs.setdefault(path.name, []).append(name)
        return self._programs

    def distances(self, changed_files: Iterable[str]) -> dict[str, int]:
        """Modules that a change of these files (paths below the root) can break -> how many imports lie between."""
        ways = deque((name, 0) for file in changed_files for name in self._modules_of(file))
        found: dict[str, int] = {}
        while ways:
            name, distance = ways.popleft()
            if name not in found:
                found[name] = distance
                ways.extend((each, distance + 1) for each in self.importers.get(name, ()))
        return found

    def _modules_of(self, file: str) -> Iterator[str]:
        """The modules that a file is part of or that read it."""
        path = Path(file)
        if file in EVERYTHING:
            yield from self.paths
        elif path.parts[0] == "csrc" or file == "CMakeLists.txt":
            yield NATIVE
        elif path.suffix == ".py" and path.parts[0] in PYTHON_PACKAGES:
            yield _module_name(path)  # which may be gone
        elif path.parts[0] in ("octavo", "tests"):  # data of a package: its modules read it
            yield from (name for name, each in self.paths.items() if each.parent == self.root / path.parent)
        else:  # a page, an example, a script, something to deploy: tests that name the file or its folder read it
            if path.suffix == ".py" and path.parts[0] in FOLDERS:
                yield _module_name(path)
            for name, each in self.paths.items():
                if name.startswith(f"tests.{path.parts[0]}."):
                    yield name
                elif name.startswith("tests."):
                    text = each.read_text(encoding="utf-8")
                    if path.name in text or (len(path.parts) > 1 and f'"{path.parts[0]}"' in text):
                        yield name


def _module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def base_of_changes(root: Path = ROOT) -> str | None:
    """The newest commit of this history at which every test has passed: a release's tag, or the one that
    .ci/last-full-run names. None where there is neither, as in a shallow clone."""
    named = (root / ".ci" / "last-full-run").read_text().split()[0]
    tag = _git(root, "describe", "--tags", "--abbrev=0", "--match", "v*")
    known = [
        each for each in (named, tag) if each and _git(root, "merge-base", "--is-ancestor", each, "HEAD") is not None
    ]
    return min(known, key=lambda each: int(_git(root, "rev-list", "--count", f"{each}..HEAD") or 0), default=None)


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Files that differ from the base, those that git does not track yet included. A file that moved is two."""
    tracked = _git(root, "diff", "--name-only", "--no-renames", base)
    if tracked is None:
        raise ValueError(f"git knows no commit {base!r} here")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    return [*tracked.splitlines(), *untracked.splitlines()]


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
