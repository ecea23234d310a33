"""The start of a core, and a server over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gpu_limits import LLAMA_3_1_8B

from gpu_checks.engines import DEVICE, SHAPES, Row, config_folder, make_core

_CHECK = Path(__file__).parents[1] / "gpu_check.py"


def start(smoke: bool) -> Iterator[Row]:
    """Of a core, in a process of its own: nothing compiled yet, then everything."""
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm"):
            command = [sys.executable, str(_CHECK), "--ready", *(["--smoke"] if smoke else [])]
            begun = time.perf_counter()
            env = os.environ | {"TRITON_CACHE_DIR": cache, "OCTAVO_KERNELS": ""}
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            yield (
                f"engine core ready, {kind}, interpreter and imports included",
                "s",
                f"{time.perf_counter() - begun:.1f}",
            )
            for phase, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                yield f"of it {phase}, {kind}", "s", f"{seconds:.1f}"


def ready(smoke: bool) -> None:
    """Start a core and print the seconds of its phases."""
    config = SHAPES["Llama"] if smoke else LLAMA_3_1_8B
    flags = {"num_gpu_blocks_override": 600, "max_model_len": 256} if smoke else {"max_model_len": 8192}
    core = make_core(config, DEVICE.type, max_num_seqs=8 if smoke else 256, **flags)
    print(json.dumps(core.executor.startup))


def serve(smoke: bool) -> Iterator[Row]:
    yield from served(smoke, ((1, 2), (2, 4)) if smoke else ((1, 8), (32, 128), (128, 512), (256, 768)))


def served(smoke: bool, loads: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Output over HTTP, and the times of tokens, of `loads`: requests at once, and in all."""
    config = SHAPES["Llama"] if smoke else LLAMA_3_1_8B
    folder = config_folder(config)
    save_tokenizer(Path(folder), config["vocab_size"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    octavo = [sys.executable, "-m", "octavo.entrypoints.cli.main"]
    flags = ["--model", folder, "--load-format", "dummy", "--device", DEVICE.type, "--port", port]
    flags += ["--num-gpu-blocks-override", "600", "--max-model-len", "256"] if smoke else ["--max-model-len", "8192"]
    server = subprocess.Popen([*octavo, "serve", *flags])
    try:
        begun = time.perf_counter()
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with status {server.returncode}")
            time.sleep(0.1)
        yield "server ready", "s", f"{time.perf_counter() - begun:.1f}"
        num_in, num_out = (24, 8) if smoke else (512, 128)
        for at_once, prompts in loads:
            result = Path(folder) / f"{at_once}.json"
            lengths = ["--random-input-len", str(num_in), "--random-output-len", str(num_out), "--ignore-eos"]
            load = ["--num-prompts", str(prompts), "--max-concurrency", str(at_once), "--num-warmups", str(at_once)]
            measure = [*octavo, "bench", "serve", "--port", port, "--dataset-name", "random", "--json", str(result)]
            subprocess.run([*measure, *lengths, *load, "--disable-tqdm"], check=True)
            found = json.loads(result.read_text())
            yield f"served: output, {at_once} at once", "tok/s", f"{found['output_throughput']:.0f}"
            for what in ("ttft", "tpot"):
                yield f"served: median {what.upper()}, {at_once} at once", "ms", f"{found[f'median_{what}_ms']:.1f}"
    finally:
        server.terminate()
        server.wait()


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level one, and a word for each other token of the model: whatever random weights say is text, and is sent
    when it is said."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"Ġ{number}" for number in range(len(symbols), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
