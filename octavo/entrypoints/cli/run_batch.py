"""`octavo run-batch -i IN.jsonl -o OUT.jsonl [--model MODEL] --flags`: answers the requests of a file into another
file.

The format is OpenAI's batch format. Called again after Ctrl-C or a kill, it continues with the unanswered lines.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import AsyncEngineArgs
from octavo.entrypoints.cli import command
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import OctavoError
from octavo.flags import FlagParser
from octavo.logs import configure_logging

if TYPE_CHECKING:
    from octavo.entrypoints.batch.run_batch_files import BatchFiles

# The server's flags that change answers.
_SERVER_FLAGS = (
    "response_role", "enable_auto_tool_choice", "tool_call_parser", "tool_parser_plugin", "reasoning_parser",
    "chat_template_content_format", "default_chat_template_kwargs", "trust_request_chat_template",
    "enable_prompt_tokens_details", "return_tokens_as_token_ids", "unknown_fields",
    "host", "port",
    "max_body_bytes", "max_engine_restarts", "on_engine_death", "engine_ready_timeout", "engine_step_timeout",
)  # fmt: skip


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, description="Answer the requests of a file in OpenAI's batch format.")
    parser.add_argument("-i", "--input-file", type=Path, required=True, help="JSON lines of requests.")
    parser.add_argument("-o", "--output-file", type=Path, required=True, help="JSON lines of answers.")
    parser.add_argument("--enable-metrics", action="store_true", help="Serve /metrics at --host and --port meanwhile.")
    AsyncEngineArgs.add_cli_args(parser)
    ServerArgs.add_cli_args(parser, only=_SERVER_FLAGS)
    return parser


@command(make_parser, "octavo run-batch")
def main(args: argparse.Namespace) -> None:
    metrics = {"enable_prometheus": True, "prometheus_port": args.port} if args.enable_metrics else {}
    server_args = ServerArgs.from_cli_args(args, disable_log_requests=True, **metrics)
    run_batch(AsyncEngineArgs.from_cli_args(args), server_args, args.input_file, args.output_file)


def run_batch(engine_args: AsyncEngineArgs, args: ServerArgs, input_path: Path, output_path: Path) -> None:
    """Answer a batch. Raises `OctavoError` if it cannot go on; written answers are kept."""
    from octavo.entrypoints.batch.run_batch_files import BatchFiles

    args.check()
    configure_logging("batch", names=("octavo",))
    files = BatchFiles(input_path, output_path, args.max_body_bytes)
    try:
        if files.num_done == files.num_lines:
            print(f"{output_path} has all answers already: {files.summary()}", file=sys.stderr)
            if files.num_failed:
                print("To send the refused requests again, give another output file.", file=sys.stderr)
        else:
            asyncio.run(_run(engine_args, args, files))
        files.put_in_order()  # needed also if a run was killed just before this
    except KeyboardInterrupt:
        done = f"{files.num_done} of {files.num_lines} requests have an answer in {output_path}"
        print(f"Stopped: {done}. The same command continues with the others.", file=sys.stderr)
        raise
    except OSError as error:
        raise OctavoError(f"{output_path} cannot be written: {error.strerror}. Written answers are kept.") from None
    finally:
        files.close()


async def _run(engine_args: AsyncEngineArgs, args: ServerArgs, files: BatchFiles) -> None:
    from tqdm import tqdm

    from octavo.engine.engine_client import make_engine
    from octavo.entrypoints.batch.answer_lines import BatchStopped
    from octavo.entrypoints.http.app import build_app
    from octavo.entrypoints.http.server import start_prometheus
    from octavo.metrics.prometheus import EngineMetrics

    registry, config = start_prometheus(args), engine_args.create_engine_config()
    metrics = EngineMetrics(config.model.served_model_names[0], config.model.max_model_len)
    if registry is not None:
        registry.register(metrics)
    engine = make_engine(
        config,
        metrics=metrics,
        max_restarts=args.max_engine_restarts,
        on_engine_death=args.on_engine_death,
        step_timeout_s=args.engine_step_timeout or None,
        ready_timeout_s=args.engine_ready_timeout or None,
    )
    try:
        await engine.wait_ready()
        at_once = 2 * engine.config.num_slots  # so that the engine never waits for requests
        num_done = files.num_done
        with tqdm(total=files.num_lines, initial=num_done, unit=" requests", smoothing=0.05) as progress:
            await files.run(build_app(engine, args), at_once=at_once, progress=progress)
        print(files.summary(), file=sys.stderr)
    except BatchStopped as error:
        raise OctavoError(
            f"the engine answers no more: {error}. Written answers are kept; the same command continues."
        ) from None
    finally:
        engine.shutdown()
