"""What `LLM.get_metrics` returns, under the name of vLLM's module."""

from octavo.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
