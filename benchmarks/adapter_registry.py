"""Times to first token against how many adapters are registered, in memory for 16; draws them.

    python benchmarks/adapter_registry.py [--counts 1 16 50 200 500 1000] [--rate 8] [--seconds 20] [--on-host N]
                                          [--out docs/images]

Requests for the default model arrive at random (Poisson), each for an adapter that is drawn by Zipf's law: the n-th is
asked for in proportion to 1 / n. Adapters have rank 16 on all linear layers. Their weights are one file, but each has a
configuration of its own, and so an identity: each is read, checked, packed and copied as if it were alone. The engine
is the asynchronous one, with its core in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from itertools import accumulate
from pathlib import Path

import numpy as np
from adapters import write_adapter

from octavo import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from octavo.bench.plot import BLUE, ORANGE, new_figure, save_figure
from octavo.lora.request import LoRARequest

ON_DEVICE = 16
RANK = 16
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32


def write_registry(folder: Path, count: int) -> list[LoRARequest]:
    """As many adapters, whose weights are the same file."""
    write_adapter(folder / "0", LLM(enable_lora=True, max_lora_rank=RANK), RANK, 0)
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    settings = json.loads((folder / "0" / config).read_text())
    for i in range(1, count):
        place = folder / str(i)
        place.mkdir()
        (place / weights).hardlink_to(folder / "0" / weights)
        (place / config).write_text(json.dumps({**settings, "revision": str(i)}))
    return [LoRARequest(f"adapter-{i}", i + 1, str(folder / str(i))) for i in range(count)]


async def first_token_s(engine: AsyncLLMEngine, adapter: LoRARequest, number: int, generator: random.Random) -> float:
    """Ask, read the whole answer, and return how long its first token took."""
    prompt = {"prompt_token_ids": [generator.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]}
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    begin, took = time.perf_counter(), 0.0
    async for _ in engine.generate(prompt, params, str(number), adapter):
        took = took or time.perf_counter() - begin
    return took


async def measure(adapters: list[LoRARequest], rate: float, seconds: float, on_host: int | None) -> list[float]:
    """Times to first token, in seconds, of the requests that arrive while a server of these adapters is warm."""
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(
            enable_lora=True, max_loras=ON_DEVICE, max_cpu_loras=on_host, max_lora_rank=RANK, max_num_seqs=64,
            num_gpu_blocks_override=3000, disable_log_stats=True,
        )
    )  # fmt: skip
    try:
        await engine.wait_ready()
        for adapter in adapters[:ON_DEVICE]:
            await engine.add_lora(adapter)
        generator = random.Random(0)
        shares = list(accumulate(1 / (n + 1) for n in range(len(adapters))))
        asked: list[asyncio.Task[float]] = []
        due, warm_up_s = time.perf_counter(), seconds / 5
        end = due + warm_up_s + seconds
        num_early = 0
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            [adapter] = generator.choices(adapters, cum_weights=shares)
            asked.append(asyncio.create_task(first_token_s(engine, adapter, len(asked), generator)))
            num_early += due < end - seconds
            due += generator.expovariate(rate)
        return (await asyncio.gather(*asked))[num_early:]
    finally:
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16, 50, 200, 500, 1000])
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each count")
    parser.add_argument("--on-host", type=int, help="--max-cpu-loras; as many as the memory holds without")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    percentiles: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        registry = write_registry(Path(folder), max(args.counts))
        for count in args.counts:
            times = asyncio.run(measure(registry[:count], args.rate, args.seconds, args.on_host))
            median, late = np.percentile(times, [50, 95]) * 1e3
            percentiles.append((median, late))
            print(
                f"{count:5} adapters: {len(times)} requests, first token {median:6.0f} ms at the median, "
                f"{late:6.0f} ms at the 95th percentile",
                flush=True,
            )
    if args.out is None:
        return
    figure, [axis] = new_figure(1)
    for number, (colour, label) in enumerate(((BLUE, "50th percentile"), (ORANGE, "95th percentile"))):
        axis.plot(args.counts, [pair[number] for pair in percentiles], "o-", color=colour, label=label, markersize=4)
    axis.set(
        xlabel=f"adapters that are asked for, in memory for {ON_DEVICE}", ylabel="milliseconds to the first token",
        xscale="log", ylim=(0, None),
    )  # fmt: skip
    axis.set_xticks(args.counts, [str(count) for count in args.counts])
    axis.minorticks_off()
    axis.legend(frameon=False, loc="upper left")
    title = f"Registered adapters of rank {RANK}, asked for by Zipf's law, {args.rate:g} requests a second\n"
    save_figure(figure, args.out / "adapter_registry.svg", title + "SmolLM2-135M-Instruct Q4_1")


if __name__ == "__main__":
    main()
