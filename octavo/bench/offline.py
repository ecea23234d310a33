"""What the benchmarks without a server share: flags that name an engine, and the engine made of them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from octavo.bench.data import positive_int
from octavo.config import EngineArgs
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.entrypoints.llm import LLM


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """Every engine flag, and how tokens are chosen."""
    parser.add_argument("model_positional", metavar="MODEL", nargs="?", help="The same as --model.")
    parser.add_argument("--n", type=positive_int, default=1, help="Sequences of a prompt (default: 1).")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1).")
    parser.add_argument("--json", "--output-json", dest="json", metavar="FILE", help="Write the figures there.")
    EngineArgs.add_cli_args(parser)


def make_llm(args: argparse.Namespace) -> LLM:
    """Raises `ConfigError` or `LoadError`."""
    from octavo.entrypoints.llm import LLM

    if args.model_positional is not None:
        if args.model and args.model != args.model_positional:
            raise ConfigError(f"two models are given: {args.model_positional} and --model {args.model}.")
        args.model = args.model_positional
    if not args.temperature >= 0:
        raise ConfigError(f"--temperature must be 0 or more, got {args.temperature}.")
    return LLM(**dataclasses.asdict(EngineArgs.from_cli_args(args)))


def sampling_params(args: argparse.Namespace, num_output_tokens: int) -> SamplingParams:
    """Exactly that many tokens: the model does not end its answers."""
    return SamplingParams(
        n=args.n, temperature=args.temperature, ignore_eos=True, max_tokens=num_output_tokens, detokenize=True
    )


def check_length(llm: LLM, num_input: int, num_output: int) -> None:
    """Raise `ConfigError` for a request that the engine would end early."""
    limit = llm.config.model.max_model_len
    if num_input + num_output > limit:
        raise ConfigError(
            f"{num_input} tokens of prompt and {num_output} of output are more than the engine's {limit}; lower "
            "--input-len or --output-len, or raise --max-model-len."
        )
