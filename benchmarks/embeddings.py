"""Embeddings a second of one model: Octavo, and beside it what is installed of sentence-transformers, ONNX Runtime and
OpenVINO, in one run over the same texts.

    python benchmarks/embeddings.py FOLDER [--onnx FILE] [--texts 256] [--lengths 16 256] [--clients 64]

FOLDER is a sentence-transformers folder with a vocab.txt; FILE has the network with its pooling, of inputs `i` (token
ids) and `a` (their mask), both [texts, tokens] int64, as torch.onnx.export writes it. The others get texts sorted by
length in batches of 32, padded.

With --clients Octavo is a server, and so many clients send it one text a request. The others have no server: they are
called in this process with one text after the other, OpenVINO also with as many at once as it wants for its throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from octavo import LLM

Run = Callable[[], Any]
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs=2, default=(16, 256), metavar=("LEAST", "MOST"))
    parser.add_argument("--clients", type=int, default=0)
    args = parser.parse_args()
    texts = make_texts(args.folder, args.texts, *args.lengths)
    for settings in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}):
        name = f"octavo {' '.join(settings.values())}"
        if args.clients:
            with serving(args.folder, settings) as port:
                report(name, len(texts), lambda: asyncio.run(ask(port, texts, args.clients)))
        else:
            report(name, len(texts), octavo(str(args.folder), texts, settings))
    for name, run in others(args.folder, args.onnx, texts, is_single=bool(args.clients)).items():
        report(name, len(texts), run)


def make_texts(folder: Path, count: int, least: int, most: int) -> list[str]:
    """Texts of random words, of that many tokens at least and about that many at most."""
    words = [w for w in (folder / "vocab.txt").read_text().split() if w.isalpha() and len(w) > 3]
    random = np.random.default_rng(0)
    return [" ".join(random.choice(words, int(n) - 2)) for n in random.integers(least, most, count)]


def report(name: str, count: int, run: Run) -> None:
    """The better of two runs."""
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    print(f"{name:30s} {count / min(seconds):8.1f} texts/s", flush=True)


def octavo(folder: str, texts: list[str], settings: dict[str, str]) -> Run:
    llm = LLM(folder, **settings)
    return lambda: llm.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)


@contextlib.contextmanager
def serving(folder: Path, settings: dict[str, str]) -> Iterator[int]:
    """A server of the model; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "octavo.entrypoints.cli.main", "serve", str(folder), "--port", str(port), *flags]
    with subprocess.Popen([*command, "--disable-log-requests"], stderr=subprocess.DEVNULL) as server:
        try:
            while True:
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                    break
                if server.poll() is not None:
                    raise SystemExit(f"The server of {folder} has ended.")
                time.sleep(0.1)
            yield port
        finally:
            server.terminate()


async def ask(port: int, texts: list[str], clients: int) -> None:
    """Ask for each text's embedding in a request of its own; each client keeps a connection."""
    left = iter(texts)

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for text in left:
            body = json.dumps({"input": text, "truncate_prompt_tokens": -1, "encoding_format": "base64"}).encode()
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(answer.partition(b"content-length:")[2].split(b"\r\n")[0])
            content = await reader.readexactly(length)
            if not answer.startswith(b"http/1.1 200"):
                raise SystemExit(content.decode())
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))


def others(folder: Path, onnx: Path | None, texts: list[str], *, is_single: bool) -> dict[str, Run]:
    found: dict[str, Run] = {}
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found, unused-ignore]

        asked = [[text] for text in texts] if is_single else [texts]
        for dtype in ("float32", "bfloat16"):
            model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
            found[f"sentence-transformers {dtype}"] = lambda m=model: [m.encode(some) for some in asked]  # type: ignore[misc]
    except ImportError:
        pass
    if onnx is None:
        return found
    batches = padded(folder, texts, 1 if is_single else BATCH)
    try:
        import onnxruntime  # type: ignore[import-not-found, unused-ignore]

        session = onnxruntime.InferenceSession(str(onnx), providers=["CPUExecutionProvider"])
        found["ONNX Runtime"] = lambda: [session.run(None, {"i": ids, "a": mask}) for ids, mask in batches]
    except ImportError:
        pass
    try:
        import openvino  # type: ignore[import-not-found, unused-ignore]

        core = openvino.Core()
        for precision in ("f32", "bf16"):
            settings = {"INFERENCE_PRECISION_HINT": precision}
            compiled = core.compile_model(core.read_model(onnx), "CPU", settings)
            found[f"OpenVINO {precision}"] = lambda c=compiled: [c([*batch]) for batch in batches]  # type: ignore[misc]
            settings["PERFORMANCE_HINT"] = "THROUGHPUT"
            queue = openvino.AsyncInferQueue(core.compile_model(core.read_model(onnx), "CPU", settings))
            found[f"OpenVINO {precision} queue"] = lambda q=queue: queued(q, batches)  # type: ignore[misc]
    except ImportError:
        pass
    return found


def queued(queue: Any, batches: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> None:
    """Run the batches, several at once."""
    for ids, mask in batches:
        queue.start_async([ids, mask])
    queue.wait_all()


def padded(folder: Path, texts: list[str], size: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Batches of that many token ids and masks, the longest texts first."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    rows = sorted((encoding.ids for encoding in tokenizer.encode_batch(texts)), key=len, reverse=True)
    batches = []
    for begin in range(0, len(rows), size):
        batch = rows[begin : begin + size]
        ids = np.zeros((len(batch), len(batch[0])), np.int64)
        for row, tokens in zip(ids, batch, strict=True):
            row[: len(tokens)] = tokens
        lengths = np.array([len(tokens) for tokens in batch])
        batches.append((ids, (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)))
    return batches


if __name__ == "__main__":
    main()
