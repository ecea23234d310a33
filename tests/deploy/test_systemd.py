"""The unit of deploy/systemd: systemd's own checks of it, and a busy server that is stopped under its restrictions, and
as a container is.

There is no systemd to run it where tests are, so its sandbox is made by hand: a mount namespace, `setpriv`, and a
filter of system calls. What of the unit is not made that way is in `NOT_MADE`.
"""

from __future__ import annotations

import configparser
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from octavo.loading.default_model import fetch_default_model
from tests.e2e.server import MODEL, Server, running_server
from tests.waiting import within

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "octavo.service"
MOST_EXPOSED = 20  # in tenths, of a hundred
NUM_STREAMS, NUM_TOKENS = 8, 64
# What is systemd's own to do, wants more than a container's root may, or takes from those that have capabilities.
NOT_MADE = {
    "Environment", "EnvironmentFile", "ExecStart", "Group", "LimitNOFILE", "LockPersonality", "OOMPolicy",
    "PrivateDevices", "ProtectClock", "ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs",
    "ProtectKernelModules", "ProtectKernelTunables", "RemoveIPC", "Restart", "RestartSec", "RestrictAddressFamilies",
    "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "SystemCallArchitectures",
}  # fmt: skip
MADE = {
    "User", "StateDirectory", "RuntimeDirectory", "UMask", "TimeoutStopSec", "CapabilityBoundingSet",
    "NoNewPrivileges", "PrivateTmp", "ProtectHome", "ProtectSystem", "SystemCallFilter",
}  # fmt: skip


def section(name: str) -> dict[str, str]:
    parser = configparser.ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return dict(parser[name])


def service() -> dict[str, str]:
    return section("Service")


def analyze(*words: str | Path) -> str:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    done = subprocess.run(["systemd-analyze", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_systemd_takes_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"(?<=ExecStart=)\S+", sys.executable, UNIT.read_text()))  # must be there
    assert analyze("verify", unit) == ""
    analyze("security", "--offline=yes", f"--threshold={MOST_EXPOSED}", unit)  # whose status says that it is less


def test_its_command_is_one_that_there_is() -> None:
    from octavo.entrypoints.cli.serve import parse_args

    program, command, *flags = service()["ExecStart"].split()
    assert (program.rpartition("/")[2], command) == ("octavo", "serve") and flags[0] == "--config"
    stop, args = float(service()["TimeoutStopSec"]), parse_args([], "octavo serve")[1]
    assert stop > args.shutdown_timeout


def test_a_server_that_never_starts_is_given_up() -> None:
    unit, wait_s = section("Unit"), float(service()["RestartSec"])
    num_starts, interval_s = int(unit["StartLimitBurst"]), float(unit["StartLimitIntervalSec"])
    slow_start_s = 60
    assert num_starts * (slow_start_s + wait_s) < interval_s, "the interval would forget the first start"


def allowed_system_calls() -> list[str]:
    """Names, of the sets that the unit's filter names."""
    found: set[str] = set()
    waiting = service()["SystemCallFilter"].split()
    while waiting:
        name = waiting.pop()
        if not name.startswith("@"):
            found.add(name)
            continue
        lines = [line.strip() for line in analyze("syscall-filter", name).splitlines()[1:]]
        waiting += [line for line in lines if line and not line.startswith("#")]
    return sorted(found)


# Run by the child, with no privileges left: a filter that ends it with SIGSYS at any other call, as systemd's does.
CONFINE = """
import ctypes, json, os, struct, sys
numbers, command = json.loads(sys.argv[1]), sys.argv[2:]
code = [(0x20, 0, 0, 0)]  # the call's number
for number in numbers:
    code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x7FFF0000)]  # allowed
code.append((0x06, 0, 0, 0x80000000))  # else the process is killed
program = b"".join(struct.pack("HBBI", *line) for line in code)
buffer = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None, use_errno=True)
filter = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
assert libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(command[0], command)
"""


def confined(folder: Path, model: Path, *namespaces: str) -> list[str]:
    """A command that runs the rest of its words as the unit would, in a mount namespace and these others of its own.
    Only root may."""
    unit = service()
    assert (unit["ProtectSystem"], unit["ProtectHome"], unit["PrivateTmp"]) == ("strict", "yes", "yes")
    assert unit["CapabilityBoundingSet"] == "" and unit["NoNewPrivileges"] == "yes"
    state, runtime = Path("/var/lib", unit["StateDirectory"]), Path("/run", unit["RuntimeDirectory"])
    user = pwd.getpwnam("nobody")  # in the place of the unit's, whom the machine does not know
    kept = {Path(sys.base_prefix), Path(sys.prefix), ROOT, model.parent, *map(Path, filter(None, sys.path))}
    kept = {path for path in kept if path.is_dir()}
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.is_file():
        pytest.skip("the kernel's headers are not installed (Debian: linux-libc-dev)")
    table = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    numbers = [int(table[name]) for name in allowed_system_calls() if name in table]
    # What lies in homes or /tmp and is needed is put aside before these are hidden, and comes back to its place.
    script = f"""
set -eu
mount --make-rprivate /
aside={folder}/aside; mkdir $aside; mount -t tmpfs tmpfs $aside
{"".join(f"mkdir $aside/{i}; mount --bind {path} $aside/{i}{chr(10)}" for i, path in enumerate(sorted(kept)))}
mount --bind $aside /mnt; mount --make-private /mnt
for i in $aside/*; do mount --move $i /mnt/$(basename $i); done
for home in /root /home; do mount -t tmpfs -o mode=755 tmpfs $home; done
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=755 tmpfs /run; mkdir -m 700 {runtime}; chown {user.pw_uid} {runtime}
mkdir -p {state}; mount -t tmpfs -o mode=700,uid={user.pw_uid} tmpfs {state}
{"".join(f"mkdir -p {path}; mount --bind /mnt/{i} {path}{chr(10)}" for i, path in enumerate(sorted(kept)))}
mount --bind / /; mount -o remount,bind,ro /
umask {unit["UMask"]}
export RUNTIME_DIRECTORY={runtime} HOME=/nonexistent OCTAVO_CACHE={state} HF_HOME={state}/huggingface
exec setpriv --reuid={user.pw_uid} --regid={user.pw_gid} --clear-groups \\
    --inh-caps=-all --bounding-set=-all --no-new-privs "$@"
"""
    inside = [sys.executable, "-c", CONFINE, json.dumps(numbers)]
    return ["unshare", "--mount", *namespaces, "sh", "-c", script, "sh", *inside]


@pytest.mark.long
@pytest.mark.parametrize("form", ["unit", "container"])
def test_stopping_a_busy_server_loses_no_stream(tmp_path: Path, form: str) -> None:
    if (
        os.geteuid()
        or subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode
    ):
        pytest.skip("only root may make the sandbox")
    model = fetch_default_model()
    # In a container the server is the first process, and the only one that gets the signal.
    namespaces = ("--pid", "--fork", "--mount-proc") if form == "container" else ()
    command = [*confined(tmp_path, model, *namespaces), sys.executable]
    command += ["-m", "octavo.entrypoints.cli.main", "serve", str(model)]
    with running_server(tmp_path, "--served-model-name", MODEL, "--max-model-len", "512", command=command) as server:
        started = psutil.Process(server.process.pid)
        front_end = started.children()[0] if form == "container" else started
        try:
            # Its grammar is tried out in a process of its own.
            body = {"prompt": "One is", "structured_outputs": {"choice": ["odd", "even"]}}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
            assert answer["choices"][0]["text"] in ("odd", "even")
            assert_sandboxed(front_end)
            told = [*front_end.children(recursive=True), front_end] if form == "unit" else [front_end]
            assert stopped_under_load(server, told) == ["length"] * NUM_STREAMS
        finally:
            if front_end.is_running():
                front_end.terminate()
        assert "Traceback" not in server.log.read_text()


def assert_sandboxed(front_end: psutil.Process) -> None:
    """Every process has the restrictions, and the file system is what they make of it."""
    root = Path(f"/proc/{front_end.pid}/root")
    for home in ("root", "home"):
        assert not (root / home / ".bashrc").exists() and not (root / home / ".profile").exists()
    with pytest.raises(OSError, match="Read-only"):
        (root / "usr" / "octavo-was-here").touch()
    processes = [front_end, *front_end.children(recursive=True)]
    assert len(processes) > 2, "the engine's, and the one that grammars are tried in"
    for process in processes:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        assert status["NoNewPrivs"] == "1" and int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
        assert status["Seccomp"] == "2" and set(status["Uid"].split()) == {str(pwd.getpwnam("nobody").pw_uid)}


def stopped_under_load(server: Server, told: list[psutil.Process]) -> list[str]:
    """How each of many streams ends when these processes are told to stop while they run. The server must end with 0
    after that, and all its processes with it."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    begun, reasons = threading.Barrier(NUM_STREAMS + 1), []

    def follow(number: int) -> None:
        body = {"prompt": f"{number}:", "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
            events = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            choices = [json.loads(next(events))["choices"][0]]
            begun.wait(within(60))
            choices += [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
        reasons.append(choices[-1]["finish_reason"])

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(within(60))
    for process in told:
        process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(within(120))
    assert server.process.wait(within(30)) == 0
    assert not psutil.wait_procs(processes, 10)[1]
    return reasons


def test_every_directive_is_accounted_for() -> None:
    assert service().keys() == MADE | NOT_MADE and not MADE & NOT_MADE
