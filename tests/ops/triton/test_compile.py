"""Every kernel is compiled for an A100 and an H100, spills nothing in loops and leaves room for enough warps. It also
fits into the smaller shared memory of an L40S, and compiles for a B200."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from tests.ops.triton.compiling import (
    MAX_SHARED_BYTES,
    OTHER_CAPABILITIES,
    Case,
    Compiled,
    Failed,
    all_cases,
    compile_all,
    is_serialized,
    loop_spills,
    products_under_way,
)  # fmt: skip

# All kernels are compiled before the first test: minutes, and many where others want the processors too.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CASES = all_cases()
Results = tuple[list[Compiled], list[Failed]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """All the cases that this run has chosen, compiled side by side."""
    items = [item for item in request.session.items if item.path == request.path and "results" in item.fixturenames]
    chosen: dict[str, list[int]] = defaultdict(list)
    for item in items:
        chosen[item.callspec.params["name"]].append(item.callspec.params["capability"])
    return compile_all({name: replace(CASES[name], capabilities=tuple(wanted)) for name, wanted in chosen.items()})


@pytest.mark.parametrize(
    ("name", "capability"), [(name, capability) for name, case in CASES.items() for capability in case.capabilities]
)
def test_kernels_compile_and_fit(name: str, capability: int, results: Results) -> None:
    case: Case = CASES[name]
    compiled, failed = results
    assert [f.error for f in failed if (f.case, f.capability) == (name, capability)] == []
    kernels = [c for c in compiled if (c.case, c.capability) == (name, capability)]
    kernels.sort(key=lambda c: -c.registers)  # the main one first
    assert kernels
    for kernel in kernels:
        assert kernel.loop_spills == 0, f"registers are spilled in a loop: {kernel}"
        assert kernel.stack_bytes <= case.max_stack_bytes, f"registers are spilled: {kernel}"
        assert not kernel.is_serialized, f"products wait for each other: {kernel}"
        assert not kernel.fuses, f"it does not say enable_fp_fusion=False: {kernel}"
        assert kernel.registers <= case.max_registers, kernel
        assert kernel.shared_bytes <= MAX_SHARED_BYTES[capability], kernel
        assert kernel.warps_per_multiprocessor >= case.min_warps, f"{kernel.warps_per_multiprocessor} warps: {kernel}"
    if case.overlaps and capability == 90:
        # The product of weights and values goes on while the next scores are computed.
        assert kernels[0].products_under_way >= 1, kernels[0]
    elif case.overlaps:
        # A warp waits for its products; those of another program compute meanwhile.
        assert kernels[0].programs_per_multiprocessor >= 2, kernels[0]


@pytest.mark.parametrize(
    ("name", "capability"), [(name, capability) for name in CASES for capability in OTHER_CAPABILITIES]
)
def test_kernels_fit_other_devices(name: str, capability: int, results: Results) -> None:
    compiled, failed = results
    assert [f.error for f in failed if (f.case, f.capability) == (name, capability)] == []
    kernels = [c for c in compiled if (c.case, c.capability) == (name, capability)]
    assert kernels and all(kernel.shared_bytes <= MAX_SHARED_BYTES[capability] for kernel in kernels), kernels
    assert capability != 100 or not any(kernel.loop_spills for kernel in kernels), kernels


def test_products_that_nothing_has_waited_for() -> None:
    body = ["WARPGROUP.ARRIVE", "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], R88, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    assert [products_under_way(loop_of(lines)) for lines in (body, body + body[:2], ["EXIT"])] == [0, 1, 0]
    assert [is_serialized(loop_of(lines)) for lines in (body, body * 2, body[:2] + body)] == [False, True, False]


def loop_of(lines: list[str]) -> str:
    lines = [*lines, "@P0 BRA 0x0"]
    return "\n".join(f"        /*{16 * i:04x}*/   {line} ;   /* 0x0000001f04057819 */" for i, line in enumerate(lines))


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared_bytes", "expected"),
    [(32, 4, 0, 64), (33, 4, 0, 48), (255, 8, 0, 8), (24, 4, 100 << 10, 4), (24, 1, 0, 32)],
)
def test_how_many_warps_fit(registers: int, num_warps: int, shared_bytes: int, expected: int) -> None:
    kernel = Compiled("case", "kernel", 80, num_warps, registers, 0, shared_bytes)
    assert kernel.warps_per_multiprocessor == expected


def test_spills_count_in_innermost_loops_only() -> None:
    lines = [
        "STL [R1], R2", "LDL R3, [R1]", "LDL R4, [R1+0x4]", "@P0 BRA 0x20", "LDL R3, [R1]", "@!P1 BRA P2, 0x10", "EXIT"
    ]  # fmt: skip
    sass = "\n".join(f"        /*{16 * i:04x}*/   {line} ;   /* 0x0000001f04057819 */" for i, line in enumerate(lines))
    assert loop_spills(sass) == 1
