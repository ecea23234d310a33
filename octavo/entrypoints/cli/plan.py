"""`octavo plan [MODEL]`: predicts memory and speed from the model's configuration alone."""

import argparse
import json
import os
import sys
from dataclasses import replace

from octavo.config import EngineArgs
from octavo.entrypoints.cli import command
from octavo.errors import ConfigError, LoadError
from octavo.flags import FlagParser, positive_int

_ENGINE_FLAGS = (
    "revision", "download_dir", "dtype", "kv_cache_dtype", "max_model_len", "block_size", "max_num_seqs",
    "max_num_batched_tokens", "gpu_memory_utilization", "cpu_memory_utilization", "cpu_threads", "hf_overrides",
    "kv_cache_host_gib", "preemption_mode", "swap_space",
)  # fmt: skip
_FORMATS = ("as-is", "bf16", "int8", "int4", "fp8", "q8_0", "q5_k_m", "q4_k_m", "q4_0")
_GPUS = ("a100-40gb", "a100", "h100", "h200")


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, description="Predict memory and speed of a model. Of weights only headers are read.")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="",
        help="Folder, .gguf file, or Hugging Face id, whose weights are not fetched; default: the default model.",
    )  # fmt: skip
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cpu", action="store_true", help="This machine's processors, which are measured (default).")
    device.add_argument("--gpu", choices=_GPUS, help="GPUs of this kind, which need not be here.")
    parser.add_argument("--count", type=positive_int, help="GPUs (default: 1).")
    parser.add_argument(
        "--format", choices=_FORMATS, default="as-is", help="Format of the weights (default: as the model's files are)."
    )
    parser.add_argument(
        "--lengths", type=positive_int, nargs="+", default=[], metavar="N", help="Tokens per request that must fit."
    )
    parser.add_argument(
        "--batch-sizes", type=positive_int, nargs="+", metavar="N", default=[1, 4, 16, 64],
        help="Sequences in a decode step (default: 1 4 16 64).",
    )  # fmt: skip
    parser.add_argument(
        "--input-len", type=positive_int, default=512, help="Tokens of a prompt (default: %(default)s)."
    )
    parser.add_argument(
        "--context-len",
        type=positive_int,
        default=256,
        help="Tokens of a sequence that decodes (default: %(default)s).",
    )
    parser.add_argument("--no-measure", action="store_true", help="Measure nothing: sizes only, on a CPU.")
    parser.add_argument("--json", action="store_true", help="Print JSON, as docs/planning.md describes it.")
    EngineArgs.add_cli_args(parser, only=_ENGINE_FLAGS)
    return parser


@command(make_parser, "octavo plan")
def main(args: argparse.Namespace) -> int:
    """Print the plan. Return 1, the exit code, if the model does not fit."""
    if args.count is not None and args.gpu is None:
        raise ConfigError("--count is of GPUs; say which with --gpu.")
    from octavo.config.cache_tier_flags import host_cache_bytes
    from octavo.config.number_types import CACHE_BYTES
    from octavo.loading.checkpoint import is_default_model
    from octavo.planning.serving_plan import PlanOptions, as_text, make_plan
    from octavo.planning.step_limits import GPUS

    asked = EngineArgs.from_cli_args(args, device="cpu")
    engine_args = replace(asked, kv_cache_host_gib=0.0) if args.gpu else asked  # a CPU would refuse it
    options = PlanOptions(
        args.format, GPUS[args.gpu] if args.gpu else None, args.count or 1, args.lengths, args.input_len,
        args.context_len, args.batch_sizes, not args.no_measure,
    )  # fmt: skip
    is_here = is_default_model(args.model) or os.path.exists(os.path.expanduser(args.model))
    try:
        config = replace(engine_args, load_format="auto" if is_here else "dummy").create_engine_config()
    except LoadError as error:
        if not is_here or "no weights" not in str(error):
            raise
        config = replace(engine_args, load_format="dummy").create_engine_config()
    if args.gpu:
        host_bytes = host_cache_bytes(asked, "cuda", shares_prefixes=config.cache.enable_prefix_caching)
        config = replace(config, cache=replace(config.cache, host_bytes=host_bytes))
    if args.gpu and args.kv_cache_dtype in CACHE_BYTES:  # a CPU would turn fp8 into int8
        config = replace(config, cache=replace(config.cache, dtype=CACHE_BYTES[args.kv_cache_dtype]))
    if options.measures and not args.gpu:
        print("Measuring steps on this machine's processors ...", file=sys.stderr)
    plan = make_plan(config, options)
    print(json.dumps(plan, indent=2) if args.json else as_text(plan))
    return int(not plan["layout"]["fits"])
