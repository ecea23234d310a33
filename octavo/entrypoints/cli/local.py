"""`octavo pull`, `list`, `show` and `rm`: the models on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.cli import command
from octavo.errors import LoadError, OctavoError
from octavo.flags import FlagParser
from octavo.loading.default_model import DEFAULT_MODEL_NAME, fetch_default_model
from octavo.loading.local_models import LocalModel, find_local, local_models, remove

if TYPE_CHECKING:
    from tqdm import tqdm

_NAME = "Hub id (org/name, org/name:Q4_K_M), or the default model's name."


def _name(text: str) -> str:
    if not text.strip():  # as of a variable that is not set
        raise argparse.ArgumentTypeError("the model's name is empty")
    return text


def make_pull_parser(prog: str) -> FlagParser:
    parser = _parser(
        prog, "Fetch a model from the Hugging Face hub. A fetch that was cut off goes on where it stopped."
    )
    parser.add_argument("model", metavar="MODEL", type=_name, help=_NAME)
    parser.add_argument("--json", action="store_true", help="Print progress as JSON objects, one a line.")
    return parser


def make_list_parser(prog: str) -> FlagParser:
    return _parser(prog, "List the models in the hub's cache and in folders of GGUF files.", folders=True)


def make_show_parser(prog: str) -> FlagParser:
    parser = _parser(prog, "Say what a model is and what it can do.", folders=True)
    parser.add_argument(
        "models", metavar="MODEL", type=_name, nargs="+", help="Names of `octavo list`, folders or .gguf files."
    )
    parser.add_argument("--json", action="store_true", help="Print a JSON object for each model, one a line.")
    return parser


def make_rm_parser(prog: str) -> FlagParser:
    parser = _parser(prog, "Delete models from this machine.", folders=True)
    parser.add_argument("models", metavar="MODEL", type=_name, nargs="+", help="Names of `octavo list`.")
    parser.add_argument("--json", action="store_true", help="Print nothing; the exit status says whether it is done.")
    return parser


@command(make_pull_parser, "octavo pull")
def pull(args: argparse.Namespace) -> None:
    if args.json:
        _print_json_progress(args.model)
        return
    fetch_with_bar(args.model)
    print(f"{args.model} is here.")


@command(make_list_parser, "octavo list")
def list_models(args: argparse.Namespace) -> None:
    rows = [("NAME", "SIZE", "MODIFIED")]
    for model in local_models(args.models_dir):
        moment = datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d %H:%M")
        rows.append((model.name, size_text(model.num_bytes), moment))
    print_table(rows)


@command(make_show_parser, "octavo show")
def show(args: argparse.Namespace) -> None:
    """Print cards of models."""
    from octavo.entrypoints.model_card import card_of

    here = local_models(args.models_dir)
    for name in args.models:
        found = find_local(name, here)
        try:
            card = card_of(name if found is None else found.path)
        except OctavoError as error:
            if not args.json:
                raise
            card = {"error": str(error)}
        if args.json:
            print(json.dumps({"asked": name, **card}))
        else:
            _print_card({**card, "name": name})


@command(make_rm_parser, "octavo rm")
def rm(args: argparse.Namespace) -> None:
    for name in args.models:
        found = _find(name, local_models(args.models_dir))
        remove(found)
        if not args.json:
            print(f"deleted {found.name}")


def fetch_with_bar(model: str) -> None:
    """Fetch a model, with a progress bar on a terminal. Raises `LoadError`."""
    from tqdm import tqdm

    bars: dict[str, tqdm[Any]] = {}

    def report(name: str, digest: str, size: int, num_bytes: int) -> None:
        if name not in bars:
            bars[name] = tqdm(total=size, desc=name, unit="B", unit_scale=True, disable=None)
        bars[name].update(num_bytes - bars[name].n)

    try:
        _fetch(model, report)
    finally:
        for bar in bars.values():
            bar.close()


def size_text(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns. The first row has the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _parser(prog: str, description: str, *, folders: bool = False) -> FlagParser:
    parser = FlagParser(prog=prog, description=description)
    if folders:
        parser.add_argument("--models-dir", nargs="+", action="extend", default=[], help="Folders of GGUF files.")
    return parser


def _fetch(model: str, report: Callable[[str, str, int, int], None]) -> None:
    from octavo.loading.checkpoint import resolve
    from octavo.loading.hub_pull import fetch_large_files

    if model == DEFAULT_MODEL_NAME:
        fetch_default_model()
        return
    resolve(model, fetch=lambda repo, commit, names: fetch_large_files(repo, commit, names, report))


def _print_json_progress(model: str) -> None:
    """Print the lines of Ollama's /api/pull, one for each hundredth of a file."""
    said: dict[str, int] = {}

    def report(name: str, digest: str, size: int, num_bytes: int) -> None:
        if (share := num_bytes * 100 // max(1, size)) != said.get(digest):
            said[digest] = share
            line = {"status": f"pulling {name}", "digest": f"sha256:{digest}", "total": size, "completed": num_bytes}
            print(json.dumps(line), flush=True)

    print(json.dumps({"status": "pulling manifest"}), flush=True)
    _fetch(model, report)


def _find(name: str, here: Sequence[LocalModel]) -> LocalModel:
    found = find_local(name, here)
    if found is None:
        raise LoadError(f"{name} is not among the models on this machine; `octavo list` names them.")
    return found


def _print_card(card: dict[str, Any]) -> None:
    from octavo.ollama.cards import parameter_size

    shown = {
        "name": card["name"], "path": card["path"], "architecture": card["architecture"],
        "parameters": parameter_size(card["num_parameters"]), "context length": card["context_length"],
        "hidden size": card["hidden_size"], "layers": card["num_layers"], "format": card["format"],
        "quantization": card["quantization"], "size": size_text(card["num_bytes"]),
        "capabilities": ", ".join(card["capabilities"]),
    }  # fmt: skip
    for key, value in shown.items():
        print(f"{key:16}{value}")
