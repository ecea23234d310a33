"""What surrounds the kernels: choosing an instruction set, and the thread pool among threads, forks and exits."""

from __future__ import annotations

import ast
import math
import mmap
import os
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import _cpu
from tests.ops.kernel_cases import assert_same_bits, random
from tests.ops.tensors import cpu
from tests.waiting import within


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


LEAST_ISA = _cpu.available_isas()[-1]


@pytest.mark.long  # whose build has all
def test_the_best_instruction_set_comes_first_and_one_always_works() -> None:
    # What needs nothing that a machine of this kind may lack.
    least = "neon" if platform.machine() in ("aarch64", "arm64") else "portable"
    assert least == LEAST_ISA
    result = run_python("from octavo import _cpu; print(_cpu.isa())", OCTAVO_CPU_ISA="")
    assert result.stdout.strip() == _cpu.available_isas()[0]
    assert "emulated" not in result.stdout


def test_an_unknown_instruction_set_is_refused_with_those_available() -> None:
    before = _cpu.isa()
    with pytest.raises(ValueError, match=rf"'mmx' .* use one of: .*{LEAST_ISA}"):
        _cpu.set_isa("mmx")
    assert _cpu.isa() == before


def test_the_environment_sets_instruction_set_and_threads() -> None:
    code = "from octavo import _cpu; import octavo.ops.cpu; print(_cpu.isa(), _cpu.num_threads())"
    assert run_python(code, OCTAVO_CPU_ISA=LEAST_ISA, OCTAVO_CPU_THREADS="3").stdout.split() == [LEAST_ISA, "3"]
    for name, value in [("OCTAVO_CPU_ISA", "mmx"), ("OCTAVO_CPU_THREADS", "0"), ("OCTAVO_CPU_THREADS", "many")]:
        result = run_python(code, **{name: value})
        assert result.returncode != 0
        assert f"ConfigError: {name}={value}: " in result.stderr


def test_the_default_number_of_threads_fits_the_affinity_mask() -> None:
    code = "from octavo import _cpu; print(_cpu.default_placement()[0])"
    assert int(run_python(code).stdout) >= 1
    if hasattr(os, "sched_setaffinity"):
        for count in {1, min(2, len(os.sched_getaffinity(0)))}:
            mask = f"import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{count}]); "
            assert 1 <= int(run_python(mask + code).stdout) <= count


def test_all_nodes_compute_within_the_quota() -> None:
    two = {0: list(range(8)), 1: list(range(16, 24))}
    assert _cpu.place_threads({0: [0, 1, 2]}, math.inf) == (3, [])  # one node: the system's scheduler decides
    assert _cpu.place_threads({0: [0, 1, 2]}, 1.5) == (2, [])
    assert _cpu.place_threads(two, math.inf) == (16, [*two[0], *two[1]])
    assert _cpu.place_threads(two, 12) == (12, [0, 1, 2, 3, 4, 5, 16, 17, 18, 19, 20, 21])
    assert _cpu.place_threads(two, 7.5) == (8, two[0])  # a node has as many
    assert _cpu.place_threads(two, 0.2) == (1, two[0])
    uneven = {0: [0], 1: list(range(1, 8)), 3: [8, 9]}
    for quota in range(8, 11):
        count, cpus = _cpu.place_threads(uneven, quota)
        assert count == quota == len(set(cpus))


@pytest.mark.parametrize("nodes", [[], [0, 0, 0, 1, 1, 3], [0, 1, 0, 1, 0, 1], [5, 5, 5, 5, 5, 2]])
def test_every_thread_helps_every_other_and_those_of_its_node_first(nodes: list[int]) -> None:
    for thread in range(6):
        helped = [_cpu.victim(nodes, 6, thread, step) for step in range(1, 6)]
        assert sorted([thread, *helped]) == [*range(6)]
        if nodes == sorted(nodes) or nodes[0] == 5:
            num_near = nodes.count(nodes[thread]) - 1 if nodes else 5
            assert all(not nodes or nodes[other] == nodes[thread] for other in helped[:num_near])


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the system has no NUMA policies")
def test_pages_are_placed_and_what_lies_beside_them_is_not() -> None:
    page = mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, 16 * page), np.uint8)

    def policies() -> dict[int, str]:
        lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
        begin = memory.ctypes.data
        return {
            (int(line[0], 16) - begin) // page: line[1] for line in lines if 0 <= int(line[0], 16) - begin < 16 * page
        }

    part = memory[page + 8 : 13 * page + 8]
    if not _cpu.place_pages(memory=part, bytes=part.nbytes, page_bytes=page, nodes=[0, 0, 0], in_shares=True):
        pytest.skip("the system forbids mbind, as Docker does")
    assert {number: policy.split(":")[0] for number, policy in policies().items()} == {
        0: "default",
        2: "prefer",
        13: "default",
    }
    memory[:] = 1
    other = np.frombuffer(mmap.mmap(-1, 16 * page), np.uint8)
    assert _cpu.place_pages(memory=other, bytes=other.nbytes, page_bytes=page, nodes=[0], in_shares=False)
    assert not _cpu.place_pages(memory=other, bytes=other.nbytes, page_bytes=page, nodes=[0, 63], in_shares=True)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_threads_are_kept_on_the_processors_asked_for() -> None:
    code = (
        "import os; from octavo.ops import cpu; cpu.use_threads(None, [min(os.sched_getaffinity(0))]); "
        "print(len(os.sched_getaffinity(0)), cpu._cpu.num_threads())"
    )
    assert run_python(code).stdout.split() == ["1", "1"]
    result = run_python("from octavo.ops import cpu; cpu.use_threads(None, [8191])")
    assert "ConfigError: --cpu-threads-bind: this process may not run on processor 8191." in result.stderr
    one_too_many = "import os; from octavo.ops import cpu; cpu.use_threads(None, [min(os.sched_getaffinity(0)), 8190])"
    assert "this process may not run on processor 8190." in run_python(one_too_many).stderr


def test_more_threads_than_processors_get_a_warning() -> None:
    code = "import os; from octavo.ops import cpu; cpu.use_threads(1, None); cpu.use_threads(os.cpu_count() + 1, None)"
    assert run_python(code).stderr.count("each step waits for threads that wait") == 1


def test_the_number_of_threads_is_checked(threads: None) -> None:
    for bad in (0, -1, 100000):
        with pytest.raises(ValueError, match="number of threads"):
            _cpu.set_threads(bad)
    _cpu.set_threads(3)
    assert _cpu.num_threads() == 3


@pytest.fixture
def product() -> tuple[torch.Tensor, cpu.PackedWeight, torch.Tensor]:
    x, weight = random(0, 64, 512), cpu.pack_linear([random(1, 512, 512)])
    return x, weight, cpu.linear(x, weight)


def test_concurrent_callers_take_turns(
    threads: None, product: tuple[torch.Tensor, cpu.PackedWeight, torch.Tensor]
) -> None:
    x, weight, expected = product
    _cpu.set_threads(3)
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(60):
            if not torch.equal(cpu.linear(x, weight), expected):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for num_threads in (1, 2, 4, 3):
        _cpu.set_threads(num_threads)
    for caller in callers:
        caller.join()
    assert not wrong


def test_the_number_of_threads_may_be_set_from_several_threads_at_once(threads: None) -> None:
    logits = random(0, 8, 49152)
    expected, failed = cpu.argmax(logits), []

    def resize(seed: int) -> None:
        for i in range(200):
            try:
                _cpu.set_threads(2 + (seed + i) % 2)
                assert torch.equal(cpu.argmax(logits), expected)  # which starts the threads
            except BaseException as error:
                failed.append(error)

    callers = [threading.Thread(target=resize, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failed


def test_the_pool_survives_idling_and_resizing(
    threads: None, product: tuple[torch.Tensor, cpu.PackedWeight, torch.Tensor]
) -> None:
    x, weight, expected = product
    pause = threading.Event()
    for num_threads in (1, 4, 2, 3) * 3:
        _cpu.set_threads(num_threads)
        for _ in range(3):
            assert_same_bits(cpu.linear(x, weight), expected)
        pause.wait(0.002)  # Longer than workers spin: the next call wakes them from sleep.
        assert_same_bits(cpu.linear(x, weight), expected)


FORK = """
import os, threading
import numpy as np
from octavo import _cpu
from octavo.ops import cpu
from octavo.quantization import StoredWeight
_cpu.set_threads(3)
rng = np.random.default_rng(0)
x, matrix = (rng.standard_normal((n, 512), np.float32) for n in (64, 512))
weight = cpu.pack_linear([StoredWeight("F32", {"data": matrix}, matrix.shape)])
expected = cpu.linear(x, weight)
done = threading.Event()
def work():
    while not done.is_set():
        cpu.linear(x, weight)
busy = threading.Thread(target=work)
busy.start()  # So that fork finds the pool in the middle of a call.
for _ in range(5):
    child = os.fork()
    if child == 0:
        ok = _cpu.num_threads() == 3 and np.array_equal(cpu.linear(x, weight), expected)
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
done.set()
busy.join()
assert np.array_equal(cpu.linear(x, weight), expected)
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_pool_of_its_own_and_exit_is_clean() -> None:
    result = run_python(FORK)
    assert (result.returncode, result.stdout.strip()) == (0, "fine"), result.stderr


# Threads get the limit of the process's beginning, which the main thread raises for itself.
DEEP = """
import resource
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.RLIM_INFINITY))
import torch
from octavo import _cpu
from tests.ops.index_cases import IndexedBatch, Sizes
from tests.ops.tensors import cpu

_cpu.set_threads(4)
batch = IndexedBatch(cpu, Sizes(3, 512, 64, 64, 128), torch.float32, [700])
print(batch.run([(0, 0, 700)], 96)[1].shape)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is read by Linux's C library")
def test_threads_have_a_stack_for_every_kernel_whatever_the_system_gives() -> None:
    limited = f"ulimit -Ss 512 && exec {sys.executable} -c '{DEEP}'"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=within(120))
    assert (done.returncode, done.stdout) == (0, "torch.Size([700, 3, 512])\n"), done.stderr


MISFITS = """
import numpy as np
from octavo.ops import cpu

cache = cpu.allocate_kv_cache(2, 16, 1, 64, "float32")
table, start, lens = np.zeros((1, 2), np.int32), np.array([0, 1], np.int32), np.array([1], np.int32)
for query, starts in ((np.zeros((1, 1, 32), np.float32), start), (np.zeros((1, 1, 64), np.float32), start[:1])):
    try:
        cpu.paged_attention(query, cache, table, starts, lens, 1.0, value_size=64)
    except ValueError as error:
        print(error)
"""


def test_native_calls_refuse_what_they_would_read_out_of_bounds_also_without_assertions() -> None:
    first, second = run_python(MISFITS, PYTHONOPTIMIZE="1").stdout.splitlines()
    assert first.startswith("paged_attention: these do not fit together: query float32 [1, 1, 32], block_tables int32")
    assert "query_start_loc int32 [1]" in second
    # Assertions say to a type checker what Python itself would notice: a class, or that something is there.
    for path in (Path(__file__).parents[2] / "octavo" / "ops").glob("cpu*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                assert re.match(r"isinstance\(|\w+ is not None$", ast.unparse(node.test)), f"{path.name}:{node.lineno}"
