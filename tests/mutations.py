"""Breaks the code in small ways and says whether the tests notice: `python -m tests.mutations octavo/scheduling`.

Each mutation changes one operator, constant or condition of a module or of a C++ file, in a copy of the checkout. The
tests of the short tier that import the module run, nearest first, until one fails or they have used `--seconds` of a
processor. A mutation that survives changes nothing that anybody can see, or a test is missing. C++ is compiled for this
machine's best instruction set; files of other sets are left out, and mutations that do not compile are drawn again.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.selection import ROOT, ImportGraph

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip
_CPP_OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "/": "*",
    "%": "+", "+=": "-=", "-=": "+=", "&&": "||", "||": "&&", "&": "|", "|": "&", "<<": ">>", ">>": "<<",
}  # fmt: skip
# What is matched and not mutated: comments, texts, preprocessor lines, heads of templates, messages of assertions.
_CPP_PLACES = re.compile(
    r"""(?P<skipped> //[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | ^[ ]*\#(?:\\\n|[^\n])*
        | \btemplate[ ]?<[^{;]*?>\s | \bstatic_assert\([^;]*;)
        | (?<=[ ])(?P<operator>[<>=!]=|[-+]=|[<>&|]{1,2}|[-+*/%])(?=[ ])
        | (?<![\w.])(?P<constant>[0-9]+)(?![\w.])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_OTHER_SETS = re.compile(r"(^|_)(amx|avx2|neon|portable|i8mm)\.h$|arm_|topology|module\.cpp")


@dataclass(frozen=True)
class Mutation:
    """Bytes `begin` to `end` of a file become `text`."""

    file: Path
    begin: int
    end: int
    text: str
    kind: str

    def __str__(self) -> str:
        source = self.file.read_bytes()
        line = source.count(b"\n", 0, self.begin) + 1
        was = source[self.begin : self.end].decode().splitlines()[0]
        return f"{self.file.relative_to(ROOT)}:{line}: {self.kind}: {was}"

    def applied(self) -> bytes:
        source = self.file.read_bytes()
        return source[: self.begin] + self.text.encode() + source[self.end :]


def mutations(file: Path) -> Iterator[Mutation]:
    """All that are possible in a file of Python or C++."""
    if file.suffix != ".py":
        yield from cpp_mutations(file)
        return
    source = file.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    for node, kind in places(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(mutate(node))
        yield Mutation(file, begin, end, f"({text})" if isinstance(node, ast.expr) else text, kind)


def cpp_mutations(file: Path) -> Iterator[Mutation]:
    source = file.read_text()
    for match in _CPP_PLACES.finditer(source):
        if match["operator"] or match["constant"]:
            new = _CPP_OPERATORS[match["operator"]] if match["operator"] else str(int(match["constant"]) + 1)
            begin = len(source[: match.start()].encode())
            yield Mutation(file, begin, begin + len(match[0]), new, match.lastgroup or "")


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Each node of code that runs and can be mutated, with the kind of the mutation."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        match node:
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                skipped.update(ast.walk(node))
            case ast.Raise() | ast.JoinedStr() | ast.AnnAssign(value=None):
                skipped.update(ast.walk(node))  # texts of errors, types
            case ast.arg(annotation=ast.AST() as annotation) | ast.AnnAssign(annotation=annotation):
                skipped.update(ast.walk(annotation))
            case ast.FunctionDef(returns=ast.AST() as annotation):
                skipped.update(ast.walk(annotation))
            case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
                yield node, "comparison"
            case ast.BinOp(op=op) if type(op) in _OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
                yield node, "operator"
            case ast.BoolOp():
                yield node, "and/or"
            case ast.UnaryOp(op=ast.Not()):
                yield node, "not"
            case ast.Constant(value=bool() | int()):
                yield node, "constant"
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield node, "statement"


def mutate(node: ast.AST) -> ast.AST:
    """The node that stands in its place."""
    match node:
        case ast.Compare():
            return ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators)
        case ast.BinOp():
            return ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        case ast.BoolOp():
            return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp():
            return node.operand
        case ast.Constant(value=bool()):
            return ast.Constant(not node.value)
        case ast.Constant():
            return ast.Constant(node.value + 1)
    return ast.Pass()


def tests_of(graph: ImportGraph, file: Path) -> list[str]:
    """The test files that import a module: the nearest first, and its package's folder as if two imports nearer."""
    distances = graph.distances([str(file.relative_to(ROOT))])
    package, words = file.parent.name, file.stem.split("_")
    found = [
        (distance - 2 * (package in path.parts) - any(word in path.stem for word in words), path)
        for name, distance in distances.items()
        if (path := graph.paths.get(name)) is not None and path.name.startswith("test_")
        and "e2e" not in path.parts
    ]  # fmt: skip
    return [str(path.relative_to(ROOT)) for _, path in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--number", type=int, default=100, help="of mutations, drawn from all that are possible")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120, help="of a processor for the tests of each mutation")
    args = parser.parse_args()

    files = [file for path in args.paths for file in (sorted((ROOT / path).rglob("*.*")) or [ROOT / path])]
    files = [each for each in files if each.suffix in (".py", ".h", ".cpp") and not _OTHER_SETS.search(each.name)]
    every = [mutation for file in files for mutation in mutations(file)]
    random.Random(args.seed).shuffle(every)
    graph = ImportGraph()
    caught = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "octavo"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".ci-venv", "build", "__pycache__"))
        compileall.compile_dir(copy / "octavo", quiet=1)
        compileall.compile_dir(copy / "tests", quiet=1)
        for mutation in every:
            source = mutation.file.read_bytes()
            target = copy / mutation.file.relative_to(ROOT)
            target.write_bytes(mutation.applied())
            if mutation.file.suffix == ".py" or compiles(copy):
                how = run_tests(copy, tests_of(graph, mutation.file), args.seconds)
                caught += how.startswith("caught")
                tried += 1
                print(f"{tried}/{args.number} {how}: {mutation}", flush=True)
            target.write_bytes(source)
            if tried == args.number:
                break
    print(f"{caught} of {tried} caught")


def compiles(copy: Path) -> bool:
    """Compile the native module of the copy and put it beside the package. Say whether that was possible."""
    build = copy / "build"
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": copy}
    options = ["-DOCTAVO_HOST_ONLY=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    if not build.exists():
        lists = copy / "CMakeLists.txt"
        lists.write_text(lists.read_text().replace("-O3", "-O1"))  # a third of the time
        subprocess.run(["cmake", "-B", build, *options], check=True, **pipes)
    if subprocess.run(["cmake", "--build", build], **pipes).returncode:
        return False
    for module in build.glob("_cpu*.so"):
        shutil.copy(module, copy / "octavo")
    return True


def run_tests(copy: Path, tests: list[str], seconds: float) -> str:
    """How a mutation in the copy ended: caught by a test, or survived.

    Files run in groups of 2, 4, 8 and so on: pytest imports all that it is given before it runs the first test.
    """
    begin, size = 0, 2
    while begin < len(tests):
        before = process_seconds()
        how = run_group(copy, tests[begin : begin + size], seconds)
        seconds -= process_seconds() - before
        if how != "survived":
            return how
        if seconds <= 0:
            return "survived for want of time"
        begin, size = begin + size, size * 2
    return "survived"


def process_seconds() -> float:
    """Seconds of a processor that children which have ended took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_group(copy: Path, tests: list[str], seconds: float) -> str:
    """How a mutation in the copy ended with some of its tests."""
    limit = math.ceil(seconds)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    bound = partial(resource.setrlimit, resource.RLIMIT_CPU, (limit, limit))
    with subprocess.Popen(command, cwd=copy, env=environ, preexec_fn=bound, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=20 * limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "survived for want of time"
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return "survived for want of time"
    if process.returncode in (0, 5):
        return "survived"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"caught by {failed[0].split()[1]}" if failed else "caught"


if __name__ == "__main__":
    main()
