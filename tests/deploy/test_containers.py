"""The image's recipe and the Compose files: the field's checkers, what they promise, and nginx between real sockets."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.entrypoints.cli import gateway
from octavo.entrypoints.cli.serve import parse_args
from octavo.gateway.catalogue import read_catalogue
from octavo.gateway.discovery import DnsName, read_source
from octavo.version import __version__
from tests.ports import held_port
from tests.waiting import wait_until, within

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
COMPOSE = sorted((DEPLOY / "compose").rglob("compose*.yaml"))
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}")


def tool(name: str) -> str:
    """The path of a program that the extra `test` installs beside this Python."""
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{name} comes with scripts/install test"
    return str(path)


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def debian(program: str, package: str) -> str:
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin")
    if found is None:
        pytest.skip(f"there is no {program} here (Debian: apt-get install --no-install-recommends {package})")
    return found


def test_hadolint_finds_nothing() -> None:
    run(tool("hadolint"), DOCKERFILE)


def test_the_image_has_the_version_and_takes_what_the_build_reads() -> None:
    text = DOCKERFILE.read_text()
    assert f"ARG VERSION={__version__}\n" in text
    copied = {name for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE) for name in line.split()}
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert all((DEPLOY.parent / name).exists() for name in copied)


def test_an_image_for_processors_asks_for_no_gpu() -> None:
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?\n(.*?)(?=^FROM|\Z)", DOCKERFILE.read_text(), re.M | re.S)
    assert [name for _, name, text in stages if "NVIDIA_VISIBLE_DEVICES" in text] == ["cuda"]
    assert (stages[-1][0], [base for base, name, _ in stages if name in ("cpu", "cuda")]) == ("${DEVICE}", ["base"] * 2)


def test_compose_files_keep_the_schema() -> None:
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *COMPOSE)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_compose_files_say_what_they_read(path: Path) -> None:
    example = dict(re.findall(r"^(\w+)=(.*)$", (path.parent / ".env.example").read_text(), re.MULTILINE))
    for name, default in VARIABLE.findall(path.read_text()):
        assert example[name] == default, f"{name} in .env.example"
    services: dict[str, Any] = yaml.safe_load(path.read_text())["services"]
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (path.parent / source).exists(), volume
        if "build" in service and "context" in service["build"]:
            assert (path.parent / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DOCKERFILE)
        if path.name == "compose.yaml":
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["logging"]["options"].keys() == {"max-size", "max-file"}, f"{name} would fill the disk"


def test_example_settings_are_all_read() -> None:
    for example in (DEPLOY / "compose").rglob(".env.example"):
        read = {name for path in example.parent.glob("*.yaml") for name, _ in VARIABLE.findall(path.read_text())}
        assert set(re.findall(r"^(\w+)=", example.read_text(), re.MULTILINE)) == read


def test_the_server_and_the_gateway_take_the_flags_of_the_compose_files() -> None:
    read = []
    for path in COMPOSE:
        for service in yaml.safe_load(path.read_text())["services"].values():
            if "octavo" in service.get("image", "") and "command" in service:
                flags = [VARIABLE.sub(lambda found: found[2] or "", str(flag)) for flag in service["command"]]
                read.append(service.get("entrypoint", ["octavo", "serve"]))
                if read[-1] == ["octavo", "gateway"]:
                    args = gateway.make_parser("octavo gateway").parse_args(flags)
                    listens = {args.port: args.host or "0.0.0.0", args.admin_port: args.admin_host}
                    published = [int(port.rpartition(":")[2]) for port in service["ports"]]
                    assert [listens[port] for port in published] == ["0.0.0.0"] * len(published)
                else:
                    parse_args(flags, "octavo serve")
    assert ["octavo", "gateway"] in read and {*map(tuple, read)} <= {("octavo", "gateway"), ("octavo", "serve")}


def test_the_gateway_finds_the_services_of_its_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DEPLOY / "compose" / "gateway"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for name in services["gateway"]["environment"]:
        monkeypatch.setenv(name, "k")
    models = read_catalogue(str(folder / "models.yaml")).models
    for name, entry in models.items():
        assert f"--served-model-name={name}" in services[name]["command"]
        assert read_source(entry.discover or "") == DnsName(name, 8000)
        assert entry.api_key_env in services["gateway"]["environment"]
        assert f"${{{entry.api_key_env}:?" in services[name]["environment"]["OCTAVO_API_KEY"]


def test_alertmanager_takes_its_settings() -> None:
    run(debian("amtool", "prometheus-alertmanager"), "check-config", DEPLOY / "compose" / "full" / "alertmanager.yml")


class Backend:
    """A server that nginx knows: answers 503 while it `drains`, hangs up once it has read a request where it `breaks`,
    else answers with a stream whose second half waits for `go_on`."""

    def __init__(self) -> None:
        self.drains, self.breaks, self.go_on, self.num_asked = False, False, threading.Event(), 0
        self.traceparents: list[str | None] = []
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                backend.num_asked += 1
                backend.traceparents.append(self.headers["traceparent"])
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if backend.breaks:
                    self.close_connection = True
                    return
                self.send_response(503 if backend.drains else 200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.send_chunk(body)
                if not backend.drains:
                    assert backend.go_on.wait(within(30))
                    self.send_chunk(b"second")
                self.send_chunk(b"")

            def send_chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def at(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def backends() -> Iterator[tuple[Backend, Backend]]:
    both = (Backend(), Backend())
    yield both
    for backend in both:
        backend.close()


@contextlib.contextmanager
def running_nginx(folder: Path, *backends: Backend) -> Iterator[http.client.HTTPConnection]:
    """Debian's nginx with the settings of deploy/compose/full, but for ports and folders."""
    nginx, port = debian("nginx", "nginx-light"), held_port()
    settings = (DEPLOY / "compose" / "full" / "nginx.conf").read_text()
    for old, new in (
        ("listen 8080", f"listen 127.0.0.1:{port}"),
        # Debian's nginx knows no `resolve`, which an address does not need.
        ("server-a:8000 resolve", backends[0].at),
        ("server-b:8000 resolve", backends[1].at),
        ("/tmp/", f"{folder}/"),
        ("/dev/stdout", f"{folder}/access.log"),
        ("worker_rlimit_nofile 65536;", "daemon off;"),  # limits are the container's
        ("worker_processes auto", "worker_processes 1"),  # which share what they know of servers that are down
    ):
        assert old in settings
        settings = settings.replace(old, new)
    (folder / "nginx.conf").write_text(settings)
    command = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    run(*command, "-t")
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:

        def answers() -> bool:
            assert process.poll() is None
            with contextlib.suppress(OSError):
                client.request("GET", "/nginx-health")
                return client.getresponse().read() == b"ok\n"
            client.close()
            return False

        wait_until(answers)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(within(30))


def test_nginx_passes_streams_on_as_they_come(tmp_path: Path, backends: tuple[Backend, Backend]) -> None:
    with running_nginx(tmp_path, *backends) as client:
        client.request("POST", "/v1/completions", b"first ", {"traceparent": "00-1f-2e-01"})
        answer = client.getresponse()
        assert answer.read1() == b"first ", "the other half is not there before we have seen this one"
        for backend in backends:
            backend.go_on.set()
        assert answer.read() == b"second"
        assert [*backends[0].traceparents, *backends[1].traceparents] == ["00-1f-2e-01"], (
            "its trace goes on behind nginx"
        )


def test_nginx_asks_the_other_server_when_one_drains_or_is_gone(
    tmp_path: Path, backends: tuple[Backend, Backend]
) -> None:
    drained, other = backends
    drained.drains = True
    other.go_on.set()
    with running_nginx(tmp_path, *backends) as client:
        for body in (b"a", b"b"):
            client.request("POST", "/v1/chat/completions", body)
            answer = client.getresponse()
            assert (answer.status, answer.read()) == (200, body + b"second")
        assert drained.num_asked > 0, "it was asked, and its 503 came to no client"
        drained.close()
        for body in (b"c", b"d"):
            client.request("POST", "/v1/files", body)
            answer = client.getresponse()
            assert (answer.status, answer.read()) == (200, body + b"second")
        client.request("GET", "/metrics")
        assert client.getresponse().read() and other.num_asked == 4


def test_nginx_does_not_repeat_a_request_that_ended_its_server(
    tmp_path: Path, backends: tuple[Backend, Backend]
) -> None:
    for backend in backends:
        backend.breaks = True
    with running_nginx(tmp_path, *backends) as client:
        client.request("POST", "/v1/chat/completions", b"x")
        assert client.getresponse().status == 502
        assert sum(backend.num_asked for backend in backends) == 1


def test_nginx_follows_names_whose_addresses_change() -> None:
    """Read from the settings: no nginx of Debian's knows `resolve`, which came with 1.27.3."""
    settings = (DEPLOY / "compose" / "full" / "nginx.conf").read_text()
    services = yaml.safe_load((DEPLOY / "compose" / "full" / "compose.yaml").read_text())["services"]
    servers = re.findall(r"^ +server ([a-z][\w-]*):8000 (\w+)", settings, re.MULTILINE)
    assert servers == [(name, "resolve") for name in services if "server" in name]
    assert re.search(r"^ +resolver 127.0.0.11 valid=5s", settings, re.MULTILINE) and "zone octavo " in settings
    (version,) = re.findall(r":(\d+)\.(\d+)\}$", services["nginx"]["image"])
    assert tuple(map(int, version)) >= (1, 28)


def test_two_servers_share_what_they_keep() -> None:
    services = yaml.safe_load((DEPLOY / "compose" / "full" / "compose.yaml").read_text())["services"]
    for name in ("server-a", "server-b"):
        assert "--response-store=/data/responses.db" in services[name]["command"]
        assert services[name]["volumes"] == ["models:/data"]


def test_nginx_reports_that_all_servers_drain(tmp_path: Path, backends: tuple[Backend, Backend]) -> None:
    for backend in backends:
        backend.drains = True
    with running_nginx(tmp_path, *backends) as client:
        client.request("POST", "/v1/completions", b"x")
        assert client.getresponse().status == 503
