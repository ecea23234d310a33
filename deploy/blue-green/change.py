#!/usr/bin/env python3
"""Changes a server behind nginx to another version of it without a failed request: blue-green, on one Linux machine.

    change.py to STATE -- octavo serve MODEL --served-model-name chat    # the first start, and every change
    change.py recover STATE    # after a change that was killed, and after a reboot
    change.py status STATE
    change.py stop STATE

What is known is in the folder STATE, and servers and nginx outlive this program. Until the running server is told to
end, every failure goes back to it; a change that was killed before goes back too, when this program is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.2
HTTP_TIMEOUT_S = 30
ENDING_S = 1  # a server that ends closes its connections before it is seen to have ended
NUM_FRESH_ANSWERS = 5  # of nginx with its new settings, one after the other
NUM_IDLE_POLLS = 3  # a request that nginx passed on is counted only once it has been read
COLOURS = ("blue", "green")
# The process writes down who it is itself, before it becomes the server, so that a kill of this program loses none.
RECORD_AND_RUN = 'cat /proc/$$/stat >"$0" && exec "$@"'


class Failed(Exception):
    """The change cannot go on."""


@dataclass(frozen=True)
class Server:
    colour: str
    port: int
    command: list[str]
    host: str = "127.0.0.1"

    def request(self, path: str, body: object = None, timeout_s: float = HTTP_TIMEOUT_S) -> tuple[int, bytes]:
        """Status (0: no answer) and body."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OCTAVO_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.host}:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except (OSError, http.client.HTTPException):
            return 0, b""

    def metrics(self) -> list[tuple[str, float]] | None:
        """Samples: name with labels, and value. None if the server does not tell."""
        status, text = self.request("/metrics")
        if status != 200:
            return None
        lines = (line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#"))
        return [(name, float(value)) for name, _, value in lines if name]

    def num_requests(self) -> float | None:
        """That run or wait."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        samples = self.metrics()
        if samples is None:
            return None
        return sum(value for name, value in samples if name.partition("{")[0] in names)

    def num_failures(self) -> float | None:
        """Answers with a status of 5xx, requests that ended in an error, and deaths of the engine."""
        samples = self.metrics()
        if samples is None:
            return None
        return sum(
            value
            for name, value in samples
            if name.startswith("octavo:engine_restarts_total")
            or (name.startswith("http_requests_total{") and 'status="5xx"' in name)
            or (name.startswith("vllm:request_success_total{") and 'finished_reason="error"' in name)
        )


class Site:
    """nginx and its servers, as the state folder knows them: `live` has the requests, `next` is to have them, `old` had
    them and has been told to end."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        state: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            state = json.loads((folder / "state.json").read_text())
        servers = [Server(**state[name]) if state.get(name) else None for name in ("live", "next", "old")]
        self.live, self.next, self.old = servers
        self.listen: str = args.listen or state.get("listen", "127.0.0.1:8000")
        self.nginx_conf = args.nginx_conf or Path(state.get("nginx_conf", Path(__file__).with_name("nginx.conf")))

    def save(self) -> None:
        servers = {"live": self.live, "next": self.next, "old": self.old}
        settings = {"listen": self.listen, "nginx_conf": str(self.nginx_conf.resolve())}
        known = {name: server and asdict(server) for name, server in servers.items()}
        text = json.dumps(settings | known, indent=2)
        new = self.folder / "state.json.new"
        with open(new, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / "state.json")

    def pid(self, server: Server) -> int | None:
        """None if it has ended, also if another process has its number since."""
        try:
            recorded = (self.folder / f"{server.colour}.stat").read_text()
            current = Path(f"/proc/{recorded.split()[0]}/stat").read_text()
        except (OSError, IndexError):
            return None
        state, *fields = current.rpartition(")")[2].split()
        started = 18  # the field `starttime` of proc(5), counted from the one after `state`
        if state in "ZX" or fields[started] != recorded.rpartition(")")[2].split()[1 + started]:
            return None
        return int(recorded.split()[0])

    def start(self, server: Server) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", server.port))
            except OSError as error:
                raise Failed(f"port {server.port} is taken by another program: {error.strerror}") from None
        record = self.folder / f"{server.colour}.stat"
        record.unlink(missing_ok=True)
        at = ["--host", "127.0.0.1", "--port", str(server.port)]
        with open(self.folder / f"{server.colour}.log", "ab") as log:
            process = subprocess.Popen(
                ["sh", "-c", RECORD_AND_RUN, str(record), *server.command, *at],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        while process.poll() is None and not (record.exists() and record.read_text()):
            time.sleep(0.01)

    def stop(self, server: Server) -> None:
        """SIGTERM, on which the server drains by itself; SIGKILL to its processes after --stop-timeout."""
        if (pid := self.pid(server)) is None:
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + self.args.stop_timeout
        while self.pid(server) is not None:
            if time.monotonic() > deadline:
                say(f"{server.colour} does not end: killed")
                os.killpg(pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(POLL_S)

    def nginx_pid(self) -> int | None:
        try:
            pid = int((self.folder / "nginx.pid").read_text())
            return pid if str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else None
        except (OSError, ValueError):
            return None

    def route(self, *shares: tuple[Server, int]) -> None:
        """Let nginx give each server its percentage, and return when it does. Requests under way stay as they are."""
        generation = time.time_ns()
        # max_fails=0: this program says who is asked, and nginx does not take a server out by itself.
        lines = [f"    server 127.0.0.1:{at.port} weight={share} max_fails=0;" for at, share in shares if share]
        (self.folder / "upstream.conf").write_text(
            "\n".join(["upstream octavo {", *lines, "}", f'map "" $generation {{ default {generation}; }}', ""])
        )
        (self.folder / "listen.conf").write_text(f"listen {self.listen};\n")
        shutil.copy(self.nginx_conf, self.folder / "nginx.conf")
        command = [self.args.nginx, "-p", f"{self.folder}/", "-c", f"{self.folder}/nginx.conf", "-e", "error.log"]
        tried = subprocess.run([*command, "-t"], capture_output=True, text=True)
        if tried.returncode:
            raise Failed(f"nginx refuses its settings: {tried.stderr.strip()}")
        if pid := self.nginx_pid():
            os.kill(pid, signal.SIGHUP)
        else:
            with open(self.folder / "error.log", "ab") as log:
                if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode:
                    raise Failed(f"nginx does not start: see {log.name}")
        deadline = time.monotonic() + HTTP_TIMEOUT_S
        host, port = listen_address(self.listen)
        front = Server("nginx", port, [], host)
        # A worker that has not heard of the new settings yet may still take requests: one fresh answer says little.
        num_fresh = 0
        while num_fresh < NUM_FRESH_ANSWERS:
            is_fresh = front.request("/nginx-generation") == (200, str(generation).encode())
            num_fresh = num_fresh + 1 if is_fresh else 0
            if time.monotonic() > deadline:
                raise Failed(f"nginx does not follow its new settings: see {self.folder}/error.log")
            time.sleep(0.02 if is_fresh else 0.05)

    def check(self, server: Server, num_failures: float) -> None:
        status = server.request("/health")[0]
        number = server.num_failures() if status == 200 else None
        deadline = time.monotonic() + ENDING_S
        while number is None and self.pid(server) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.pid(server) is None:
            raise Failed(f"{server.colour} has ended: see {self.folder}/{server.colour}.log")
        if status != 200:
            raise Failed(f"{server.colour} is not healthy: /health is {status or 'not answered'}")
        if number is None:
            raise Failed(f"{server.colour} does not answer /metrics: see {self.folder}/{server.colour}.log")
        if number > num_failures:
            raise Failed(f"{server.colour} fails requests: see {self.folder}/{server.colour}.log")

    def wait_until_ready(self, server: Server) -> None:
        deadline = time.monotonic() + self.args.ready_timeout
        while server.request("/health")[0] != 200:
            if self.pid(server) is None:
                raise Failed(f"{server.colour} has ended: see {self.folder}/{server.colour}.log")
            if time.monotonic() > deadline:
                raise Failed(f"{server.colour} is not ready after {self.args.ready_timeout:g} s")
            time.sleep(POLL_S)

    def warm(self, server: Server) -> None:
        """Ask a real question, for the model by the name that users have of it."""
        body = self.args.warm_body
        if body is None:
            asked = self.live or server
            status, models = asked.request("/v1/models")
            if status != 200:
                raise Failed(f"{asked.colour} does not say which models it has: /v1/models is {status}")
            body = {"model": json.loads(models)["data"][0]["id"], "prompt": "Hello", "max_tokens": 16}
        status, answer = server.request(self.args.warm_path, body, self.args.ready_timeout)
        if status != 200:
            raise Failed(f"{server.colour} does not answer: {self.args.warm_path} is {status} {answer[:500]!r}")

    def drain(self, server: Server, watched: tuple[Server, float] | None = None) -> None:
        """Wait until none of its requests is left, while the other one is `watched`."""
        deadline = time.monotonic() + self.args.drain_timeout
        num_idle = 0
        while num_idle < NUM_IDLE_POLLS and self.pid(server) is not None:
            if watched:
                self.check(*watched)
            num_idle = num_idle + 1 if server.num_requests() == 0 else 0
            if time.monotonic() > deadline:
                say(f"{server.colour} has requests after {self.args.drain_timeout:g} s, and is told to end")
                return
            time.sleep(POLL_S)

    def recover(self) -> None:
        """Bring the site to one server: the one that has the requests."""
        if self.next is not None and self.live is not None:
            if self.pid(self.live) is None and self.next.request("/health")[0] == 200:
                say(f"{self.live.colour} has ended without us: {self.next.colour} is all there is")
                self.live, self.next = self.next, None
            else:
                say(f"back to {self.live.colour}")
            self.route((self.live, 100))
            self.save()
        if self.next is not None:
            self.drain(self.next)
            self.stop(self.next)
            self.next = None
            self.save()
        if self.old is not None:
            self.stop(self.old)
            self.old = None
            self.save()

    def revive(self) -> None:
        """Start the live server and nginx again where they have ended, as a reboot ends them."""
        if self.live is None:
            return
        has_ended = self.pid(self.live) is None
        if has_ended:
            say(f"{self.live.colour} starts again at port {self.live.port}")
            self.start(self.live)
            self.wait_until_ready(self.live)
        if has_ended or self.nginx_pid() is None:
            self.route((self.live, 100))
            say(f"{self.live.colour} serves")

    def change(self, command: list[str]) -> None:
        """Go to `command`, or stay with what there is and raise."""
        for program, remedy in (
            (self.args.nginx, "install it, or name it with --nginx"),
            (command[0], "check its path"),
        ):
            if shutil.which(program) is None:
                raise Failed(f"there is no program {program}: {remedy}")
        if self.live is not None and self.pid(self.live) is None:
            say(f"{self.live.colour} has ended without us: this is a first start")
            self.live = None
        i = 1 if self.live is not None and self.live.colour == COLOURS[0] else 0
        new = self.next = Server(COLOURS[i], self.args.ports[i], command)
        self.save()  # before it starts, so that it is found after a kill
        try:
            say(f"{new.colour} starts at port {new.port}")
            self.start(new)
            self.wait_until_ready(new)
            self.warm(new)
            say(f"{new.colour} is ready")
            failures = new.num_failures() or 0
            if self.live is None:
                self.route((new, 100))
            else:
                for share in (*self.args.weights, 100):
                    self.route((self.live, 100 - share), (new, share))
                    say(f"{new.colour} has {share}%")
                    end = time.monotonic() + self.args.watch
                    while time.monotonic() < end:
                        self.check(new, failures)
                        time.sleep(POLL_S)
                say(f"{self.live.colour} drains")
                self.drain(self.live, (new, failures))
                self.check(new, failures)
        except BaseException:
            self.recover()
            raise
        self.live, self.next, self.old = new, None, self.live
        self.save()  # from here on nothing goes back
        if self.old is not None:
            say(f"{self.old.colour} ends")
        self.recover()
        say(f"{new.colour} serves")

    def stop_all(self) -> None:
        if pid := self.nginx_pid():
            os.kill(pid, signal.SIGQUIT)  # answers what it has begun
            deadline = time.monotonic() + self.args.drain_timeout
            while self.nginx_pid() is not None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        if self.live is not None:
            self.stop(self.live)
            self.live = None
            self.save()

    def status(self) -> dict[str, object]:
        servers = {"live": self.live, "next": self.next, "old": self.old}
        known = {name: server and asdict(server) | {"pid": self.pid(server)} for name, server in servers.items()}
        return {"nginx": self.nginx_pid(), **known}


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The only one that changes this site."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failed(f"another change.py works on {folder}") from None
        yield


def listen_address(text: str) -> tuple[str, int]:
    """Host and port at which this machine reaches nginx."""
    found = re.fullmatch(r"(?:(\[[0-9a-fA-F:.]+\]|\*|[\w.-]+):)?(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address: give PORT, HOST:PORT or [IPV6]:PORT")
    host = {None: "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(found[1], found[1])
    return host, int(found[2])


def listened(text: str) -> str:
    listen_address(text)
    return text


def percentage(text: str) -> int:
    if not 0 < (value := int(text)) < 100:
        raise argparse.ArgumentTypeError(f"{value}: a share lies between 0 and 100%")
    return value


def parse_args(arguments: list[str]) -> argparse.Namespace:
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin") or "nginx"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["to", "recover", "status", "stop"])
    parser.add_argument("state", type=Path, help="Folder of state, logs and nginx's files; made where there is none.")
    parser.add_argument("--listen", type=listened, help="nginx's address: at first 127.0.0.1:8000, then as before.")
    parser.add_argument("--ports", type=int, nargs=2, default=[8001, 8002], help="Blue's and green's own ports.")
    parser.add_argument(
        "--weights", type=percentage, nargs="*", default=[10, 50], help="Green's shares in %% before 100."
    )
    parser.add_argument("--watch", type=float, default=10, help="Seconds for which green is watched at each share.")
    parser.add_argument("--ready-timeout", type=float, default=600, help="Seconds until green must be ready.")
    parser.add_argument("--drain-timeout", type=float, default=600, help="Seconds that running requests may take.")
    parser.add_argument("--stop-timeout", type=float, default=60, help="Seconds from SIGTERM to SIGKILL.")
    parser.add_argument("--warm-path", default="/v1/completions")
    parser.add_argument("--warm-body", type=json.loads, help="JSON; by default a completion by the first live model.")
    parser.add_argument("--nginx", default=nginx, help="The program.")
    parser.add_argument("--nginx-conf", type=Path, help="Instead of the one beside this file, from now on.")
    at = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:at])
    args.command = arguments[at + 1 :]
    if (args.what == "to") != bool(args.command):
        parser.error("`to`, and no other, is followed by -- and the server's command")
    return args


def main(arguments: list[str]) -> int:
    args = parse_args(arguments)
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, lambda number, frame: sys.exit(128 + number))
    folder = args.state.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.what == "status":
        say(json.dumps(Site(folder, args).status(), indent=2))
        return 0
    try:
        with alone(folder):
            site = Site(folder, args)
            site.recover()
            if args.what == "to":
                site.change(args.command)
            elif args.what == "recover":
                site.revive()
            elif args.what == "stop":
                site.stop_all()
    except Failed as error:
        print(f"change.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
