"""The load of the engine in a header of answers, as ORCA's load balancers ask for it (github.com/cncf/xds, ORCA)."""

import json

from octavo.stats import EngineStats


def load_report(form: str, stats: EngineStats) -> str | None:
    """Return the value of the header `endpoint-load-metrics` in the form "TEXT" or "JSON", with vLLM's names. None for
    an unknown form."""
    usage = stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0
    metrics = {"kv_cache_usage_perc": round(usage, 6), "num_requests_waiting": float(stats.num_waiting)}
    if form.upper() == "TEXT":
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return f"JSON {json.dumps({'named_metrics': metrics})}" if form.upper() == "JSON" else None
