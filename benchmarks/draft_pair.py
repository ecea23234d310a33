"""A draft that is right with a chosen chance, in GGUF files that other engines read too: one stream with and without.

    python benchmarks/draft_pair.py VOCABULARY.gguf [--chance 0.8] [--weights Q8_0]
                                    [--llama-server /path/to/llama-server]

Both models are written here, over the vocabulary of a GGUF file: a Llama of 1.07 billion weights and one of the shape
of SmolLM2-135M. Their layers compute all that layers do, but nothing of it reaches the output (the matrices back into
the residual stream are zero), and their output matrices say what follows each token: the next one in the vocabulary.
For some tokens, drawn at random, the draft's says something else. So guesses are right with that chance, whatever was
before, and every engine has the same ones to make and to verify. Engines take turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from octavo import LLM, SamplingParams

NUM_GUESSES = 4
PROMPT = list(range(1000, 1064))
PORT = 8765
_BLOCK_BYTES = {"Q4_0": 18, "Q8_0": 34}  # of 32 elements, after a float16 scale of two bytes


class Shape(NamedTuple):
    num_layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int


TARGET = Shape(16, 2048, 8192, 32, 8)
DRAFT = Shape(30, 576, 1536, 9, 3)


def blocks(rows: int, columns: int, form: str, rng: np.random.Generator, scale: float) -> NDArray[np.uint8]:
    """Random codes of one scale, as GGUF has them: [rows, bytes of a row]."""
    made = rng.integers(0, 256, (rows, columns // 32, _BLOCK_BYTES[form]), np.uint8)
    made[..., :2] = np.array([scale], np.float16).view(np.uint8)
    return made.reshape(rows, columns // 32 * _BLOCK_BYTES[form])


def write_model(path: Path, vocabulary: gguf.GGUFReader, shape: Shape, form: str, wrong: NDArray[np.bool_]) -> None:
    """A model that says the next token of the vocabulary, but for `wrong` ones."""
    rng = np.random.default_rng(shape.hidden)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    for field in vocabulary.fields.values():
        if field.name.startswith("tokenizer."):
            of_items = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], of_items)

    def add(name: str, data: NDArray[Any], quantized: str | None = None) -> None:
        kind = gguf.GGMLQuantizationType[quantized] if quantized else None
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    embedding = blocks(len(wrong), hidden, "Q8_0", rng, 0.01)
    output = np.roll(embedding, 1, axis=0)
    output[np.roll(wrong, 1)] = blocks(int(wrong.sum()), hidden, "Q8_0", rng, 0.01)
    add("token_embd", embedding, "Q8_0")
    add("output", output, "Q8_0")
    add("output_norm", np.ones(hidden, np.float32))
    for i in range(shape.num_layers):
        for name, rows, columns in (
            ("attn_q", hidden, hidden), ("attn_k", kv, hidden), ("attn_v", kv, hidden),
            ("ffn_gate", shape.inner, hidden), ("ffn_up", shape.inner, hidden),
        ):  # fmt: skip
            add(f"blk.{i}.{name}", blocks(rows, columns, form, rng, 0.002), form)
        for name, columns in (("attn_output", hidden), ("ffn_down", shape.inner)):
            add(f"blk.{i}.{name}", np.zeros((hidden, columns // 32 * _BLOCK_BYTES[form]), np.uint8), form)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def octavo_rate(target: Path, draft: Path | None, num_tokens: int) -> float:
    """Tokens a second behind the first."""
    speculative = {"model": str(draft), "num_speculative_tokens": NUM_GUESSES} if draft else None
    with LLM(str(target), max_model_len=2048, max_num_seqs=1, speculative_config=speculative) as llm:

        def seconds(count: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            begin = time.perf_counter()
            (answer,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
            assert list(answer.outputs[0].token_ids) == list(range(PROMPT[-1] + 1, PROMPT[-1] + 1 + count))
            return time.perf_counter() - begin

        seconds(16)  # memory is touched
        return (num_tokens - 1) / (seconds(num_tokens) - seconds(1))


def llama_rate(server: str, target: Path, draft: Path | None, num_tokens: int) -> tuple[float, str]:
    """The same by llama.cpp's server, and what it says of its guesses."""
    command = [server, "-m", str(target), "--port", str(PORT), "-c", "2048", "-t", "2", "-np", "1"]
    if draft:
        command += ["-md", str(draft), "--spec-type", "draft-simple", "--spec-draft-p-min", "0"]
        command += ["--spec-draft-n-max", str(NUM_GUESSES), "--spec-draft-n-min", "0"]
    address = f"http://127.0.0.1:{PORT}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{address}/health").close()
                    break
                except OSError:
                    time.sleep(0.1)
            timings: dict[str, Any] = {}
            for count in (16, num_tokens):
                body = {
                    "prompt": PROMPT,
                    "n_predict": count,
                    "temperature": 0,
                    "ignore_eos": True,
                    "cache_prompt": False,
                }
                request = urllib.request.Request(
                    f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request) as response:
                    timings = json.loads(response.read())["timings"]
        finally:
            process.terminate()
    draft_tokens = f"{timings.get('draft_n_accepted', 0)} of {timings.get('draft_n', 0)} guesses right" if draft else ""
    return timings["predicted_per_second"], draft_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("vocabulary", type=gguf.GGUFReader, help="A GGUF file whose tokens both models have.")
    parser.add_argument("--chance", type=float, default=0.8, help="That a guess is right (default: %(default)s).")
    parser.add_argument("--weights", choices=_BLOCK_BYTES, default="Q8_0", help="Of the target (default: %(default)s).")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server, to compare with.")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3, help="Whose medians are shown (default: %(default)s).")
    args = parser.parse_args()
    num_tokens = len(args.vocabulary.get_field("tokenizer.ggml.tokens").data)
    wrong = np.random.default_rng(0).random(num_tokens) >= args.chance
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "target.gguf"), Path(folder, "draft.gguf")
        write_model(target, args.vocabulary, TARGET, args.weights, np.zeros_like(wrong))
        write_model(draft, args.vocabulary, DRAFT, "Q4_0", wrong)
        rates: dict[tuple[str, bool], list[float]] = {}
        for _ in range(args.rounds):
            for drafts in (None, draft):
                found = {"Octavo": (octavo_rate(target, drafts, args.tokens), "")}
                if args.llama_server:
                    found["llama.cpp"] = llama_rate(args.llama_server, target, drafts, args.tokens)
                for engine, (rate, draft_tokens) in found.items():
                    rates.setdefault((engine, drafts is not None), []).append(rate)
                    print(
                        f"{engine}, {'with' if drafts else 'without'}: {rate:.1f} tokens/s {draft_tokens}", flush=True
                    )
    for engine in dict.fromkeys(name for name, _ in rates):
        plain, drafted = median(rates[engine, False]), median(rates[engine, True])
        print(f"{engine}: {plain:.1f} without, {drafted:.1f} with, {drafted / plain:.2f} times as many")


if __name__ == "__main__":
    main()
