"""Hosts with addresses of their own, which are namespaces of one machine: network, processes, name, and Ray's folder.

The first host is the process that calls, once it has been started by `first_host`; it makes the others (`Network`).
They share files and processors. Nothing needs to be cleaned up: what a host has ends with its first process, and all
of them with the first host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# A network of their own, of processes that a host sees, of what it is called, and of what lies at /tmp/ray.
_UNSHARE = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
# Its first process, which waits for others' orphans too.
_FIRST = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && ip link set lo up && hostname "$0" && "$@"; exit $?'
_CARRIER = "10.77.0"  # addresses of this network, of which 254 is a router that is not there


def why_no_hosts() -> str | None:
    """What keeps this machine from having some."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"no {missing[0]}"
    tried = subprocess.run(first_host(["ip", "link", "add", "x", "type", "veth"]), capture_output=True, text=True)
    return None if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.strip()}"


def first_host(command: list[str]) -> list[str]:
    """The command, to be run on a host that sees no others yet. Without root it is mapped to that."""
    mapped = [] if os.geteuid() == 0 else ["--map-root-user"]
    return [*_UNSHARE, *mapped, "sh", "-c", _FIRST, "host0", *command]


@dataclass
class Host:
    """`address` is that of its one link, `pid` its first process as the first host sees it."""

    name: str
    address: str
    pid: int

    def command(self, *command: str) -> list[str]:
        """The command, to be run on this host by the first one."""
        if self.pid == os.getpid():
            return [*command]
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--pid", "--", *command]

    def run(self, *command: str) -> str:
        """What it prints. Raises `CalledProcessError`."""
        return subprocess.run(self.command(*command), check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout

    def cut_off(self) -> None:
        """Its packets are lost both ways from now on. Nobody else is told."""
        self.run("ip", "link", "set", "eth0", "down")

    def reconnect(self) -> None:
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", f"{_CARRIER}.254")

    def has_ray(self) -> bool:
        """Whether a raylet runs on this host."""
        own = f"--node_ip_address={self.address}"
        return any(own in (one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))

    def start_ray(self, log: Path, head: Host) -> None:
        """Join the cluster of this head, or be it."""
        which = ["--head", "--include-dashboard=false"] if head is self else [f"--address={head.address}:6379"]
        flags = ["--num-cpus=2", f"--object-store-memory={80 << 20}", "--disable-usage-stats"]
        with open(log, "ab") as out:
            starting = self.command(sys.executable, "-m", "ray.scripts.scripts", "start", *which, *flags)
            started = subprocess.run(starting, stdout=out, stderr=out, timeout=400)
        assert started.returncode == 0, log.read_text()


@contextlib.contextmanager
def network(size: int) -> Iterator[list[Host]]:
    """Hosts 10.77.0.1, 10.77.0.2, …, each joined to one switch by a veth pair."""
    waiting = ["sh", "-c", "echo; sleep infinity; true"]
    with contextlib.ExitStack() as processes:

        def start(command: list[str]) -> int:
            process = processes.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            processes.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.read(1), command
            (child, *_) = _children(process.pid) or [process.pid]
            return child

        switch = start(["unshare", "--net", *waiting])
        enter = ["nsenter", f"--target={switch}", "--net"]
        subprocess.run([*enter, "ip", "link", "add", "switch", "type", "bridge"], check=True)
        subprocess.run([*enter, "ip", "link", "set", "switch", "up"], check=True)
        hosts = []
        for i in range(size):
            name = f"host{i}"
            pid = os.getpid() if i == 0 else start([*_UNSHARE, "sh", "-c", _FIRST, name, *waiting])
            pair = ["type", "veth", "peer", "name", name, "netns", str(switch)]
            subprocess.run(["ip", "link", "add", "eth0", "netns", str(pid), *pair], check=True)
            subprocess.run([*enter, "ip", "link", "set", name, "master", "switch", "up"], check=True)
            hosts.append(host := Host(name, f"{_CARRIER}.{i + 1}", pid))
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.reconnect()
        yield hosts


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
