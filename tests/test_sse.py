"""Server-sent events in every form that the format allows, cut anywhere, for the clients that read them."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.bench import serve as bench_serve
from octavo.entrypoints.cli.terminal import complete
from octavo.sse_reader import EventReader

STREAM = (
    ': a comment\n\n\ndata: {"a": 1}\n\nevent: x\nid: 7\ndata:{"b":2}\nretry: 10\n\n'
    ": ping\ndata: one\ndata:\ndata:  two\n\ndata\n\nid: 1\n\ndatum: no\n\ndata: [DONE]\n\ndata: not whole"
)
EVENTS = [b'{"a": 1}', b'{"b":2}', b"one\n\n two", b"", b"[DONE]"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_data_are_the_same_however_the_stream_is_cut(end: str) -> None:
    stream = STREAM.replace("\n", end).encode()
    for size in (1, 2, 3, 7, len(stream)):
        reader = EventReader()
        found = [event for i in range(0, len(stream), size) for event in reader.feed(stream[i : i + size])]
        assert found == EVENTS, (end, size)


def test_an_event_is_given_as_soon_as_it_is_whole() -> None:
    reader = EventReader()
    assert reader.feed(b"\xef\xbb\xbfdata: a\r\r") == [b"a"]
    assert reader.feed(b"\ndata: b\r\n\r\n") == [b"b"]
    assert reader.feed(b"") == []


@pytest.fixture
def odd_server() -> Iterator[str]:
    """Answers every request with a stream of legal, unusual events, in odd chunks."""
    chunks = [{"choices": [{"text": text}]} for text in ("Hel", "lo")]
    events = [json.dumps(chunk).replace('": [', '":\r\ndata: [') for chunk in chunks]
    body = f": hello\r\n\r\nid: 1\r\ndata:{events[0]}\r\n\r\nevent: message\r\ndata: {events[1]}\r\n\r\n"
    stream = f"{body}data:[DONE]\r\n\r\n".encode()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.rfile.read(length)
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for i in range(0, len(stream), 9):
                part = stream[i : i + 9]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_terminal_client_reads_them(odd_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(["--url", f"{odd_server}/v1", "--model", "m", "--quick", "Hi"]) == 0
    assert capsys.readouterr().out == "Hello\n"


def test_the_benchmark_reads_them_and_takes_flags_with_underscores(
    odd_server: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    flags = ["--base_url", odd_server, "--model", "m", "--tokenizer", str(tiny_tokenizer), "--json", str(file)]
    flags += ["--num_prompts=2", "--random_input_len", "4", "--disable_tqdm", "--save_detailed"]
    assert bench_serve.main(flags) == 0
    figures = json.loads(file.read_text())
    assert (figures["completed"], figures["generated_texts"]) == (2, ["Hello", "Hello"])
