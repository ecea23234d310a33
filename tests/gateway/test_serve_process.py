"""A server that the gateway or `octavo run` starts, as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import pytest

from octavo.gateway import serve_process
from octavo.gateway.catalogue import ModelEntry
from octavo.gateway.serve_process import ServeProcess, StartError
from tests.waiting import Clock, wait_until

REASON = "octavo: error: there is no such model."


def test_the_reason_of_a_start_that_fails_is_said_once_by_who_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = f"print('it begins'); print({REASON!r}); print('\\n  x: did you mean y?'); raise SystemExit(1)"
    monkeypatch.setattr("octavo.gateway.serve_process.server_command", lambda *_: [sys.executable, "-c", program])
    with caplog.at_level("INFO", "octavo.gateway"), pytest.raises(StartError, match=REASON) as caught:
        asyncio.run(ServeProcess.start("m", ModelEntry()))
    assert not caught.value.may_pass and str(caught.value) == f"{REASON}; x: did you mean y?"
    assert [record.getMessage() for record in caplog.records] == ["m: it begins"]


def test_an_error_of_very_many_lines_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"print({REASON!r}); print('a warning\\n' * 9999); raise SystemExit(1)"
    monkeypatch.setattr("octavo.gateway.serve_process.server_command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(StartError, match=f"{REASON}; a warning; a warning") as caught:
        asyncio.run(ServeProcess.start("m", ModelEntry()))
    assert len(str(caught.value)) < 2100


def test_a_server_knows_the_aliases_of_its_model_as_lines_of_batches_may_name_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def command(_module: str, *words: str) -> list[str]:
        seen.extend(words)
        return [sys.executable, "-c", "raise SystemExit(1)"]

    monkeypatch.setattr("octavo.gateway.serve_process.server_command", command)
    with pytest.raises(StartError) as caught:
        asyncio.run(ServeProcess.start("m", ModelEntry(aliases=["x", "y"])))
    assert caught.value.may_pass, "the process has said no reason"
    at = seen.index("--served-model-name") + 1
    assert seen[at : at + 3] == ["m", "x", "y"] and seen[at + 3].startswith("--")


@pytest.mark.parametrize("text", ["\0", "\ud800"])
def test_a_flag_that_no_command_line_can_have_is_a_start_that_fails(text: str) -> None:
    with pytest.raises(StartError, match="cannot be run") as caught:
        asyncio.run(ServeProcess.start("m", ModelEntry(flags={"seed": text})))
    assert not caught.value.may_pass


def test_a_server_gets_no_key_of_the_gateways(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = "import os; print([os.environ.get(n) for n in ('OCTAVO_API_KEY', 'OCTAVO_ADMIN_KEY')])"
    monkeypatch.setattr("octavo.gateway.serve_process.server_command", lambda *_: [sys.executable, "-c", program])
    for name in ("OCTAVO_API_KEY", "OCTAVO_ADMIN_KEY"):
        monkeypatch.setenv(name, "secret")
    with caplog.at_level("INFO", "octavo.gateway"), pytest.raises(StartError):
        asyncio.run(ServeProcess.start("m", ModelEntry()))
    assert "None]" in caplog.text and "secret" not in caplog.text


def test_a_server_that_is_killed_leaves_no_process_that_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """`exited` waits for the end of the output, which the child has too."""
    child = "import signal; signal.pause()"
    program = f"""
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", {child!r}])
print('{{"message": "it serves", "level": "INFO", "ready": {{"API": "http://127.0.0.1:1/v1"}}}}', flush=True)
signal.pause()
"""
    monkeypatch.setattr("octavo.gateway.serve_process.server_command", lambda *_: [sys.executable, "-c", program])

    async def run() -> None:
        server = await ServeProcess.start("m", ModelEntry())
        server._process.send_signal(signal.SIGSTOP)
        server.kill()
        await server.exited

    asyncio.run(run())


def silent_start(
    program: str, monkeypatch: pytest.MonkeyPatch, work_s: Callable[[int], float], clock: Clock, timeout_s: float = 60.0
) -> None:
    """Start a program that never gets ready, until it is killed."""
    monkeypatch.setattr(serve_process, "server_command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(serve_process, "_work_s", work_s)
    with pytest.raises(StartError, match=rf"no progress for {timeout_s:g} s \(start_timeout\)") as caught:
        clock.run(ServeProcess.start("m", ModelEntry(start_timeout=timeout_s)))
    assert caught.value.may_pass


def test_a_start_that_hangs_is_killed_with_its_processes(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """`exited` waits for the end of the output, which the child has too."""
    child = "import signal; signal.pause()"
    program = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); signal.pause()"
    looks = iter([0.5 + number / 100 for number in range(1000)])  # timers
    silent_start(program, monkeypatch, lambda _: next(looks), clock)


def test_timers_are_no_progress_however_long_a_start_may_take(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    looks: list[float] = []

    def look(_: int) -> float:
        looks.append(0.2 * len(looks))
        assert len(looks) < 100, "it is never killed"
        return looks[-1]

    silent_start("import signal; signal.pause()", monkeypatch, look, clock, 900.0)


def test_a_short_start_timeout_does_not_look_all_the_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    looks: list[int] = []
    silent_start("import signal; signal.pause()", monkeypatch, lambda pid: looks.append(pid) or 0.0, clock, 1.0)
    assert len(looks) <= 2


def test_a_start_that_computes_or_writes_lines_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    program = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("a part is loaded", flush=True))
print("it begins", flush=True)
while True:
    signal.pause()
"""
    num_looks = 0

    def look(pid: int) -> float:
        nonlocal num_looks
        num_looks += 1
        if num_looks <= 50:
            return float(num_looks % 2)  # a process that has computed for a second comes or goes
        if num_looks <= 100:
            wait_until(lambda: "it begins" in caplog.text)
            num_lines = caplog.text.count("a part")
            os.kill(pid, signal.SIGUSR1)
            wait_until(lambda: caplog.text.count("a part") > num_lines)
        return 0.0

    with caplog.at_level("INFO", "octavo.gateway"):
        silent_start(program, monkeypatch, look, clock)
    assert num_looks >= 110


def test_the_work_of_a_process_and_its_children_is_seen() -> None:
    assert serve_process._work_s(os.getpid()) > 0 and serve_process._work_s(2**22 + 1) == 0
