"""Breaks the code in small ways and says whether the tests notice: `python -m tests.mutations octavo/scheduling`.

Each mutation changes one operator, constant or condition of a module, in a copy of the checkout. The tests of the short
tier that import the module run, nearest first, until one fails or they have used `--seconds` of a processor. A mutation
that survives changes nothing that anybody can see, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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


def mutated(source: str, node: ast.AST) -> str:
    """The module's text with the node replaced. `node` has positions in `source`."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    text = ast.unparse(mutate(node))
    if isinstance(node, ast.expr):
        text = f"({text})"
    return (source.encode()[:begin] + text.encode() + source.encode()[end:]).decode()


def tests_of(graph: ImportGraph, file: Path) -> list[str]:
    """The test files that import a module: the nearest first, and its package's folder as if two imports nearer."""
    distances = graph.distances([str(file.relative_to(ROOT))])
    package = file.parent.name
    found = [
        (distance - 2 * (package in path.parts), path)
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

    files = [file for path in args.paths for file in (sorted((ROOT / path).rglob("*.py")) or [ROOT / path])]
    every = [(file, node, kind) for file in files for node, kind in places(ast.parse(file.read_text()))]
    chosen = random.Random(args.seed).sample(every, min(args.number, len(every)))
    graph = ImportGraph()
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "octavo"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".ci-venv", "build", "__pycache__"))
        compileall.compile_dir(copy / "octavo", quiet=1)
        compileall.compile_dir(copy / "tests", quiet=1)
        for number, (file, node, kind) in enumerate(chosen, 1):
            source = file.read_text()
            target = copy / file.relative_to(ROOT)
            target.write_text(mutated(source, node))
            place = f"{file.relative_to(ROOT)}:{node.lineno}: {kind}: {ast.unparse(node).splitlines()[0]}"
            how = run_tests(copy, tests_of(graph, file), args.seconds)
            target.write_text(source)
            caught += how.startswith("caught")
            print(f"{number}/{len(chosen)} {how}: {place}", flush=True)
    print(f"{caught} of {len(chosen)} caught")


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
