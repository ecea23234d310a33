"""Kernels on the device, answers beside the CPU's, and a request's bits whatever is computed beside it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from xml.etree import ElementTree

from gpu_checks.engines import (
    DEVICE,
    SHAPES,
    Row,
    drain,
    free_memory,
    listed,
    make_core,
    prompt_of,
    request,
    tokens_of,
    watched_compiling,
    whatever_fails,
)


def kernels(smoke: bool) -> Iterator[Row]:
    folder = "tests/ops/triton"
    # On this all promises of equal bits rest: it is told first.
    yield from _tests("rows do not depend on the others", [f"{folder}/test_linear.py", "-k", "test_rows_do_not_depend"])
    yield from whatever_fails("same bits", invariance(smoke))
    # What compiles for GPUs that are not there says nothing of this one.
    others = ("test_compile.py", "test_reachable.py")
    chosen = [folder, *(f"--ignore={folder}/{name}" for name in others)]
    chosen += ["-k", "rms_norm or take_rows"] if smoke else []
    if importlib.util.find_spec("xdist") is not None and not smoke:
        chosen += ["-n", str(min(8, os.cpu_count() or 1))]  # compiling takes most of the time
    yield from _tests("kernel tests on the device", chosen)


def _tests(what: str, arguments: list[str]) -> Iterator[Row]:
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "--all", "--timeout", "300", "-p", "no:cacheprovider"]
        subprocess.run([*command, f"--junitxml={report.name}", *arguments], check=False)
        counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
        with suppress(ElementTree.ParseError):
            for suite in ElementTree.parse(report.name).iter("testsuite"):
                counts = {key: count + int(suite.get(key, 0)) for key, count in counts.items()}
    yield what, "", ", ".join(f"{count} {key}" for key, count in counts.items())


def parity(smoke: bool) -> Iterator[Row]:
    """Greedy tokens and the log-probabilities of the prompt, against the CPU's kernels."""
    from tests.models.small_experts import ALL_MODELS

    # The heads of 12 elements of phi3 are not built for GPUs.
    names = [*SHAPES, *(name for name in ALL_MODELS if name != "phi3" and name not in SHAPES)]
    for name in names[: 1 if smoke else None]:
        yield from whatever_fails(f"parity, {name}", _parity_of(name))


def _parity_of(name: str) -> Iterator[Row]:
    from tests.models.small_experts import ALL_MODELS

    if (config := SHAPES.get(name)) is None:  # raises where this transformers does not know it
        model = ALL_MODELS[name]
        config = model.config().to_dict() | {"architectures": [model.architecture], "dtype": "bfloat16"}
    answers = {}
    for device in ("cpu", DEVICE.type):
        core = make_core(config, device, num_gpu_blocks_override=600, max_model_len=256, max_num_seqs=16)
        print(f"{name} on {device}: {core.executor.startup}", flush=True)
        with watched_compiling() as compiled:
            for i in range(8):
                prompt = prompt_of(i, 20 + 17 * i, config["vocab_size"])
                core.add(request(f"{i}", prompt, 24, prompt_logprobs=0, logprobs=0))
            answers[device] = drain(core)
        del core
        free_memory()
    same = total = 0
    worst = 0.0
    for key, expected in answers["cpu"].items():
        actual = answers[DEVICE.type][key]
        # After the first token that differs the two go on with different texts.
        pairs = list(zip(tokens_of(actual), tokens_of(expected), strict=True))
        until = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same, total = same + until, total + len(pairs)
        for a, b in zip(actual[0].prompt_logprobs or [], expected[0].prompt_logprobs or [], strict=True):
            worst = max(worst, abs(a.logprobs[0] - b.logprobs[0]))
    yield f"parity, {name}: log-probabilities of prompts differ by at most", "", f"{worst:.4f}"
    yield f"parity, {name}: greedy tokens before a difference", "", f"{same} of {total}"
    if compiled:
        yield f"parity, {name}: compiled after the start", "kernels", listed(compiled)


def invariance(smoke: bool) -> Iterator[Row]:
    """One request's tokens and log-probabilities, whatever is computed beside it and however it is cut up."""
    config = SHAPES["Llama"]
    vocab = config["vocab_size"]
    num_others, num_out = (5, 8) if smoke else (120, 48)
    probe = prompt_of(99, 150, vocab)

    def run(others: int, **flags: Any) -> list[tuple[list[int], list[float]]]:
        core = make_core(config, DEVICE.type, max_model_len=512, **({"max_num_seqs": 128} | flags))
        for i in range(others // 2):
            core.add(request(f"a{i}", prompt_of(i, 5 + 3 * i % 300, vocab), num_out))
        core.add(request("probe", probe, num_out, logprobs=2))
        for i in range(others - others // 2):
            core.add(request(f"b{i}", prompt_of(1000 + i, 7 + 5 * i % 300, vocab), num_out))
        outputs = drain(core)["probe"]
        del core
        free_memory()
        return [(entry.token_ids, entry.logprobs) for output in outputs for entry in output.logprobs or []]

    blocks = 4 * (num_others + 1) if smoke else 1400
    alone = run(0, num_gpu_blocks_override=4096)
    few: dict[str, Any] = {"num_gpu_blocks_override": max(blocks, 32)}
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "among others": (num_others, {"num_gpu_blocks_override": 4096}),
        "in chunks": (3, {"num_gpu_blocks_override": 4096, "max_num_batched_tokens": 64, "max_num_seqs": 8}),
        "call by call": (1, {"num_gpu_blocks_override": 4096, "enforce_eager": True}),
        "preempted": (num_others, few),
        "swapped": (num_others, few | {"preemption_mode": "swap", "swap_space": 1.0}),
    }

    def told(name: str, others: int, flags: dict[str, Any]) -> Iterator[Row]:
        yield f"same bits {name}", "", "yes" if run(others, **flags) == alone else "NO"

    for name, (others, flags) in cases.items():
        yield from whatever_fails(f"same bits {name}", told(name, others, flags))
