"""Draws figures of benchmarks with matplotlib (extra `bench`). SVG files adapt to a light or dark page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench.client import RequestResult
from octavo.bench.results import token_times_s, tpot_s
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Text takes the page's colour through a CSS rule in the file. The other colours are readable on white and on black.
TEXT = "#57606a"
BLUE, ORANGE, GREEN = "#2f81f7", "#d97706", "#16a36b"
_RULE = "<style>svg{color:#57606a}@media (prefers-color-scheme:dark){svg{color:#adb8c2}}</style>"
_SWEPT = {"ttft": "time to first token", "itl": "time between tokens", "tpot": "mean time per token"}
_KINDS = (".svg", ".png", ".pdf")


def check_plot_file(file: str) -> None:
    """Raise `ConfigError` for a figure that could not be drawn, before anything is measured."""
    if Path(file).suffix not in _KINDS:
        raise ConfigError(f"--plot {file} must end with {', '.join(_KINDS)}.")
    new_figure(1)


def new_figure(num_panels: int, **options: Any) -> tuple[Figure, Sequence[Any]]:
    """Return a figure with a row of empty panels in Octavo's style."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("plots need matplotlib: scripts/install bench.") from None
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "octavo", "font.family": "sans-serif", "font.size": 10,
        "text.color": TEXT, "axes.edgecolor": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    mpl.rcParams.update(style)
    figure = Figure(figsize=(2.4 + 3.6 * num_panels, 3.4))
    axes = figure.subplots(1, num_panels, squeeze=False, **options)[0]
    for axis in axes:
        axis.grid(axis="y", color=TEXT, alpha=0.2, linewidth=0.6)
    return figure, axes


def save_figure(figure: Figure, file: Path, title: str) -> None:
    """Write a figure to a file. Raises `OctavoError` if it cannot be written."""
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    is_svg = file.suffix == ".svg"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, transparent=is_svg, dpi=150, metadata={"Date": None} if is_svg else None)
        if is_svg:
            # Replace the colour by a CSS rule, so that text and axes follow the page.
            svg = file.read_text(encoding="utf-8").replace(TEXT, "currentColor")
            svg = "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
            file.write_text(re.sub(r"(<svg [^>]*>)", rf"\1{_RULE}", svg, count=1), encoding="utf-8")
    except OSError as error:
        raise OctavoError(f"{file} cannot be written: {error.strerror or error}.") from None


def plot_serving(file: Path, answers: Sequence[RequestResult], setting: str) -> None:
    """Draw the distribution of requests' latencies, and the server's throughput over time."""
    good = [answer for answer in answers if answer.error is None]
    if not good:
        return
    figure, (first, token, rate) = new_figure(3)
    for axis, colour, label, values in (
        (first, BLUE, "first token", [answer.ttft_s for answer in good]),
        (first, ORANGE, "whole answer", [answer.latency_s for answer in good]),
        (token, BLUE, "inter-token", [itl for answer in good for itl in answer.itls_s]),
        (token, ORANGE, "mean of a request", [tpot_s(answer) for answer in good if answer.num_output_tokens > 1]),
    ):
        if values:
            milliseconds = np.sort(np.array(values)) * 1e3
            shares = np.arange(1, len(milliseconds) + 1) / len(milliseconds)
            axis.plot(milliseconds, 100 * shares, color=colour, label=label)
    for axis, title in ((first, "latency"), (token, "time between tokens")):
        axis.set(title=title, xlabel="ms", ylabel="% of values up to it", ylim=(0, 101))
        axis.legend(frameon=False, loc="lower right")
    first.set_xlim(0, None)
    token.set_xscale("log")  # a prompt computed in the same step makes a gap ten times longer
    begin = min(answer.start for answer in good)
    times = np.array([at - begin for answer in good for at in token_times_s(answer)])
    counts, edges = np.histogram(times, bins=np.linspace(0, times.max(), max(12, min(100, round(times.max())))))
    rate.stairs(counts / np.diff(edges), edges, color=GREEN, fill=True, alpha=0.35)
    rate.set(title="throughput", xlabel="s", ylabel="tokens/s", xlim=(0, None))
    save_figure(figure, file, f"{setting}: {len(good)} of {len(answers)} requests answered")


def plot_sweep(file: Path, results: Sequence[Mapping[str, Any]], percentile: float) -> None:
    """Draw latencies against throughput from results that `serve` saves: a curve for each server, a point for each
    rate."""
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        if result["completed"]:
            curves.setdefault(result["label"] or result["model_id"], []).append(result)
    if not curves:
        return
    figure, axes = new_figure(3)
    for axis, (name, title) in zip(axes, _SWEPT.items(), strict=True):
        for colour, (label, points) in zip(_curve_colours(len(curves)), curves.items(), strict=True):
            throughput = [point["output_throughput"] for point in points]
            for key, style in ((f"mean_{name}_ms", "-"), (f"p{percentile:g}_{name}_ms", "--")):
                axis.plot(throughput, [point[key] for point in points], style, marker="o", ms=3.5, color=colour)
            axis.plot([], [], color=colour, label=label)
            for point, x in zip(points, throughput, strict=True):
                if point["request_rate"] != "inf":
                    axis.annotate(
                        f"{point['request_rate']:g}/s", (x, point[f"mean_{name}_ms"]), xytext=(0, -10),
                        textcoords="offset points", fontsize=7, ha="center", color=TEXT,
                    )  # fmt: skip
        axis.set(title=title, xlabel="output tokens/s", ylabel="ms", yscale="log", xlim=(0, None))
    axes[0].legend(frameon=False, loc="upper left")
    title = f"{results[0]['model_id']}: means (lines) and {percentile:g}th percentiles (dashed)"
    save_figure(figure, file, title)


def _curve_colours(count: int) -> list[str]:
    colours = (BLUE, ORANGE, GREEN, "#a855f7", "#dc2626", "#0891b2", "#ca8a04", "#64748b")
    return [colours[i % len(colours)] for i in range(count)]
