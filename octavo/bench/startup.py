"""`octavo bench startup`: starts `octavo serve` a few times, and shows the time of each phase and the memory of the
core.

The server reports its phases and sizes at /metrics; the peak of resident memory comes from the operating system. Two
processes start at once: the phases of each process add up, those of both together do not.
"""

import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from octavo.bench.results import write_json
from octavo.config import AsyncEngineArgs
from octavo.entrypoints.cli import run_command
from octavo.errors import OctavoError
from octavo.flags import FlagParser, positive_int
from octavo.processes import python_command

TIMEOUT_S = 600
_POLL_S = 0.01
_SAMPLE = re.compile(r"^octavo:(startup_seconds|memory_bytes)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MIB = 1 << 20


class Start(msgspec.Struct):
    """One start of a server. Phases are in the order in which they happened."""

    ready_s: float  # from the command to the first 200 response of /health
    server_s: dict[str, float]
    core_s: dict[str, float]
    first_token_s: float  # time of the first request, with one output token
    weight_bytes: int  # packed matrices
    cache_bytes: int  # KV cache; pages that were never written are not resident
    peak_bytes: int | None  # peak resident memory of the core when it is ready; None without /proc
    peak_after_request_bytes: int | None


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(
        prog=prog,
        parents=[_own_parser()],
        usage="%(prog)s [--runs N] [--json FILE] [MODEL] [engine flags]",
        description="Start `octavo serve` with the engine flags that are given, and show where the time goes.",
    )
    parser.add_argument("model_positional", metavar="MODEL", nargs="?", help="The same as --model.")
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def _own_parser() -> FlagParser:
    """Return a parser of the flags that are not passed on to the server."""
    own = FlagParser(add_help=False)
    own.add_argument("--runs", type=positive_int, default=3, help="Starts to measure, after one that does not count.")
    own.add_argument("--json", "--output-json", metavar="FILE", help="Write all figures there.")
    return own


def main(argv: Sequence[str] | None = None, *, prog: str = "octavo bench startup") -> int:
    """Measure and print. Return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    make_parser(prog).parse_args(words)  # exits for --help or a wrong flag
    args, flags = _own_parser().parse_known_args(words)

    def bench() -> None:
        # The first start only brings the files into the page cache.
        starts = [measure_start(flags) for _ in range(args.runs + 1)][1:]
        print(report(starts))
        if args.json is not None:
            data = {"flags": flags, "median": msgspec.to_builtins(median(starts)), "runs": msgspec.to_builtins(starts)}
            write_json(Path(args.json), data)

    return run_command(bench)


def measure_start(flags: Sequence[str]) -> Start:
    """Start a server on a free port, wait until it is ready, ask for one token, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = python_command("octavo.entrypoints.cli.main", "serve", *flags)
    with tempfile.TemporaryFile() as log:
        begun = time.monotonic()
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_ready(process, url, log)
            ready_s = time.monotonic() - begun
            peak = peak_bytes(_core_pid(process.pid))
            phases, memory = _read_metrics(url)
            begun = time.monotonic()
            _get(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 1})
            first_token_s = time.monotonic() - begun
            # The remaining time is that of the interpreter, the command's imports and the last poll.
            server = {"interpreter and command": ready_s - sum(phases["server"].values()), **phases["server"]}
            return Start(
                ready_s=ready_s,
                server_s=server,
                core_s=phases["core"],
                first_token_s=first_token_s,
                weight_bytes=memory["weights"],
                cache_bytes=memory["kv_cache"],
                peak_bytes=peak,
                peak_after_request_bytes=peak_bytes(_core_pid(process.pid)),
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            _get(f"{url}/health")
            return
        time.sleep(_POLL_S)
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    if process.poll() is None:
        raise OctavoError(f"the server was not ready after {TIMEOUT_S} s; the end of its log: {lines[-1:]}")
    last = lines[-1].removeprefix("octavo: error: ") if lines else "its log is empty"
    raise OctavoError(f"the server ended with status {process.returncode}: {last}")


def _get(url: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text


def _read_metrics(url: str) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Return seconds by process and phase, and bytes by kind. The server may report its own phases a moment after it is
    ready."""
    for _ in range(100):
        phases, memory = parse_metrics(_get(f"{url}/metrics"))
        if len(phases) == 2:
            return phases, memory
        time.sleep(_POLL_S)
    raise OctavoError(f"{url}/metrics does not say how long the start took.")


def parse_metrics(text: str) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Parse Prometheus's text format into seconds by process and phase, and bytes by kind."""
    phases: dict[str, dict[str, float]] = {}
    memory: dict[str, int] = {}
    for name, label_text, value in _SAMPLE.findall(text):
        labels: dict[str, str] = dict(_LABEL.findall(label_text))
        if name == "memory_bytes":
            memory[labels["kind"]] = int(float(value))
        else:
            phases.setdefault(labels["process"], {})[labels["phase"]] = float(value)
    return phases, memory


def _core_pid(server_pid: int) -> int | None:
    import psutil

    with suppress(psutil.Error):
        for child in psutil.Process(server_pid).children():
            if "octavo.engine.core_process" in child.cmdline():
                return child.pid
    return None


def peak_bytes(pid: int | None) -> int | None:
    """Return the peak resident memory of a process so far; None if it is not known (Linux only)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def median(starts: Sequence[Start]) -> Start:
    """Return the median of every figure, each on its own."""

    def middle(values: list[Any]) -> Any:
        known = [value for value in values if value is not None]
        if not known:
            return None
        if isinstance(known[0], dict):
            return {phase: middle([value[phase] for value in known]) for phase in known[0]}
        return statistics.median(known) if isinstance(known[0], float) else statistics.median_low(known)

    return Start(*(middle([getattr(start, name) for start in starts]) for name in Start.__struct_fields__))


def report(starts: Sequence[Start]) -> str:
    """Return the figures as a table for the terminal: medians, and the spread of the whole time."""
    figures, times = median(starts), [s.ready_s for s in starts]
    lines = [f"{'process':<8} {'phase':<26} {'s':>6}"]
    for process, phases in (("server", figures.server_s), ("core", figures.core_s)):
        lines += [f"{process:<8} {phase:<26} {seconds:>6.3f}" for phase, seconds in phases.items()]
    lines += [
        f"\nready after {min(times):.2f} / {figures.ready_s:.2f} / {max(times):.2f} s (least, median, most of "
        f"{len(starts)}); first token of the first request {figures.first_token_s * 1e3:.0f} ms later",
        f"core: {_mib(figures.weight_bytes)} of packed weights, {_mib(figures.cache_bytes)} of KV cache; peak resident "
        f"{_mib(figures.peak_bytes)} when ready, {_mib(figures.peak_after_request_bytes)} after a request",
    ]
    return "\n".join(lines)


def _mib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / _MIB:.0f} MiB"
