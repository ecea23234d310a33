"""Engines that are killed with -9 while they write blocks to disk, one after the other in one folder.

`kill_engines` starts them and looks at the folder after each. It is used by a test and by `benchmarks/cache_tiers.py`.
As a program, this module is such an engine.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams
from octavo.kv_cache import disk_fetches
from octavo.kv_cache.block_files import BlockFiles, _on_disk
from octavo.step_cost import ReadCost
from tests.seeds import seed_of

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 160 * 4096
NUM_PROMPTS = 40
MOST_REQUESTS = 12  # of an engine before it is killed
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Return prompts of which many begin alike."""
    rng = random.Random(seed_of("disk_cache_kills"))
    beginnings = [[rng.randrange(3, 128) for _ in range(40)] for _ in range(6)]
    return [[*rng.choice(beginnings), *(rng.randrange(3, 128) for _ in range(30))] for _ in range(NUM_PROMPTS)]


def engine(model: str, tokenizer: str, **settings: Any) -> LLM:
    return LLM(model, tokenizer=tokenizer, dtype="float32", max_model_len=96, block_size=8, **settings)


def serve(model: str, tokenizer: str, disk: str, seed: int) -> None:
    """Answer prompts in an order of the seed for ever, and print how many tokens of each were cached."""
    ReadCost.seconds = lambda self, num_bytes: 0.0  # type: ignore[method-assign]  # small models compute faster
    disk_fetches._PATIENCE = 1e9
    llm = engine(
        model, tokenizer, kv_cache_disk=disk, kv_cache_disk_gib=LIMIT_BYTES / 2**30, num_gpu_blocks_override=24
    )
    rng, wanted = random.Random(seed), prompts()
    for _ in count():
        [output] = llm.generate([{"prompt_token_ids": rng.choice(wanted)}], PARAMS, use_tqdm=False)
        print(output.num_cached_tokens, flush=True)
        llm.core.save_blocks()


def kill_engines(model: str, tokenizer: str, disk: Path, num_kills: int) -> Iterator[dict[str, int]]:
    """Kill an engine after the other. Yields for each what the folder has: `wrong` blocks that differ from computed
    ones, `damaged` files, `left` files of killed writers after the next scan, `bytes` that its files take, `blocks`;
    and `cached`, the tokens that the engine did not compute."""
    expected, plain = dict[str, bytes](), engine(model, tokenizer, num_gpu_blocks_override=400)
    for prompt in prompts():
        plain.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
    for number, pool in enumerate(plain.core.scheduler.cache.pools):
        for key, block in pool._index.items():
            expected[f"{key.hex()}-{number}"] = plain.core.executor.read_blocks(number, [block]).tobytes()
    rng = random.Random(seed_of("disk_cache_kills"))
    for seed in range(num_kills):
        command = [sys.executable, "-m", __name__, model, tokenizer, str(disk), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            cached = [int(process.stdout.readline()) for _ in range(rng.randint(1, MOST_REQUESTS))]
            process.kill()
        yield _look_at(disk, expected) | {"cached": sum(cached)}


def _look_at(disk: Path, expected: dict[str, bytes]) -> dict[str, int]:
    root = disk / "octavo-kv-1"
    num_bytes = sum(_on_disk(path.stat().st_size) for path in root.rglob("*-*") if path.is_file())
    [fingerprint] = [path.name for path in root.iterdir() if path.name != "weights"]
    files = BlockFiles(str(disk), bytes.fromhex(fingerprint), LIMIT_BYTES)
    found = [path.name for path in (root / fingerprint).rglob("*") if path.is_file()]
    blocks = [name for name in found if not name.endswith(".part")]
    wrong = 0
    for name in blocks:
        key, _, pool = name.partition("-")
        contents = np.empty(len(expected[name]), np.uint8)
        wrong += files.read((int(pool), bytes.fromhex(key)), contents) and contents.tobytes() != expected[name]
    return {
        "wrong": wrong, "damaged": files.num_damaged, "left": len(found) - len(blocks), "bytes": num_bytes,
        "blocks": len(blocks),
    }  # fmt: skip


if __name__ == "__main__":
    model, tokenizer, disk, seed = sys.argv[1:]
    serve(model, tokenizer, disk, int(seed))
