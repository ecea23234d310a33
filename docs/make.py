"""Make the documentation site: `python docs/make.py SITE`, which `scripts/docs` runs where its tools are installed.

Pages are this repository's own, at their own paths, so that their links hold here and there. The reference is written
from the code: flags from the commands' parsers, variables from `octavo.variables`, metrics from what a server exposes,
Python's names from docstrings. Zensical makes HTML of them, strictly: a warning is an error. Then every link and anchor
of that is looked up. SITE gets a folder for this version beside those of others, the list of them that the menu reads,
and a page at the top that leads to the newest.
"""

from __future__ import annotations

import argparse
import html
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import octavo
from octavo.entrypoints.cli.main import make_parser
from octavo.metrics.http_metrics import HttpMetrics
from octavo.metrics.media_metrics import MediaMetrics
from octavo.metrics.prometheus import EngineMetrics
from octavo.variables import VARIABLES
from octavo.version import __version__

if TYPE_CHECKING:
    from prometheus_client import Metric

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "docs"
PAGES = (
    "*.md",
    "docs/*.md",
    "docs/images/*",
    "benchmarks/results/*.md",
    "examples/*.*",
    "deploy/helm/octavo/README.md",
    "deploy/systemd/*",
)
_MARKUP = re.compile(r"([\\*_|\[\]<>])")
_RELEASE = re.compile(r"\d+(\.\d+)*")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the documentation site.")
    parser.add_argument("site", type=Path, help="folder of all versions; those that it has stay")
    site = parser.parse_args().site
    shutil.rmtree(WORK, ignore_errors=True)
    gather(WORK / "source")
    shutil.copy(ROOT / "docs" / "zensical.toml", WORK)
    zensical = Path(sys.executable).parent / "zensical"
    done = subprocess.run([zensical, "build", "--clean", "--strict"], cwd=WORK, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    pages = read_pages(WORK / "site")
    if wrong := [*broken_links(pages)]:
        sys.exit("\n".join(wrong))
    publish(WORK / "site", site, __version__)
    print(f"{len(pages)} pages, {sum(len(page.links) for page in pages.values())} links: {site / __version__}")


def gather(folder: Path) -> None:
    """Copy the pages, and write those of the reference."""
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            to = folder / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    reference = folder / "reference"
    reference.mkdir()
    for name, text in {
        "flags": flags(), "variables": variables(), "metrics": metrics(), "python": python_names()
    }.items():  # fmt: skip
        (reference / f"{name}.md").write_text(text)


def flags() -> str:
    """A section for each command, with a table for each group of its flags."""
    config = "[`--config`](../docs/server.md#starting-and-stopping)"
    text = f"What `octavo COMMAND --help` prints. Flags may be written with `_` too, and stand in a file for {config}."
    parts = ["# Flags", text]
    for command in commands(make_parser()):
        parts += [f"## {command.prog}", *([plain(command.description)] if command.description else [])]
        tables: dict[str, list[str]] = {}
        for group in command._action_groups:  # argparse has no other way to ask
            title = "" if group.title in ("options", "positional arguments") else f"### {command.prog}: {group.title}"
            actions = [a for a in group._group_actions if a.help is not argparse.SUPPRESS and a.dest != "help"]
            tables.setdefault(title, []).extend(flag_row(command, action) for action in actions)
        for title, rows in tables.items():
            if rows:
                parts += [title, "\n".join(["| flag | |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Those below a parser that have no others below them."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for command in action.choices.values():
            yield from commands(command)


def flag_row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    names = ", ".join(action.option_strings) or formatter._metavar_formatter(action, action.dest)(1)[0]
    value = ""
    if action.option_strings and action.nargs != 0:
        value = " " + formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    # Upright bars divide the table's columns even in code.
    shown = html.escape(names + value).replace("|", "&#124;")
    return f"| <code>{shown}</code> | {plain(formatter._expand_help(action) if action.help else '')} |"


def variables() -> str:
    text = (
        "What Octavo reads from the environment. `octavo collect-env` shows those that are set, without secrets. "
        "Libraries read more: Hugging Face's hub (`HF_HOME`, `HF_TOKEN`), OpenTelemetry's exporter (`OTEL_…`), CUDA "
        "(`CUDA_VISIBLE_DEVICES`), Triton (`TRITON_CACHE_DIR`)."
    )
    rows = [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    return "\n".join(["# Variables", "", text, "", "| variable | |", "|---|---|", *rows, ""])


def metrics() -> str:
    text = (
        "What `/metrics` of a server exposes, by its own descriptions; [another page](../docs/metrics.md#metrics) "
        "says what they count from and to. A histogram `x` has the series `x_bucket`, `x_sum` and `x_count`."
    )
    parts = ["# Metrics", text]
    described = exposed()
    for kind in ("counter", "gauge", "histogram"):
        rows = []
        for metric in described:
            if metric.type == kind:
                name = metric.name + ("_total" if kind == "counter" else "")
                labels = ", ".join(f"`{label}`" for label in label_names(metric))
                rows.append(f"| `{name}` | {labels} | {plain(metric.documentation)} |")
        parts += [f"## {kind.capitalize()}s", "\n".join(["| metric | labels | |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def exposed() -> list[Metric]:
    """The metrics of a server that has not been asked anything."""
    engine = EngineMetrics("model", 4096)
    engine.cache_config = dict.fromkeys(("block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching"))
    engine.others += [HttpMetrics(), MediaMetrics("image")]
    return list(engine.collect())


def label_names(metric: Metric) -> list[str]:
    """But for a histogram's `le`."""
    return list(getattr(metric, "_labelnames", ()))


def python_names() -> str:
    """A directive for each name that `import octavo` offers, which mkdocstrings puts the docstrings in for."""
    names = [name for name in octavo.__all__ if not name.startswith("__")]
    homes = {name: inspect.getmodule(getattr(octavo, name)).__name__ for name in names}  # type: ignore[union-attr]
    homes["PromptType"] = octavo.inputs.__name__  # an alias has none of its own
    parts = ["# Python", "What `from octavo import …` offers."]
    parts += [f"::: {home}.{name}\n    options:\n      heading: {name}\n" for name, home in homes.items()]
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Text that means itself in a cell of a Markdown table, but for its code."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(p.replace("|", "&#124;") if p.startswith("`") else _MARKUP.sub(r"\\\1", p) for p in parts)


@dataclass
class Page(HTMLParser):
    """What a page of HTML offers and refers to."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None and (tag, value) != ("use", ""):
                self.links.append(value)


def read_pages(site: Path) -> dict[Path, Page]:
    """The pages below `site`, by path."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = page = Page()
        page.feed(path.read_text())
    return pages


def broken_links(pages: dict[Path, Page]) -> Iterator[str]:
    """A line for each link to a file or an anchor that is not there. Other sites are not asked."""
    for path, page in pages.items():
        if path.name == "404.html":  # which a server answers with at any path; its links are from the top
            continue
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            to = (path.parent / unquote(url.path)).resolve() if url.path else path
            to = to / "index.html" if to.is_dir() else to
            if not to.is_file():
                yield f"{path}: no file is at {link}"
            elif url.fragment and to in pages and unquote(url.fragment) not in pages[to].anchors:
                yield f"{path}: no anchor is at {link}"


def publish(made: Path, site: Path, version: str) -> None:
    """Put a version beside the others of `site`, in the place of its former self."""
    shutil.rmtree(site / version, ignore_errors=True)
    shutil.copytree(made, site / version)
    folders = [path.name for path in site.iterdir() if path.is_dir() and _RELEASE.match(path.name)]
    newest_first = sorted(folders, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    entries = [{"version": name, "title": name, "aliases": []} for name in newest_first]
    entries[0]["aliases"] = ["latest"]
    (site / "versions.json").write_text(json.dumps(entries, indent=1))
    (site / "index.html").write_text(
        f'<!doctype html><title>Octavo</title><meta http-equiv="refresh" content="0; url={newest_first[0]}/">\n'
    )


if __name__ == "__main__":
    main()
