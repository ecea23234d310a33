"""Files fetched from addresses that strangers chose, from a server on this machine."""

from __future__ import annotations

import asyncio
import http.server
import os
import re
import select
import shutil
import socket
import ssl
import subprocess
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.config import MediaConfig
from octavo.entrypoints.chat.answer_reader import AnswerFormat
from octavo.entrypoints.chat.chat_run import ChatPrompt
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.server_state import PreparedPrompt
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.errors import RequestError
from octavo.multimodal import connector
from octavo.multimodal.connector import MediaConnector, fetch_all, is_public
from octavo.request import Prompt
from octavo.sampling_params import SamplingParams
from tests.garbage import counted_garbage
from tests.multimodal.conftest import encoded, picture
from tests.ports import held_port
from tests.waiting import within

PICTURE = encoded(picture(0))
CONFIG = MediaConfig(
    kind="image", folder="", token_id=0, row_multiplier=1.0, max_count=8, max_seconds=60.0, max_bytes=20_000,
    max_pixels=10**6, cache_tokens=1, allows_private=True, fetch_timeout_s=20, max_redirects=2,
)  # fmt: skip


class Pictures(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, str]]]

    def do_GET(self) -> None:
        self.seen.append((self.path, dict(self.headers)))
        kind, _, rest = self.path[1:].partition("?")[0].partition("/")
        self.close_connection = True
        if kind == "cookie":
            self.answer(200, PICTURE, **{"Set-Cookie": "who=you"})
        elif kind == "picture":
            self.answer(200, PICTURE)
        elif kind == "status":
            self.answer(int(rest), b"an internal matter")
        elif kind == "loop":
            self.answer(302, b"", Location=f"/loop/{rest}x")
        elif kind == "twice":
            self.answer(301, b"", Location=f"/once/{rest}")
        elif kind == "once":
            self.answer(307, b"", Location="/picture")
        elif kind == "to":
            self.answer(302, b"", Location=rest)
        elif kind == "compressed":
            self.answer(200, PICTURE, **{"Content-Encoding": "gzip"})
        elif kind == "declared":
            self.head(200, **{"Content-Length": "20001"})
        elif kind == "endless":
            self.head(200, Connection="close")
            self.drip(bytes(4096), 0)
        elif kind == "drip":
            self.head(200, Connection="close")
            self.drip(b"x", 0.01)
        elif kind == "slow-header":
            self.drip(b"x", 0.01)
        elif kind == "cut":
            self.head(200, **{"Content-Length": "100"})
            self.wfile.write(b"cut")
        elif kind == "garbage":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")

    def head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.head(status, **headers, **{"Content-Length": str(len(body))})
        self.wfile.write(body)

    def drip(self, data: bytes, pause_s: float) -> None:
        try:
            while True:
                self.wfile.write(data)
                select.select([self.connection], [], [], pause_s)  # or until the client has left
        except OSError:
            pass  # which is what is wanted

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving_pictures() -> Iterator[str]:
    """The address of a server of pictures, good and hostile."""
    Pictures.seen = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def server() -> Iterator[str]:
    with serving_pictures() as address:
        yield address


def fetch(url: str, **changes: Any) -> bytes:
    return MediaConnector(replace(CONFIG, **changes)).fetch(url).result(timeout=within(60))


def refusal(url: str, **changes: Any) -> str:
    with pytest.raises(RequestError) as refused:
        fetch(url, **changes)
    assert refused.value.status == 400 and refused.value.code == "invalid_image"
    assert "127.0.0" not in str(refused.value) and "internal" not in str(refused.value)
    return str(refused.value)


def resolver(monkeypatch: pytest.MonkeyPatch, **hosts: list[str]) -> list[str]:
    """Have names under .test resolve to one address after the other; the names that were asked for."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: str, port: int, *args: Any, **options: Any) -> Any:
        name = str(host).removesuffix(".test")
        if name not in hosts:
            return real(host, port, *args, **options)
        asked.append(host)
        address = hosts[name].pop(0) if len(hosts[name]) > 1 else hosts[name][0]
        return real(address, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


@pytest.mark.parametrize("path", ["/picture", "/picture?a=b", "/once", "/twice"])
def test_a_picture_is_fetched(server: str, path: str) -> None:
    assert fetch(server + path) == PICTURE
    assert all(headers["Accept-Encoding"] == "identity" for _, headers in Pictures.seen)


def test_nothing_of_one_fetch_is_sent_with_another(server: str) -> None:
    connector = MediaConnector(CONFIG)
    for _ in range(2):
        assert connector.fetch(server + "/cookie").result(timeout=within(60)) == PICTURE
    for _, headers in Pictures.seen:
        assert headers.keys() == {"Accept", "Accept-Encoding", "User-Agent", "Host"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/status/404", "answered with status 404"),
        ("/status/304", "answered with status 304"),
        ("/loop/", r"redirects more than 2 times \(--max-media-redirects\)"),
        ("/compressed", "compressed, which was not asked for"),
        ("/declared", r"more than 20000 bytes \(--max-image-bytes\)"),
        ("/endless", "more than 20000 bytes"),
        ("/cut", "does not answer as it should"),
        ("/garbage", "does not answer as it should"),
        ("/to/file:///etc/passwd", "must be a data:, http: or https: address"),
        ("/to/gopher://example.org/", "must be a data:, http: or https: address"),
        ("/to/http://user:word@example.org/", "a user or a password"),
        ("/to/http://[::1", "not a valid address|does not answer as it should"),
        ("/to/http://xn--0/", "not a valid address"),
        ("/to/http://127.0.0.1:99999/", "not a valid address"),
    ],
)
def test_what_is_no_picture_is_refused(server: str, path: str, said: str) -> None:
    assert re.search(said, refusal(server + path))


@pytest.mark.parametrize("path", ["/drip", "/slow-header"])
def test_a_slow_drip_is_left(server: str, path: str) -> None:
    assert "did not arrive within 0.3 s (--media-fetch-timeout)" in refusal(server + path, fetch_timeout_s=0.3)


PRIVATE = [
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "017700000001", "0.0.0.0", "localhost", "10.0.0.1", "172.16.0.1",
    "192.168.1.1", "100.64.0.1", "169.254.169.254", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:8.8.8.8]", "[::127.0.0.1]", "[fe80::1]",
    "[fc00::1]", "[ff02::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[2001:db8::1]",
]  # fmt: skip


@pytest.mark.parametrize("host", PRIVATE)
def test_only_the_public_internet_is_asked(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_connection(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection")

    monkeypatch.setattr("httpx.AsyncHTTPTransport.handle_async_request", no_connection)
    said = refusal(f"http://{host}:1/a.png", allows_private=False)
    assert "not on the public internet" in said or "cannot be reached" in said  # a family that is not here


def test_public_addresses_are_public() -> None:
    assert all(map(is_public, ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450::1", "168.63.129.17"]))


@pytest.mark.parametrize(
    "address",
    [
        "168.63.129.16", "169.254.169.254", "192.0.0.192", "192.0.0.8", "100.100.100.200", "192.88.99.1", "198.18.0.1",
        "fec0::1", "feff::1", "fe80::1", "fd00:ec2::254", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "::ffff:10.0.0.1",
        "::127.0.0.1", "2002:7f00:1::", "2001::1", "2001:db8::1", "3fff::1", "100::1", "5f00::1", "::", "ff02::1",
    ],
)  # fmt: skip
def test_no_address_of_a_special_network_is_public(address: str) -> None:
    """Whatever this version of Python knows of it."""
    assert not is_public(address)


@pytest.mark.parametrize("target", ["http://127.0.0.2/", "http://private.test/", "http://mixed.test/"])
def test_a_redirect_to_a_private_address_is_refused(server: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = is_public
    monkeypatch.setattr(connector, "is_public", lambda address: address == "127.0.0.1" or real(address))
    resolver(monkeypatch, private=["169.254.169.254"], mixed=["10.0.0.1"])
    assert fetch(server + "/picture", allows_private=False) == PICTURE  # as far as the redirect all is well
    assert "not on the public internet" in refusal(f"{server}/to/{target}", allows_private=False)


def test_the_address_that_was_checked_is_the_one_that_is_asked(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = server.rpartition(":")[2]
    asked = resolver(monkeypatch, rebinding=["127.0.0.1", "10.255.255.1"])
    assert fetch(f"http://rebinding.test:{port}/picture") == PICTURE
    assert asked == ["rebinding.test"]
    assert Pictures.seen[-1][1]["Host"] == f"rebinding.test:{port}"


def test_files_of_so_many_requests_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first that is fetched until all are decoded: others wait without."""
    events: list[str] = []
    part = {"type": "image_url", "image_url": {"url": "http://pictures.test/a.png"}}
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": [part]}]})

    class Files(dict[str, bytes]):
        pass

    fetched: list[weakref.ref[Files]] = []

    class Processor:
        def needs_fetching(self, media: Any) -> bool:
            return True

        async def fetch(self, media: Any) -> dict[str, bytes]:
            events.append("fetched")
            files = Files({"http://pictures.test/a.png": PICTURE})
            fetched.append(weakref.ref(files))
            return files

    prompt, unread = Prompt([1]), PreparedPrompt("", add_special_tokens=False)

    async def submit(_id: str, _body: Any, _params: Any, prepare: Any, **_: Any) -> tuple[Prompt, str]:
        prepare()
        await asyncio.sleep(0)
        assert sum(files() is not None for files in fetched) == 1
        events.append("decoded")
        return prompt, "outputs"

    async def run() -> None:
        inputs = SimpleNamespace(media_processor_of=lambda media: Processor())
        state: Any = SimpleNamespace(
            media_fetch_slots=asyncio.Semaphore(1), engine=SimpleNamespace(inputs=inputs), submit=submit,
            formats=SimpleNamespace(why_no_choice=""),
            args=ServerArgs(),
        )  # fmt: skip
        resumable: Any = SimpleNamespace()
        made.extend(ChatPrompt(body, state, SamplingParams()) for _ in range(3))
        for one in made:
            monkeypatch.setattr(one, "_render_and_choose_format", lambda history, media_files: (unread, AnswerFormat()))
        answers = await asyncio.gather(*(one.submit("a", resumable) for one in made))
        assert [(one.prompt, one.outputs) for one in answers] == [(prompt, "outputs")] * 3

    made: list[ChatPrompt] = []
    asyncio.run(run())
    assert events == ["fetched", "decoded"] * 3
    assert [files() for files in fetched] == [None] * 3


def test_domains_that_are_allowed(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = server.rpartition(":")[2]
    resolver(monkeypatch, pictures=["127.0.0.1"], others=["127.0.0.1"])
    allowed: dict[str, Any] = {"allowed_domains": ["pictures.test"]}
    assert fetch(f"http://PICTURES.test:{port}/picture", **allowed) == PICTURE
    for url in (
        f"http://others.test:{port}/picture",
        f"http://pictures.test:{port}/to/http://others.test:{port}/picture",
        f"http://pictures.test.others.test:{port}/picture",
        f"http://others.test:{port}\\@pictures.test/picture",
    ):
        said = refusal(url, **allowed)
        assert "none of the allowed domains" in said or "user or a password" in said or "not a valid address" in said


@pytest.mark.parametrize(
    "url", ["", "a.png", "//example.org/a.png", "ftp://example.org/a.png", "http://", "http:///a.png", "http://a b/",
            "http://example.org:99999/", "http://user@example.org/", "http://" + "a" * 300 + ".org/", "http://\x00/",
            "http://example.org/" + "a" * 9000, "javascript:alert(1)", "http://xn--0/", "http://xn--a-ecp.ru/", "http://xn--/",
        "http://a..b/", "http://a/\ud800", "http://a:99999/", f"http://{'a' * 70}.test/"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    refusal(url)


def test_certificates_are_those_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=pictures.test", "-addext", "subjectAltName=DNS:pictures.test"],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    resolver(monkeypatch, pictures=["127.0.0.1"], others=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as secure:
        secure.daemon_threads = True
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        threading.Thread(target=secure.serve_forever, args=(0.01,), daemon=True).start()
        assert fetch(f"https://pictures.test:{secure.server_port}/picture") == PICTURE
        for host in ("others.test", "127.0.0.1"):
            assert "cannot be reached" in refusal(f"https://{host}:{secure.server_port}/picture")
        secure.shutdown()


def test_files_below_one_folder(tmp_path: Path) -> None:
    folder = (tmp_path / "of pictures").resolve()
    folder.mkdir()
    (folder / "a.png").write_bytes(PICTURE)
    (folder / "large.png").write_bytes(bytes(20_001))
    (tmp_path / "secret.png").write_bytes(PICTURE)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "inside.png").symlink_to(folder / "a.png")
    os.mkfifo(folder / "pipe.png")
    allowed = {"allowed_folder": str(folder)}
    at = folder.as_uri()
    for url in (
        f"{at}/a.png",
        f"{at}/inside.png",
        f"{at}/../of%20pictures/a.png",
        at.replace("//", "//localhost", 1) + "/a.png",
    ):
        assert fetch(url, **allowed) == PICTURE
    same = set()
    for url in (
        f"{at}/link.png", f"{at}/../secret.png", f"{at}/%2e%2e/secret.png", f"{at}/none.png", f"{at}/pipe.png", at,
        "file:///etc/passwd", f"{at}/a.png%00", at.replace("//", "//example.org", 1) + "/a.png", "file:", "file://[",
    ):  # fmt: skip
        same.add(refusal(url, **allowed))
    assert len(same) == 1  # what is not there is refused as what is not allowed
    assert "more than 20000 bytes" in refusal(f"{at}/large.png", **allowed)
    assert "this server allows none (--allowed-local-media-path)" in refusal(f"{at}/a.png")


def test_pictures_of_a_prompt_are_fetched_at_once_and_left_when_one_is_refused(server: str) -> None:
    async def fetched(*urls: str) -> dict[str, bytes]:
        return await fetch_all(MediaConnector(CONFIG), list(urls))

    data = "data:image/png;base64,"
    assert asyncio.run(fetched(server + "/picture", data, server + "/picture")) == {server + "/picture": PICTURE}
    assert len(Pictures.seen) == 1
    with pytest.raises(RequestError, match="status 404"):  # long before the other one's 20 s
        asyncio.run(asyncio.wait_for(fetched(server + "/drip", server + "/status/404"), within(15)))


def test_refused_files_leave_no_cycles(server: str, tmp_path: Path) -> None:
    """In which they would be held, with their requests, until a collection."""
    config = replace(CONFIG, allowed_folder=tmp_path)

    async def refused(*urls: str) -> None:
        with pytest.raises(RequestError):
            await fetch_all(MediaConnector(config), urls)

    urls = [f"{server}/{path}" for path in ("loop/a", "endless", "declared", "status/404")]
    urls += [f"http://127.0.0.1:{held_port()}/a.png", f"file://{tmp_path}/a.png"]

    async def all_refused() -> None:
        for url in urls:
            await refused(url)
        await refused(*urls)

    asyncio.run(all_refused())  # the first imports modules
    with counted_garbage("octavo", "httpx") as left:
        asyncio.run(all_refused())
    assert not left
