"""`octavo kernels MODEL`: compiles a model's kernels into an archive from which servers start. The GPUs need not be on
this machine."""

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path

from octavo.config import EngineArgs
from octavo.entrypoints.cli import command
from octavo.errors import ConfigError
from octavo.flags import FlagParser

_FLAGS = {field.name for field in fields(EngineArgs)} - {"model", "device"}
_CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0")


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(
        prog=prog,
        description="Compile a model's kernels into an archive. A server with these flags and OCTAVO_KERNELS=FILE then "
        "starts without compiling, and without a C compiler, if its Octavo, Triton and Python have the same versions.",
    )  # fmt: skip
    parser.add_argument("model_tag", metavar="MODEL", help="Hugging Face id, folder or .gguf file.")
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="The archive, such as kernels.tar.gz.")
    parser.add_argument(
        "--capability", nargs="+", choices=_CAPABILITIES, default=["9.0"], metavar="X.Y",
        help=f"Compute capabilities, of {', '.join(_CAPABILITIES)} (default: 9.0).",
    )  # fmt: skip
    parser.add_argument(
        "--also", action="append", default=[], metavar="METHOD", help="Another --quantization to compile for."
    )
    EngineArgs.add_cli_args(parser, only=_FLAGS)
    return parser


@command(make_parser, "octavo kernels")
def main(args: argparse.Namespace) -> None:
    from octavo import hardware

    hardware.expect_cuda()
    engine_args = EngineArgs.from_cli_args(args, device="cuda", model=args.model_tag)
    if not Path(args.output).absolute().parent.is_dir():  # checked before the long compilation
        raise ConfigError(f"the folder of {args.output} is not there: make it, or name another file.")
    from octavo.execution.compile_ahead import compile_model
    from octavo.ops.triton.kernel_archive import making_archive

    configs = [
        replace(engine_args, quantization=method).create_engine_config()
        for method in (engine_args.quantization, *args.also)
    ]
    capabilities = [(int(major), int(minor)) for major, minor in (each.split(".") for each in args.capability)]
    with making_archive(args.output, capabilities) as current:
        for capability in current:
            for config in configs:
                compile_model(config)
            print("compiled for {}.{}".format(*capability), flush=True)
    print(f"{args.output}: {os.path.getsize(args.output) / (1 << 20):.1f} MiB")
