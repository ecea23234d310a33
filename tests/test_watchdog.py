"""A run in which a process crashes, hangs or is killed ends soon, and says in which test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import within

# Which lets no other thread run, nor a handler of signals: a lock that is taken twice.
HANGS_IN_NATIVE_CODE = "libc.pthread_mutex_lock(lock), libc.pthread_mutex_lock(lock)"
THREAD = "threading.Thread(target=threading.Event().wait).start()"


def run(folder: Path, body: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_tiny.py").write_text(
        "import ctypes, os, signal, threading\n\n"
        "libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n\n"
        "def test_before():\n    pass\n\n"
        f"def test_culprit():\n    {body}\n\n"
        "def test_after():\n    pass\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 1\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.watchdog", "-p", "xdist", "-p", "pytest_timeout",
               "-p", "no:cacheprovider", *flags]  # fmt: skip
    root = str(Path(__file__).parents[1])
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Other plugins take longer to import than all of this.
    env = outside | {"PYTHONPATH": root, "OCTAVO_TESTS_GRACE_S": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=within(100))


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
WAITS = "threading.Event().wait()"  # which pytest-timeout ends without the process
BODIES = [
    KILLED, HANGS_IN_NATIVE_CODE, "os._exit(1)", "os.kill(os.getpid(), signal.SIGSTOP)",
    "os.kill(os.getpid(), signal.SIGSEGV)", WAITS,
]  # fmt: skip
SHORT = {(KILLED, "1")}
CASES = [
    pytest.param(body, num_workers, marks=() if (body, num_workers) in SHORT else pytest.mark.long)
    for body in BODIES
    for num_workers in ("0", "1")
]


@pytest.mark.parametrize(("body", "num_workers"), CASES)
def test_who_crashes_hangs_or_is_killed_is_named(tmp_path: Path, body: str, num_workers: str) -> None:
    done = run(tmp_path, body, "-n", num_workers)
    assert done.returncode != 0
    assert "test_culprit" in done.stdout + done.stderr
    assert ("1 failed, 1 passed" in done.stdout) == (num_workers == "1" and body != WAITS)


@pytest.mark.long
def test_a_process_that_does_not_end_is_ended(tmp_path: Path) -> None:
    done = run(tmp_path, THREAD, "-n", "0")
    assert done.returncode != 0
    assert "3 passed" in done.stdout and "hangs in its end, after the last test" in done.stderr
    assert "wait" in done.stderr, "where its threads are"


@pytest.mark.parametrize("flags", [("-n", "0"), pytest.param(("-n", "2"), marks=pytest.mark.long)])
def test_a_run_in_which_nothing_happens_says_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = run(tmp_path, "pass", *flags)
    assert (done.returncode, done.stderr) == (0, "")
