"""Children import what their parent does, and nothing that merely lies in the working directory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

import octavo
from octavo import processes
from octavo.processes import (
    ACCEPTS_PER_TURN,
    accepting_several,
    collect_rarely,
    event_loop_factory,
    import_path,
    python_command,
)
from tests.e2e.server import running_server

ROOT = Path(octavo.__file__).parent.parent
# As the script that an installation makes: it lies elsewhere, and its folder is the first entry of the path.
SCRIPT = f"import sys; sys.path.append({str(ROOT)!r})\n"
TRY_GRAMMAR = """
from octavo.structured_output.trial import GrammarTrial
trial = GrammarTrial()
print(repr(trial.problem('{"grammars": [{"lark_grammar": "start: /a/"}]}')))
trial.close()
"""
SHOW_PATH = """
import subprocess, sys
from octavo.processes import python_command
sys.path.insert(0, sys.argv[1])
subprocess.run(python_command("shown", "one argument"), check=True)
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory with modules that must not be imported."""
    folder = tmp_path / "work"
    for name in ("octavo", "encodings"):
        (folder / name).mkdir(parents=True)
    for name in ("octavo/__init__", "encodings/__init__", "torch", "numpy", "json", "runpy", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the working directory')")
    return folder


def run(folder: Path, code: str, *words: str, cwd: Path, **env: str) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT + code)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *words[:1], str(script), *words[1:]], cwd=cwd, env=clean | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("flag", ["-P", "-I", "-s", "-E"])
def test_a_grammar_is_tried_wherever_one_is(tmp_path: Path, hostile: Path, flag: str) -> None:
    assert run(tmp_path, TRY_GRAMMAR, flag, cwd=hostile) == "''"


@pytest.mark.long
def test_a_server_starts_wherever_one_is(tmp_path: Path, hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "octavo-script.py"
    script.write_text(f"{SCRIPT}from octavo.entrypoints.cli.main import main\nsys.exit(main())\n")
    monkeypatch.chdir(hostile)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with running_server(tmp_path, "--max-model-len", "64", command=[sys.executable, str(script), "serve"]) as server:
        assert server.get("/v1/models")[0] == 200


def test_a_module_that_is_run_leaves_the_working_directory_alone(
    tmp_path: Path, hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("octavo/__init__", "encodings/__init__", "runpy", "sitecustomize"):  # Python's own start, and `-m`'s
        (hostile / f"{name}.py").unlink()
    for name in ("octavo", "encodings"):
        (hostile / name).rmdir()
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with running_server(tmp_path, "--max-model-len", "64") as server:
        assert server.get("/v1/models")[0] == 200


def test_a_child_is_deaf_to_stop_signals_before_it_imports_anything(tmp_path: Path, hostile: Path) -> None:
    (tmp_path / "shown.py").write_text(
        "import os, signal\n"
        "for number in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), number)\n"
        "print('goes on')\n"
    )
    show = SHOW_PATH.replace("python_command", "child_command")
    assert run(tmp_path, show, "-P", str(tmp_path), cwd=hostile) == "goes on"


STOPPED = """
import os, queue, signal, threading
from octavo.processes import follow_parent
threading.Thread(target=follow_parent, args=(queue.SimpleQueue(),), daemon=True).start()
os.kill(os.getpid(), signal.SIGSTOP)
threading.Event().wait()
"""
KILLED = """
import os, signal, subprocess, sys
from octavo.processes import child_command
sys.path.insert(0, sys.argv[1])
child = subprocess.Popen(child_command("stopped"), stdin=subprocess.PIPE)
print(child.pid, flush=True)
assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others cannot be told that their parent has ended")
def test_a_child_that_is_stopped_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + KILLED)
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.communicate(timeout=60)  # until the child has closed its output too
    except subprocess.TimeoutExpired:
        os.kill(child, signal.SIGKILL)
        raise
    assert parent.returncode == -signal.SIGKILL


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_child_finds_modules_where_its_parent_does(tmp_path: Path, hostile: Path, is_zip: bool) -> None:
    place = tmp_path / "place 'x' ü"
    code = "import json, sys\nprint(json.dumps([__name__, sys.argv[1:], sys.path]))\n"
    if is_zip:
        with zipfile.ZipFile(place, "w") as archive:
            archive.writestr("shown.py", code)
    else:
        place.mkdir()
        (place / "shown.py").write_text(code)
    name, argv, path = json.loads(run(tmp_path, SHOW_PATH, "-P", str(place), cwd=hostile))
    assert (name, argv, path[0]) == ("__main__", ["one argument"], str(place))
    assert str(hostile) not in path


def test_the_working_directory_stays_where_octavo_comes_from_it_or_pythonpath_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = str(tmp_path)
    monkeypatch.setattr(sys, "path", ["", there, "/elsewhere"])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    assert import_path() == ["/elsewhere"]
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}/other")
    assert import_path() == ["/elsewhere"], "an empty entry names no folder"
    monkeypatch.setenv("PYTHONPATH", f"/other{os.pathsep}{there}")
    assert import_path() == [there, there, "/elsewhere"]
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr(processes, "__file__", str(tmp_path / "octavo" / "processes.py"))
    assert import_path() == [there, there, "/elsewhere"]


def test_a_working_directory_that_has_been_deleted_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    assert import_path() == ["/elsewhere"]
    assert "-P" in python_command("x")


def test_a_turn_of_the_loop_accepts_several_connections() -> None:
    async def act() -> None:
        loop, accepted = asyncio.get_running_loop(), 0

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                nonlocal accepted
                accepted += 1
                transport.close()

        with socket.create_server(("127.0.0.1", 0), backlog=64) as sock:
            copies = accepting_several([sock])
            assert copies is not None
            servers = [await loop.create_server(Accepted, sock=copy, backlog=64) for copy in copies]
            clients = [socket.create_connection(sock.getsockname()) for _ in range(4 * ACCEPTS_PER_TURN)]
            num_turns = 0
            while accepted < len(clients):
                num_turns += 1
                await asyncio.sleep(0)
            for each in [*servers, *clients]:
                each.close()
            assert num_turns <= 2 * len(clients) / ACCEPTS_PER_TURN

    loop = event_loop_factory()()
    loop.run_until_complete(act())
    loop.close()


@pytest.mark.parametrize(("has_middlewares", "num_young"), [(False, 1_000), (True, 1)])
def test_the_collector_looks_for_cycles_of_middlewares_only_where_there_are_middlewares(
    monkeypatch: pytest.MonkeyPatch, has_middlewares: bool, num_young: int
) -> None:
    """Objects that live through one collection would wait for a thousand others."""
    collector = Mock()
    monkeypatch.setattr(processes, "gc", collector)
    collect_rarely(has_middlewares=has_middlewares)
    assert collector.set_threshold.call_args[0][1] == num_young
