"""Embeddings a second of one model: Octavo, and beside it what is installed of sentence-transformers, ONNX Runtime and
OpenVINO, in one run over the same texts.

    python benchmarks/embeddings.py FOLDER [--onnx FILE] [--texts 256] [--lengths 16 256]

FOLDER is a sentence-transformers folder with a vocab.txt; FILE has the network with its pooling, of inputs `i` (token
ids) and `a` (their mask), both [texts, tokens] int64. The others get texts sorted by length in batches of 32, padded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
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
    args = parser.parse_args()
    texts = make_texts(args.folder, args.texts, *args.lengths)
    for settings in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}):
        report(f"octavo {' '.join(settings.values())}", len(texts), octavo(str(args.folder), texts, settings))
    for name, run in others(args.folder, args.onnx, texts).items():
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
    print(f"{name:28s} {count / min(seconds):8.1f} texts/s", flush=True)


def octavo(folder: str, texts: list[str], settings: dict[str, str]) -> Run:
    llm = LLM(folder, **settings)
    return lambda: llm.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)


def others(folder: Path, onnx: Path | None, texts: list[str]) -> dict[str, Run]:
    found: dict[str, Run] = {}
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found, unused-ignore]

        model = SentenceTransformer(str(folder), device="cpu")
        found["sentence-transformers"] = lambda: model.encode(texts)
    except ImportError:
        pass
    if onnx is None:
        return found
    batches = padded(folder, texts)
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
            compiled = core.compile_model(core.read_model(onnx), "CPU", {"INFERENCE_PRECISION_HINT": precision})
            found[f"OpenVINO {precision}"] = lambda c=compiled: [c([*batch]) for batch in batches]  # type: ignore[misc]
    except ImportError:
        pass
    return found


def padded(folder: Path, texts: list[str]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Batches of token ids and masks, the longest texts first."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    rows = sorted((encoding.ids for encoding in tokenizer.encode_batch(texts)), key=len, reverse=True)
    batches = []
    for begin in range(0, len(rows), BATCH):
        batch = rows[begin : begin + BATCH]
        ids = np.zeros((len(batch), len(batch[0])), np.int64)
        for row, tokens in zip(ids, batch, strict=True):
            row[: len(tokens)] = tokens
        lengths = np.array([len(tokens) for tokens in batch])
        batches.append((ids, (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)))
    return batches


if __name__ == "__main__":
    main()
