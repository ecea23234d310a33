"""Finds what makes a test depend on luck: on clocks, on ports nobody holds, on random numbers without a seed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

CLOCKS = {"monotonic", "perf_counter", "time"}
DRAWS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "random",
    "normal",
    "choice",
    "shuffle",
    "sample",
    "randrange",
    "uniform",
}
SOURCES = {"default_rng", "RandomState", "Random"}

SLEEP = "sleeps: wait for what is to happen (tests/waiting.py: wait_until, until, Clock)"
PAUSE = "waits for less than a second: that is a sleep, or a limit that a slow machine exceeds (within)"
PATIENCE = "a client that gives up by a clock: hang up once the server has the request (tests/leaving.py)"
SPEED = "says how long something may take: limits are for waits (tests/waiting.py: wait_until, within)"
PORT = "binds any port: take one that stays held (tests/ports.py), or listen and read it back"
SEED = "draws without a seed: take one from a name (tests/seeds.py), or draw inside of a test or fixture"
MEMORY = "measures the memory of a process that others used: do it in a child (tests/children.py)"
FILES = "counts open files, of which earlier tests left some: compare what is open (tests/open_files.py)"
INDEX = "takes a timeout for a failure, which has no output: tests/installing.py says why something is not there"


def find_luck(source: str) -> list[tuple[int, str]]:
    """(line, what is wrong) of a module."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    found = {(node.lineno, why) for node in nodes if (why := _wrong(node))}  # type: ignore[attr-defined]
    suspicious = any(name in source for name in ("monotonic", "perf_counter", "time.time", "memory_", "RUSAGE_SELF"))
    for function in nodes if suspicious else ():
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            within = list(ast.walk(function))
            found |= {(line, SPEED) for line in _speeds(within)}
            if function.name.startswith("test_"):
                found |= {(line, MEMORY) for line in _own_memory(within)}
    found |= {(node.lineno, SEED) for node in _at_import(tree) if isinstance(node, ast.Call) and _draws(node)}
    seeded = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "manual_seed"}
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node.func) == "torch.Generator" and id(node) not in seeded:
            found.add((node.lineno, SEED))
    return sorted(found)


def _wrong(node: ast.AST) -> str | None:
    if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Tuple):
        return INDEX if any(_name(one).endswith("TimeoutExpired") for one in node.type.elts) else None
    if isinstance(node, ast.Attribute) and node.attr in ("ReadTimeout", "TimeoutException"):
        return PATIENCE
    if not isinstance(node, ast.Call):
        return None
    name = _name(node.func)
    method = name.rpartition(".")[2]
    first = node.args[0] if node.args else None
    if name in ("time.sleep", "asyncio.sleep", "sleep") and not (isinstance(first, ast.Constant) and first.value == 0):
        return SLEEP
    limits = [one.value for one in node.keywords if one.arg == "timeout"]
    limits += [first] if first is not None and method in ("wait", "join", "result") else []
    if any(isinstance(one, ast.Constant) and isinstance(one.value, float | int) and one.value < 1 for one in limits):
        return PAUSE
    if method == "bind" and isinstance(first, ast.Tuple) and isinstance(first.elts[-1], ast.Constant):
        return PORT if first.elts[-1].value == 0 else None
    if method == "num_fds" or (name == "len" and isinstance(first, ast.Call) and "/fd'" in ast.unparse(first)):
        return FILES
    if (method in SOURCES and not node.args and not node.keywords) or (
        name in ("torch.seed", "random.seed") and not node.args
    ):
        return SEED
    return None


def _speeds(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of a function's assertions that something took less than so long."""
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    measured: set[str] = set()
    for _ in range(2):  # a difference is made of readings
        for node in assigned:
            if _reads_clock(node.value, measured):
                measured |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Assert):
            for compare in ast.walk(node.test):
                if isinstance(compare, ast.Compare):
                    sides = [compare.left, *compare.comparators]
                    for left, sign, right in zip(sides, compare.ops, sides[1:], strict=False):
                        less = {ast.Lt: left, ast.LtE: left, ast.Gt: right, ast.GtE: right}.get(type(sign))
                        if less is not None and _reads_clock(less, measured):
                            yield node.lineno


def _reads_clock(node: ast.AST, measured: set[str]) -> bool:
    return any(
        (isinstance(one, ast.Call) and _name(one.func) in {f"time.{clock}" for clock in CLOCKS} | CLOCKS - {"time"})
        or (isinstance(one, ast.Name) and one.id in measured)
        for one in ast.walk(node)
    )


def _own_memory(nodes: Iterable[ast.AST]) -> Iterator[int]:
    reads_memory = any(isinstance(node, ast.Attribute) and node.attr.startswith("memory_") for node in nodes)
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node.func) == "psutil.Process" and not node.args and reads_memory:
            yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr == "RUSAGE_SELF":
            yield node.lineno


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """What is evaluated when the module is imported, but for what functions do."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _at_import(node)


def _draws(call: ast.Call) -> bool:
    library, _, method = _name(call.func).rpartition(".")
    has_generator = any(one.arg == "generator" for one in call.keywords)
    return library in ("random", "np.random", "numpy.random", "torch") and method in DRAWS and not has_generator


def _name(node: ast.AST) -> str:
    """`a.b.c` as it is written; calls and subscripts on the way are left out."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
