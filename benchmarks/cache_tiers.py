"""The KV cache on disk: `python benchmarks/cache_tiers.py restart|copy|kills|overhead [--model M] [--tokens 2700]
[--kills 200] [--rounds 10]`.

`restart`: seconds to the first token behind a prompt of `--tokens` words that a server computes, and that the next
server, after `kill -9`, reads from disk. `copy`: seconds to the first token behind prompts that another server has
computed, and behind prompts that the server itself computes, in turns; processor time is that of both servers. `kills`:
engines are killed while they write, one after the other in one folder; each block left must be as computed, and room
must be neither lost nor exceeded (exit code 1). `overhead`: throughput of prompts that nothing is read for, with the
disk over without, in turns in one process each; the system's processors should be idle otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.server import Server, running_server
from tests.engine.disk_cache_kills import LIMIT_BYTES, kill_engines
from tests.waiting import wait_until


def first_token_s(server: Server, prompt: list[int], **more_headers: str) -> tuple[float, int]:
    """Return the seconds to the first token, and how many tokens were cached."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    headers = {"content-type": "application/json", **more_headers}
    begin = time.perf_counter()
    with urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    ) as answer:
        usage = json.load(answer)["usage"]
    return time.perf_counter() - begin, usage["prompt_tokens_details"]["cached_tokens"]


def num_files(disk: Path) -> int:
    return sum(path.is_file() for path in (disk / "octavo-kv-1").rglob("*-*"))


def restart(folder: Path, flags: list[str], num_tokens: int) -> None:
    rng, disk = random.Random(1), folder / "disk"
    prompts = [[rng.randrange(300, 40_000) for _ in range(num_tokens)] for _ in range(2)]
    flags = ["--max-model-len", str(num_tokens + 64), *flags, "--kv-cache-disk", str(disk)]
    with running_server(folder, *flags) as server:
        computed_s, _ = first_token_s(server, prompts[0])
        hit_s, _ = first_token_s(server, prompts[0])
        wait_until(lambda: num_files(disk) >= num_tokens // 16)
        server.process.kill()
        server.process.wait()
    with running_server(folder, *flags) as server:
        read_s, num_cached = first_token_s(server, prompts[0])
        other_s, _ = first_token_s(server, prompts[1])
    print(f"first token behind {num_tokens} tokens: computed in {computed_s:.2f} s, from memory in {hit_s:.3f} s")
    print(
        f"after kill -9 and a start: from disk in {read_s:.3f} s ({num_cached} tokens), another one in {other_s:.2f} s"
    )
    print(f"computing over reading: {other_s / read_s:.1f}")


def copy(folder: Path, flags: list[str], num_tokens: int, num_rounds: int) -> None:
    rng, key = random.Random(1), {"x-api-key": "k"}
    flags = ["--max-model-len", str(num_tokens + 64), *flags, "--api-key", "k", "--kv-cache-disk"]
    with running_server(folder, *flags, str(folder / "first")) as first:
        peers = ["--kv-cache-peers", first.url]
        with running_server(folder, *flags, str(folder / "second"), *peers) as second:
            for _ in range(num_rounds):
                prompts = [[rng.randrange(300, 40_000) for _ in range(num_tokens)] for _ in range(2)]
                with contextlib.suppress(json.JSONDecodeError):  # the answer has no body
                    first_token_s(first, prompts[0], **key, **{"x-octavo-only-prompt": "1"})
                before = _work_s(first, second)
                copied_s, num_copied = first_token_s(second, prompts[0], **key, **{"x-octavo-blocks-at": first.url})
                between = _work_s(first, second)
                computed_s, _ = first_token_s(second, prompts[1], **key)
                after = _work_s(first, second)
                print(
                    f"first token behind {num_tokens} tokens: copied in {copied_s:.3f} s ({num_copied} tokens, "
                    f"processor {between - before:.2f} s), computed in {computed_s:.2f} s (processor "
                    f"{after - between:.2f} s)", flush=True,
                )  # fmt: skip


def _work_s(*servers: Server) -> float:
    """Return the processor time of servers and their processes."""
    parents = [psutil.Process(server.process.pid) for server in servers]
    times = [one.cpu_times() for parent in parents for one in (parent, *parent.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def kills(folder: Path, num_kills: int) -> int:
    from tests.models.small_models import MODELS

    model, tokenizer = folder / "model", folder / "tokenizer"
    MODELS["qwen3"].save(MODELS["qwen3"].reference(seed=2), model)
    _write_tokenizer(tokenizer)
    totals = dict.fromkeys(("wrong", "damaged", "left", "cached"), 0)
    most_bytes = 0
    for number, found in enumerate(kill_engines(str(model), str(tokenizer), folder / "disk", num_kills), 1):
        totals = {name: total + found[name] for name, total in totals.items()}
        most_bytes = max(most_bytes, found["bytes"])
        if number % 20 == 0 or number == num_kills:
            used = most_bytes / LIMIT_BYTES
            print(f"{number} kills: {totals}; at most {used:.3f} of the bound in use", flush=True)
    return int(totals["wrong"] + totals["damaged"] + totals["left"] > 0 or most_bytes > LIMIT_BYTES + 2 * 4096)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, 128)}
    folder.mkdir()
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


_ROUND = """
import json, random, sys, time
from octavo import LLM, SamplingParams
disk, model, num_rounds = sys.argv[1] or None, sys.argv[2], int(sys.argv[3])
llm = LLM(model, max_model_len=1024, kv_cache_disk=disk)
rng = random.Random(2)
def once():
    prompts = [{"prompt_token_ids": [rng.randrange(300, 40_000) for _ in range(300)]} for _ in range(8)]
    begin = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - begin
once()
for line in sys.stdin:
    print(once(), flush=True)
"""


def overhead(folder: Path, model: str, num_rounds: int) -> None:
    """Two processes take turns, so that what else the machine does falls on both."""
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", _ROUND, disk, model, str(num_rounds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ),
        )
        for disk in ("", str(folder / "disk"))
    ]  # fmt: skip
    ratios = []
    for i in range(num_rounds):
        took = {}
        for which in (0, 1) if i % 2 else (1, 0):
            process = engines[which]
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            took[which] = float(process.stdout.readline())
        ratios.append(took[0] / took[1])
    for process in engines:
        process.communicate()
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(
        f"throughput with the disk over without: {statistics.median(ratios):.3f} +- {spread:.3f}, {num_rounds} rounds"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("restart", "copy", "kills", "overhead"))
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, default=2700)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.what == "kills":
            return kills(folder, args.kills)
        flags = [*(["--model", args.model] if args.model else []), *args.flags]
        if args.what == "restart":
            restart(folder, flags, args.tokens)
        elif args.what == "copy":
            copy(folder, flags, args.tokens, args.rounds)
        else:
            overhead(folder, args.model, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
