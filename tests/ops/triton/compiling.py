"""Compiles the Triton kernels for GPUs that are not there, and reads what the assembler says of the result.

`python -m tests.ops.triton.compiling [CASE ...]` prints a table for 8.0, 9.0 and 10.0, or with `--json` what it is made
of. A `Case` calls the project's own wrappers with tensors as the engine has them, so that each kernel is compiled with
the arguments and meta-parameters that it is launched with; each module of the folder compile_cases/ is one family of
kernels and lists its own in `CASES`. That happens in worker processes: they see Triton without its interpreter, behind
a driver that names the wanted GPU and launches nothing. Tensors are on the CPU and mostly `torch.empty`: nobody reads
them.

Relied on, alike in Triton 3.6 to 3.9: `triton.runtime.driver.driver.set_active` and the four methods of `Driver`;
`JITFunction.run(*args, grid, warmup, **kwargs)`, which with `warmup` compiles and returns the kernel; `asm["cubin"]`
and `metadata` (`num_warps`, `shared`) of that; and cuobjdump, which comes with Triton. Registers, stack
and instructions are read from the cubin; Triton throws ptxas's report away.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

CAPABILITIES = (80, 90)
OTHER_CAPABILITIES = (89, 100)  # kernels are only compiled for these, and must fit
_ROOT = Path(__file__).parents[3]

# What one multiprocessor has ("Compute Capabilities" of the CUDA programming guide).
MULTIPROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148}  # of an A100, an L40S, an H100 and a B200
MAX_SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # of one block
_SHARED_BYTES = {
    80: 164 << 10,
    90: 228 << 10,
    100: 228 << 10,
}  # of all, of which each block takes 1 KiB more than it asks for
_REGISTERS, _MAX_WARPS, _MAX_BLOCKS = 65536, 64, 32


@dataclass(frozen=True, slots=True)
class Case:
    """Something to call that launches kernels, and what its kernels must keep to. Results of the call mean nothing.

    `min_warps` is how many must fit on a multiprocessor at once; `max_registers` goes up to what a thread can have, and
    `max_stack_bytes` of it may be spilled, if not in an innermost loop.
    """

    run: Callable[[], object]
    min_warps: int = 8
    max_registers: int = 255
    max_stack_bytes: int = 0
    overlaps: bool = False  # products and what else its loops compute: see `test_compile`
    capabilities: tuple[int, ...] = CAPABILITIES


def all_cases() -> dict[str, Case]:
    """ "family.case" -> the cases of every module in compile_cases/."""
    cases = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent / "compile_cases")]):
        module = importlib.import_module(f"tests.ops.triton.compile_cases.{info.name}")
        cases |= {f"{info.name}.{name}": case for name, case in module.CASES.items()}
    return cases


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one GPU. `stack_bytes` of a thread are what was spilled: Triton's kernels have no arrays.

    `loop_spills` is how many instructions of innermost loops store or load that. `fuses` says that the compiler may
    contract products and sums, which no launch lets it. `products_under_way` is how many products of an innermost loop
    nothing has waited for when it begins again (Hopper's are computed beside other instructions), and `is_serialized`
    says that the assembler has each instruction of a product wait for the one before.
    """

    case: str
    kernel: str
    capability: int
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    loop_spills: int = 0
    fuses: bool = False
    products_under_way: int = 0
    is_serialized: bool = False

    @property
    def programs_per_multiprocessor(self) -> int:
        return self.warps_per_multiprocessor // self.num_warps

    @property
    def warps_per_multiprocessor(self) -> int:
        """How many warps may run at once: registers are handed out to a warp in pieces of 256."""
        registers = -(-self.registers * 32 // 256) * 256 * self.num_warps
        shared = self.shared_bytes + 1024
        blocks = (_REGISTERS // registers, _SHARED_BYTES[self.capability] // shared, _MAX_WARPS // self.num_warps)
        return min(*blocks, _MAX_BLOCKS) * self.num_warps


@dataclass(frozen=True, slots=True)
class Failed:
    """A case that raised, and what."""

    case: str
    capability: int
    error: str


def compile_all(cases: Mapping[str, Case]) -> tuple[list[Compiled], list[Failed]]:
    """Compile every case for each of its capabilities, in as many processes as this one may use processors. The cache
    of kernels is empty at first and gone afterwards, so that each run compiles what is in the source now."""
    work: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
    for name, case in cases.items():
        for capability in case.capabilities:
            work.put((name, capability))
    num_workers = min(len(os.sched_getaffinity(0)), work.qsize())
    for _ in range(num_workers):
        work.put(None)
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(max(1, num_workers)) as pool:
        futures = [pool.submit(_drive_worker, work, cache) for _ in range(num_workers)]
        lines = [line for future in futures for line in future.result()]
    compiled = [Compiled(**line) for line in lines if "error" not in line]
    failed = [Failed(**line) for line in lines if "error" in line]
    return sorted(compiled, key=lambda c: (c.case, c.kernel, c.capability)), failed


def _drive_worker(work: SimpleQueue[tuple[str, int] | None], cache: str) -> list[dict[str, Any]]:
    """Feed a process from `work` until None comes -> what it answered. One that dies is followed by another."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Launches that do not say whether products and sums are fused fuse them, whatever Triton's default is: `fuses`.
    env |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.ops.triton.compiling", "--worker"]
    lines: list[dict[str, Any]] = []
    with subprocess.Popen(
        command, cwd=_ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while (task := work.get()) is not None:
            try:
                process.stdin.write(json.dumps(task) + "\n")
                lines += json.loads(process.stdout.readline())
            except (BrokenPipeError, json.JSONDecodeError):  # the compiler crashed
                lines.append(asdict(Failed(*task, f"the worker ended with code {process.wait()}")))
                return lines + _drive_worker(work, cache)
    return lines


class Driver:
    """As much of Triton's CUDA driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> object:
        import torch

        return torch.device("cpu")


def _work() -> None:
    """A worker: reads [case, capability] line by line and answers each with a list of objects on one line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what kernels, Triton or ptxas print must not be taken for an answer

    import torch
    from triton.runtime import jit
    from triton.runtime.driver import driver

    from octavo.ops.triton import launch

    kernels: list[Any] = []
    compile_or_run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        kernels.append(compile_or_run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    jit.JITFunction.run = compile_only
    target = Driver(CAPABILITIES[0])
    driver.set_active(target)
    # Before any module of kernels is imported, which may take these by name.
    launch._capability = lambda device: divmod(target.capability, 10)
    launch.device = lambda: torch.device("cpu")
    launch._num_multiprocessors = lambda device: MULTIPROCESSORS[target.capability]

    cases = all_cases()
    for line in sys.stdin:
        case, target.capability = json.loads(line)
        kernels.clear()
        found: dict[str, Any] = {}
        try:
            cases[case].run()
            assert kernels, "no kernel was launched"
            found = {kernel.hash: _read(case, target.capability, kernel) for kernel in kernels}
        except Exception as error:
            found[""] = Failed(case, target.capability, _explain(error))
        answers.write(json.dumps([asdict(entry) for entry in found.values()]) + "\n")


def _explain(error: BaseException) -> str:
    """The error and its causes: Triton raises one for each function that it was compiling."""
    lines = [f"{type(error).__name__}: {error}"]
    while (error := error.__cause__) is not None:
        lines.append(f"{type(error).__name__}: {error}")
    return "\n".join(lines)


def _read(case: str, capability: int, kernel: Any) -> Compiled:
    """What cuobjdump says of a compiled kernel. Shared memory is given at launch, so Triton knows how much it is.
    Instructions take long to be written out: they are where something may be spilled, or products be waited for."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def dumped(what: str) -> str:
            command = [knobs.nvidia.cuobjdump.path, what, file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dumped("-res-usage")))
        stack = int(numbers["STACK"]) + int(numbers["LOCAL"])
        sass = dumped("-sass") if stack or "wgmma" in kernel.asm["ptx"] else None
    metadata = kernel.metadata
    found = Compiled(
        case, metadata.name, capability, metadata.num_warps, int(numbers["REG"]), stack, metadata.shared,
        fuses=metadata.enable_fp_fusion,
    )  # fmt: skip
    if sass is None:
        return found
    return replace(
        found,
        loop_spills=loop_spills(sass),
        products_under_way=products_under_way(sass),
        is_serialized=is_serialized(sass),
    )


def loop_spills(sass: str) -> int:
    """How many instructions of innermost loops store or load local memory."""
    return sum(bool(re.search(r"\b(STL|LDL)\b", each)) for loop in innermost_loops(sass) for each in loop)


def products_under_way(sass: str) -> int:
    """Of the innermost loop that has the most: groups of products begun, less waits for them."""
    begun = [sum("WARPGROUP.ARRIVE" in each for each in loop) for loop in innermost_loops(sass)]
    waits = [sum("WARPGROUP.DEPBAR" in each for each in loop) for loop in innermost_loops(sass)]
    return max((b - w for b, w in zip(begun, waits, strict=True)), default=0)


def is_serialized(sass: str) -> bool:
    """Whether in some innermost loop each of several products is waited for."""
    loops = innermost_loops(sass)
    products = [sum("GMMA" in each for each in loop) for loop in loops]
    waits = [sum("WARPGROUP.DEPBAR" in each for each in loop) for loop in loops]
    return any(count > 1 and waited >= count for count, waited in zip(products, waits, strict=True))


def innermost_loops(sass: str) -> list[list[str]]:
    """Their instructions. A loop is what lies between a branch backwards and its target."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*);", sass)
    instructions = [(int(address, 16), instruction) for address, instruction in found]
    assert instructions
    ends: dict[int, int] = {}
    for address, instruction in instructions:
        branch = re.search(r"\bBRA\b.* (0x[0-9a-f]+)", instruction)
        if branch and (target := int(branch[1], 16)) <= address:
            ends[target] = address
    innermost = [(begin, end) for begin, end in ends.items() if not any(begin < other <= end for other in ends)]
    return [[each for address, each in instructions if begin <= address <= end] for begin, end in innermost]


def table(compiled: Iterable[Compiled]) -> Iterator[str]:
    """Lines for people."""
    yield f"{'case':30} {'kernel':30}   cc warps registers spilled  shared warps/SM"
    for c in compiled:
        yield (
            f"{c.case:30} {c.kernel:30} {c.capability / 10:4} {c.num_warps:5} {c.registers:9} {c.stack_bytes:7} "
            f"{c.shared_bytes:7} {c.warps_per_multiprocessor:8}"
        )


def _main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="a case, or the beginning of its name (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    cases = all_cases()
    wanted = {
        name: replace(case, capabilities=(*case.capabilities, 100))
        for name, case in cases.items()
        if not args.cases or name.startswith(tuple(args.cases))
    }
    compiled, failed = compile_all(wanted)
    if args.json:
        entries = [asdict(c) | {"warps_per_multiprocessor": c.warps_per_multiprocessor} for c in compiled]
        print(json.dumps({"compiled": entries, "failed": [asdict(f) for f in failed]}, indent=1))
    else:
        print("\n".join(table(compiled)))
        for f in failed:
            print(f"FAILED {f.case} for {f.capability / 10}: {f.error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        _work()
    else:
        sys.exit(_main())
