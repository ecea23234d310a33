"""Signals in the tests' processes."""

import signal
import subprocess
import sys
from pathlib import Path


def test_signals_end_processes_though_the_shell_had_the_tests_ignore_them() -> None:
    ask = "import signal; print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGQUIT)])"
    code = f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', {ask!r}])"
    ignored = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)]
    try:
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
        )
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGQUIT), ignored, strict=True):
            signal.signal(number, handler)
    assert "SIG_IGN" not in run.stdout and "SIG_DFL" in run.stdout
