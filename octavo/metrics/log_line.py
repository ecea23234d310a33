"""Logs a line about the engine's work every few seconds, and sets the gauges of recent averages."""

import asyncio
import logging
import time

from octavo.metrics.prometheus import EngineMetrics

logger = logging.getLogger("octavo.stats")

INTERVAL_S = 10.0


class LogLine:
    """Measures the growth of `metrics` from one call of `sample` to the next."""

    def __init__(self, metrics: EngineMetrics, now: float, prefix: str = "") -> None:
        self._metrics, self._prefix = metrics, prefix
        self._seen = _counts(metrics, now)
        self._was_active = False

    def sample(self, now: float) -> str | None:
        """Return the line for the time since the last call; None if nothing ran in this interval and the one before."""
        metrics, before = self._metrics, self._seen
        self._seen = _counts(metrics, now)
        done = {name: count - before[name] for name, count in self._seen.items()}
        elapsed_s = max(done["time_s"], 1e-9)
        metrics.prompt_tokens_per_s = done["num_prompt_tokens"] / elapsed_s
        metrics.generation_tokens_per_s = done["num_generation_tokens"] / elapsed_s
        metrics.requests_per_s = done["requests"] / elapsed_s
        last = metrics.last
        active = done["steps"] > 0 or last.num_running + last.num_waiting + last.num_swapped > 0
        # A last line after the last activity shows that the engine has come to rest.
        shown, self._was_active = active or self._was_active, active
        if not shown:
            return None
        line = (
            f"{self._prefix}prompt {metrics.prompt_tokens_per_s:.1f} tok/s, "
            f"generation {metrics.generation_tokens_per_s:.1f} tok/s, "
            f"running {last.num_running}, waiting {last.num_waiting}, swapped {last.num_swapped}, "
            f"KV usage {_percent(last.num_blocks_used, last.num_blocks)}, "
            f"KV waste {_percent(last.num_slots_allocated - last.num_slots_filled, last.num_slots_allocated)}, "
            f"prefix hit rate {_percent(done['num_prefix_hits'], done['num_prefix_queries'])}"
        )
        if done["num_draft_tokens"]:
            line += (
                f", drafted {done['num_draft_tokens'] / elapsed_s:.1f} tok/s, "
                f"accepted {_percent(done['num_accepted_tokens'], done['num_draft_tokens'])}"
            )
        return line

    def log(self, now: float) -> None:
        if (line := self.sample(now)) is not None:
            logger.info(line)

    async def run(self, *, log: bool, interval_s: float = INTERVAL_S) -> None:
        """Sample forever; with `log` false only the gauges are set."""
        while True:
            await asyncio.sleep(interval_s)
            if log:
                self.log(time.monotonic())
            else:
                self.sample(time.monotonic())


def _counts(metrics: EngineMetrics, now: float) -> dict[str, float]:
    """Return the counts up to the moment `now`, and `now`."""
    requests = sum(metrics.num_finished.values())
    return {**metrics.totals, "steps": metrics.num_steps, "requests": requests, "time_s": now}


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.1f}%"
