"""Computes the figures of a serving benchmark, under the names of vLLM's JSON, and their table. Also writes the results
of any benchmark to a file."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.client import RequestResult
from octavo.errors import OctavoError

# By name: the abbreviation, and the heading in the table.
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_WIDTH = 50


def tpot_s(answer: RequestResult) -> float:
    """Return the mean time of the tokens after the first, in seconds; 0 for a single token."""
    after_first = answer.num_output_tokens - 1
    return (answer.latency_s - answer.ttft_s) / after_first if after_first > 0 else 0.0


def summarize(
    answers: Sequence[RequestResult],
    duration_s: float,
    *,
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Return all figures of a run. Latencies are in milliseconds and cover only requests with complete answers.

    `goodput_ms` has limits by metric (ttft, tpot, e2el); a good request meets all of them.
    """
    good = [answer for answer in answers if answer.error is None]
    num_input = sum(answer.num_prompt_tokens for answer in good)
    num_output = sum(answer.num_output_tokens for answer in good)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": _most_at_once(good),
    }
    if goodput_ms:
        kept = sum(
            all(value <= goodput_ms[name] for name, value in _by_request_ms(answer).items() if name in goodput_ms)
            for answer in good
        )
        figures["request_goodput"] = kept / duration_s
    values_ms = {
        "ttft": [1e3 * answer.ttft_s for answer in good],
        "tpot": [1e3 * tpot_s(answer) for answer in good if answer.num_output_tokens > 1],
        "itl": [1e3 * itl for answer in good for itl in answer.itls_s],
        "e2el": [1e3 * answer.latency_s for answer in good],
    }
    for name, values in values_ms.items():
        array = np.array(values or [0.0])
        figures[f"mean_{name}_ms"] = float(array.mean())
        figures[f"median_{name}_ms"] = float(np.median(array))
        figures[f"std_{name}_ms"] = float(array.std())
        for percentile in percentiles:
            figures[f"p{percentile:g}_{name}_ms"] = float(np.percentile(array, percentile))
    return figures


def details(answers: Sequence[RequestResult]) -> dict[str, Any]:
    """Return the values of each request that vLLM saves with --save-detailed."""
    return {
        "input_lens": [answer.num_prompt_tokens for answer in answers],
        "output_lens": [answer.num_output_tokens for answer in answers],
        "ttfts": [answer.ttft_s for answer in answers],
        "itls": [answer.itls_s for answer in answers],
        "start_times": [answer.start for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }


def table(figures: Mapping[str, Any], shown: Sequence[str], percentiles: Sequence[float], setting: str) -> str:
    """Return the figures as a table for the terminal, in vLLM's layout. `shown` are names of METRICS."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "="), setting]
    rows = {
        "Successful requests": figures["completed"],
        "Failed requests": figures["failed"],
        "Benchmark duration (s)": figures["duration"],
        "Total input tokens": figures["total_input_tokens"],
        "Total generated tokens": figures["total_output_tokens"],
        "Request throughput (req/s)": figures["request_throughput"],
        "Request goodput (req/s)": figures["request_goodput"],
        "Output token throughput (tok/s)": figures["output_throughput"],
        "Peak output token throughput (tok/s)": figures["max_output_tokens_per_s"],
        "Peak concurrent requests": figures["max_concurrent_requests"],
        "Total token throughput (tok/s)": figures["total_token_throughput"],
    }
    lines += [_row(name, value) for name, value in rows.items() if value is not None]
    for name in shown:
        short, heading = METRICS[name]
        lines.append(heading.center(_WIDTH, "-"))
        lines.append(_row(f"Mean {short} (ms)", figures[f"mean_{name}_ms"]))
        lines.append(_row(f"Median {short} (ms)", figures[f"median_{name}_ms"]))
        lines += [_row(f"P{p:g} {short} (ms)", figures[f"p{p:g}_{name}_ms"]) for p in percentiles]
    return "\n".join([*lines, "=" * _WIDTH])


def _row(name: str, value: float) -> str:
    return f"{name + ':':<40} {value:<10.2f}".rstrip() if isinstance(value, float) else f"{name + ':':<40} {value}"


def _by_request_ms(answer: RequestResult) -> dict[str, float]:
    return {"ttft": 1e3 * answer.ttft_s, "tpot": 1e3 * tpot_s(answer), "e2el": 1e3 * answer.latency_s}


def token_times_s(answer: RequestResult) -> list[float]:
    """Return the arrival times of an answer's chunks, on the clock of `answer.start`."""
    times = [answer.start + answer.ttft_s]
    for itl in answer.itls_s:
        times.append(times[-1] + itl)
    return times


def _busiest_second(answers: Sequence[RequestResult]) -> float:
    """Return the number of chunks in the busiest second. Seconds are counted from the first request."""
    if not answers:
        return 0.0
    begin = min(answer.start for answer in answers)
    seconds = [math.floor(at - begin) for answer in answers for at in token_times_s(answer)]
    return float(np.bincount(seconds).max())


def _most_at_once(answers: Sequence[RequestResult]) -> int:
    changes = [(answer.start, 1) for answer in answers]
    changes += [(answer.start + answer.latency_s, -1) for answer in answers]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def write_json(file: Path, data: Any, *, appends: bool = False) -> None:
    """Write data as JSON to a file; with `appends`, as one line behind its content. Raises `OctavoError` if the file
    cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a" if appends else "w", encoding="utf-8") as out:
            out.write(json.dumps(data, indent=None if appends else 1) + "\n")
    except OSError as error:
        raise OctavoError(f"{file} cannot be written: {error.strerror or error}.") from None
