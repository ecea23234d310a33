"""`octavo gateway [MODEL … | --catalogue FILE]`: many models behind one address."""

import argparse
from collections.abc import Sequence
from functools import partial

from octavo.entrypoints.cli import check_lists_took_no_model, command
from octavo.flags import FlagParser
from octavo.gateway.catalogue import ModelEntry
from octavo.gateway.server import GatewayArgs, run_gateway
from octavo.loading.default_model import DEFAULT_MODEL_NAME
from octavo.loading.local_models import local_models


def make_parser(prog: str) -> FlagParser:
    """Return a parser of every flag of the gateway."""
    parser = FlagParser(
        prog=prog, usage="%(prog)s [MODEL …] [--flags]", description="Serve many models behind one address."
    )
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help="Models to serve, each started when asked for; default: all on this machine.",
    )
    return GatewayArgs.add_cli_args(parser)


@command(make_parser, "octavo gateway")
def main(args: argparse.Namespace) -> None:
    """Serve until a signal stops the gateway."""
    run_gateway(GatewayArgs.from_cli_args(args), models(args), partial(local_entries, args.models_dir))


def models(args: argparse.Namespace) -> list[str]:
    """Return the models that the command line names. Raises `ConfigError` if a flag has taken one of them."""
    if not args.models and not args.catalogue:
        check_lists_took_no_model(args, ("api_key", "admin_key"))
    named: list[str] = args.models
    return named


def local_entries(folders: Sequence[str]) -> dict[str, ModelEntry]:
    """Return the models on this machine by name. The default model is one of them, as its first start fetches it."""
    found = local_models(folders)
    names = {model.name for model in found}
    entries = {DEFAULT_MODEL_NAME: ModelEntry()}
    for model in found:
        if model.name == DEFAULT_MODEL_NAME:
            continue
        aliases = [alias for alias in model.aliases if alias not in names]
        entries[model.name] = ModelEntry(model=model.path, aliases=aliases)
    return entries
