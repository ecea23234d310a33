"""`octavo bench serve`: measures a running server as many clients see it.

Open loop (`--request-rate`): requests arrive at random times, like users, however busy the server is. Closed loop
(`--max-concurrency`): at most this many requests run at a time. Several rates, or several servers, are measured in turn
and drawn as curves of throughput against latency. Flags, figures and JSON keys are vLLM's. Prompts are in `data`, the
HTTP client in `client`, the arithmetic in `results`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.api_keys import check_keys, sent_by_default
from octavo.bench.client import RequestResult, Target, stream
from octavo.bench.data import BenchPrompt, add_dataset_args, sample_prompts
from octavo.bench.results import METRICS, details, summarize, table, write_json
from octavo.entrypoints.cli import command
from octavo.errors import ConfigError, OctavoError
from octavo.flags import FlagParser, positive_int
from octavo.processes import allow_files, event_loop_factory

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_ALIASES = {"vllm": "openai"}
_GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_READY_CHECK_S = 0.5  # between two checks of a server that is not ready

_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def make_parser(prog: str) -> FlagParser:
    parser = FlagParser(prog=prog, description="Measure a running OpenAI-compatible server.")
    server = parser.add_argument_group("server")
    server.add_argument("--backend", "--endpoint-type", choices=[*ENDPOINTS, *_ALIASES], default="openai")
    server.add_argument(
        "--base-url", nargs="+", metavar="[LABEL=]URL", help="As http://host:port, or several to compare, as "
        "octavo=http://host:port; default: --host and --port.",
    )  # fmt: skip
    server.add_argument("--host", default="127.0.0.1", help="Default: %(default)s.")
    server.add_argument("--port", type=int, default=8000, help="Default: %(default)s.")
    server.add_argument("--endpoint", help="Default: the backend's.")
    server.add_argument("--model", help="Default: the first that the server names.")
    server.add_argument("--served-model-name", help="Model name in requests; default: --model.")
    server.add_argument(
        "--lora-modules", nargs="+", metavar="NAME", help="Adapters of the server: each request names one of them "
        "as its model.",
    )  # fmt: skip
    server.add_argument(
        "--lora-assignment",
        choices=("random", "round-robin"),
        default="random",
        help="How requests choose theirs (default: %(default)s).",
    )
    server.add_argument("--tokenizer", help="Folder, .gguf file or Hugging Face id; default: the model's.")
    server.add_argument("--api-key", default=sent_by_default(), help="Default: OCTAVO_API_KEY, or OPENAI_API_KEY.")
    server.add_argument("--trust-remote-code", action="store_true", help="Run Python code of the tokenizer's folder.")
    server.add_argument("--tokenizer-mode", choices=("auto",), default="auto", help="Always found from the files.")
    server.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, help="Seconds to wait for a server that is not ready yet "
        "(default: 0).",
    )  # fmt: skip
    server.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="A further header of requests; repeatable."
    )
    add_dataset_args(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="Seed of prompts and arrival times; each further rate takes the next seed "
        "(default: %(default)s).",
    )  # fmt: skip
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, nargs="+", default=[math.inf], help="Requests a second, or several rates, one "
        "after the other; default: all at once.",
    )  # fmt: skip
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier (default: 1).",
    )
    load.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), help="How the rate grows from --ramp-up-start-rps to "
        "--ramp-up-end-rps, in the place of --request-rate.",
    )  # fmt: skip
    load.add_argument("--ramp-up-start-rps", type=float, help="The first rate, in requests a second.")
    load.add_argument("--ramp-up-end-rps", type=float, help="The last rate, in requests a second.")
    load.add_argument("--max-concurrency", type=positive_int, help="The most requests at once; default: any number.")
    load.add_argument("--num-warmups", type=int, default=1, help="Requests before those that count (default: 1).")
    request = parser.add_argument_group("requests")
    request.add_argument("--ignore-eos", action="store_true", help="Do not stop before the asked number of tokens.")
    request.add_argument("--temperature", type=float, default=0.0, help="Default: greedy.")
    request.add_argument("--top-p", type=float)
    request.add_argument("--top-k", type=int)
    request.add_argument("--min-p", type=float)
    for name in _PENALTIES:
        request.add_argument(f"--{name.replace('_', '-')}", type=float)
    request.add_argument("--logprobs", type=int, help="Number of log-probabilities to ask for.")
    request.add_argument("--extra-body", metavar="JSON", help="Further fields of every request.")
    figures = parser.add_argument_group("figures")
    figures.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="Limits, as ttft:200 tpot:50 e2el:5000."
    )
    figures.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el", help="Metrics to show; default: %(default)s."
    )
    figures.add_argument("--metric-percentiles", default="90,99", help="Percentiles to show; default: %(default)s.")
    figures.add_argument("--save-result", action="store_true", help="Write the figures as JSON.")
    figures.add_argument("--save-detailed", action="store_true", help="Include each request's times and text.")
    figures.add_argument("--append-result", action="store_true", help="Add a line to the file instead of replacing it.")
    figures.add_argument("--result-dir", help="Folder of the file; default: here.")
    figures.add_argument("--result-filename", help="Default: made of backend, rate, model and time.")
    figures.add_argument("--json", metavar="FILE", help="Write the figures to this file.")
    figures.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Added to the JSON.")
    figures.add_argument("--label", help="Name of the run in the JSON and its file name.")
    figures.add_argument("--plot", metavar="FILE", help="Draw latencies and throughput (.svg, .png, .pdf).")
    figures.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")
    return parser


@command(make_parser, "octavo bench serve")
def main(args: argparse.Namespace) -> None:
    """Measure and print. Raises `OctavoError` if no request succeeded."""
    plans = _plans(args)
    allow_files()  # each connection is an open file
    results = []
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        for plan in plans:
            answers, duration_s, prompts = runner.run(_measure(plan))
            results.append(_report(plan, answers, duration_s, prompts))
            if args.plot and len(plans) == 1:
                from octavo.bench.plot import plot_serving

                plot_serving(Path(args.plot), answers, plan.setting())
    if args.json:
        write_json(Path(args.json), results if len(plans) > 1 else results[0])
    if args.plot and len(plans) > 1:
        from octavo.bench.plot import plot_sweep

        plot_sweep(Path(args.plot), results, plans[0].percentiles[-1])
    for plan, result in zip(plans, results, strict=True):
        if not result["completed"]:
            raise OctavoError(f"not one of {result['num_prompts']} requests succeeded ({plan.setting()}).")


def _plans(args: argparse.Namespace) -> list[Plan]:
    """Return a run for each rate and server. Servers take turns, so that other programs disturb all of them alike.
    Each rate has a seed of its own: a server would find the prompts of an earlier rate in its cache."""
    servers = [_server(word) for word in args.base_url or [f"http://{args.host}:{args.port}"]]
    if len(servers) > 1 and len({label for label, _ in servers} - {None}) < len(servers):
        raise ConfigError("--base-url with several servers needs a label for each, as octavo=http://host:port.")
    plans = [
        Plan(argparse.Namespace(**vars(args) | {"seed": args.seed + index}), url, label, rate)
        for index, rate in enumerate(args.request_rate)
        for label, url in servers
    ]
    if len(plans) > 1 and args.result_filename:
        raise ConfigError("--result-filename names the file of one run, and there are several; leave it out.")
    return plans


def _server(word: str) -> tuple[str | None, str]:
    """Return the label and the address of a --base-url."""
    label, equals, url = word.partition("=")
    return (label, url) if equals and "://" not in label else (None, word)


class Plan:
    """One run, with checked flags. `model` and `tokenizer` are known after `ask_server`."""

    def __init__(self, args: argparse.Namespace, base: str, label: str | None, rate: float) -> None:
        self.args = args
        self.label = label or args.label
        self.rate = rate
        self.backend = _ALIASES.get(args.backend, args.backend)
        headers = dict(_pair(word, "--header") for word in args.header)
        if args.api_key:
            check_keys("--api-key or its variable", [args.api_key])
            headers["Authorization"] = f"Bearer {args.api_key}"
        self.target = Target(base.rstrip("/") + (args.endpoint or ENDPOINTS[self.backend]), headers)
        self.model: str = args.model or ""
        self.tokenizer: str = args.tokenizer or ""
        self.percentiles = _floats(args.metric_percentiles, "--metric-percentiles")
        if any(not 0 <= percentile <= 100 for percentile in self.percentiles):
            raise ConfigError(f"--metric-percentiles must be between 0 and 100, got {args.metric_percentiles}.")
        self.shown = [name.strip() for name in args.percentile_metrics.split(",") if name.strip()]
        if unknown := set(self.shown) - set(METRICS):
            raise ConfigError(f"--percentile-metrics knows {', '.join(METRICS)}, not {', '.join(sorted(unknown))}.")
        self.goodput_ms = _goodput(args.goodput)
        self.metadata = dict(_pair(word, "--metadata") for word in args.metadata)
        self.extra_body = _json_object(args.extra_body)
        self.ramp = _ramp(args)
        if args.append_result and not args.save_result:
            raise ConfigError("--append-result needs --save-result.")
        if not rate > 0:
            raise ConfigError(f"--request-rate must be greater than 0, got {rate}.")
        if not args.burstiness > 0:
            raise ConfigError(f"--burstiness must be greater than 0, got {args.burstiness}.")
        if args.plot:
            from octavo.bench.plot import check_plot_file

            check_plot_file(args.plot)

    def ask_server(self) -> None:
        """Fill in the model and the tokenizer from the server's list of models, if the flags do not name them."""
        self._wait_until_ready()
        if self.model and self.tokenizer:
            return
        try:
            card = self.target.get_json("/v1/models")["data"][0]
            name, root = str(card["id"]), str(card.get("root") or card["id"])
        except (OSError, LookupError, TypeError) as error:
            if self.model:  # the server has no list: use the model's name
                self.tokenizer = self.tokenizer or self.model
                return
            reason = getattr(error, "strerror", None) or error
            raise OctavoError(
                f"no server names its model for {self.target.url} ({reason}); start one with 'octavo serve', or give "
                "--base-url, or --host and --port."
            ) from None
        self.tokenizer = self.tokenizer or (self.model if self.model and self.model != name else root)
        self.model = self.model or name

    def _wait_until_ready(self) -> None:
        """Wait for the server for up to --ready-check-timeout-sec."""
        deadline = time.monotonic() + self.args.ready_check_timeout_sec
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.target.get_json("/v1/models")
                return
            time.sleep(_READY_CHECK_S)

    def models(self, count: int) -> list[str]:
        """Return the model name of each of `count` requests: the model's, or an adapter's."""
        names = self.args.lora_modules or [self.args.served_model_name or self.model]
        if self.args.lora_assignment == "round-robin":
            return [names[i % len(names)] for i in range(count)]
        return [names[i] for i in np.random.default_rng(self.args.seed).integers(len(names), size=count)]

    def body(self, prompt: BenchPrompt, model: str) -> dict[str, Any]:
        """Return the JSON body of one request."""
        args = self.args
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if self.backend == "openai":
            body |= {"prompt": prompt.text, "max_tokens": prompt.num_output_tokens}
        else:
            body["messages"] = [{"role": "user", "content": prompt.text}]
            body["max_completion_tokens"] = prompt.num_output_tokens
        if args.logprobs is not None:
            is_chat = self.backend == "openai-chat"
            body |= {"logprobs": True, "top_logprobs": args.logprobs} if is_chat else {"logprobs": args.logprobs}
        for name in ("temperature", "top_p", "top_k", "min_p", *_PENALTIES):
            if (value := getattr(args, name)) is not None:
                body[name] = value
        if args.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra_body

    def setting(self) -> str:
        """Return one line that describes the load of this run."""
        rate = "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"
        if self.ramp is not None:
            rate = f"{self.ramp.start:g} to {self.ramp.end:g} requests/s ({self.ramp.strategy})"
        limit = self.args.max_concurrency
        name = f"{self.label}: {self.model}" if self.label else self.model
        return f"{name}, {rate}" + (f", at most {limit} under way" if limit else "")


class Ramp(NamedTuple):
    """A rate of requests that grows from the first request to the last."""

    strategy: str  # "linear" or "exponential"
    start: float
    end: float

    def rates(self, num_prompts: int) -> Any:
        """Return the rate at each of `num_prompts` requests."""
        progress = np.arange(num_prompts) / max(num_prompts - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


def _ramp(args: argparse.Namespace) -> Ramp | None:
    """Return the ramp that the flags ask for, or None. Raises `ConfigError`."""
    strategy, start, end = args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps
    if strategy is None:
        if start is not None or end is not None:
            raise ConfigError(
                "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or exponential."
            )
        return None
    if start is None or end is None or not 0 < start <= end < math.inf:
        raise ConfigError(
            f"--ramp-up-strategy needs --ramp-up-start-rps above 0 and --ramp-up-end-rps not below it, got {start} and "
            f"{end}."
        )
    if args.request_rate != [math.inf]:
        raise ConfigError("--ramp-up-strategy says the rate; leave --request-rate out.")
    return Ramp(strategy, start, end)


def arrival_times(num_prompts: int, rate: float, burstiness: float, seed: int, ramp: Ramp | None = None) -> list[float]:
    """Return the times at which requests are sent, in seconds from the start. Gaps are gamma-distributed. As in vLLM
    they are scaled so that the last request is sent at exactly `num_prompts / rate`, which makes runs of one rate
    comparable. With a `ramp` the gaps follow its rates, without scaling."""
    rng = np.random.default_rng(seed)
    if ramp is not None:
        grown: list[float] = np.cumsum(rng.gamma(burstiness, 1 / (ramp.rates(num_prompts) * burstiness))).tolist()
        return grown
    if math.isinf(rate):
        return [0.0] * num_prompts
    times = np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), num_prompts))
    scaled: list[float] = (times * (num_prompts / rate / times[-1])).tolist()
    return scaled


async def _measure(plan: Plan) -> tuple[list[RequestResult], float, list[BenchPrompt]]:
    args = plan.args
    plan.ask_server()
    from octavo.loading.checkpoint import find_tokenizer
    from octavo.loading.tokenizer import read_tokenizer

    prompts = sample_prompts(args, read_tokenizer(find_tokenizer(plan.tokenizer), args.trust_remote_code))
    models = plan.models(len(prompts))
    bodies = [plan.body(prompt, model) for prompt, model in zip(prompts, models, strict=True)]
    for _ in range(args.num_warmups):
        # Not one of the measured prompts, because the server may keep its blocks.
        answer = await stream(plan.target, plan.body(BenchPrompt("Hello, who are you?", 6, 8), models[0]))
        if answer.error is not None:
            raise OctavoError(f"the first request failed, so the others are not sent: {answer.error}")
    times = arrival_times(len(prompts), plan.rate, args.burstiness, args.seed, plan.ramp)
    gc.collect()
    gc.freeze()
    answers, duration_s = await run_load(plan.target, bodies, times, args.max_concurrency, not args.disable_tqdm)
    for answer, prompt in zip(answers, prompts, strict=True):
        answer.num_prompt_tokens = answer.num_prompt_tokens or prompt.num_tokens
    return answers, duration_s, prompts


async def run_load(
    target: Target,
    bodies: Sequence[Mapping[str, Any]],
    times: Sequence[float],
    max_concurrency: int | None,
    show_progress: bool,
) -> tuple[list[RequestResult], float]:
    """Send each body at its time, or as soon as the limit allows. Return the answers and the duration in seconds."""
    from tqdm import tqdm

    progress = tqdm(total=len(bodies), unit="req", dynamic_ncols=True, disable=not show_progress)
    limit: contextlib.AbstractAsyncContextManager[Any] = contextlib.nullcontext()
    if max_concurrency is not None:
        limit = asyncio.Semaphore(max_concurrency)

    async def send(body: Mapping[str, Any]) -> RequestResult:
        async with limit:
            answer = await stream(target, body)
        progress.update()
        return answer

    tasks = []
    begin = time.perf_counter()
    for body, at in zip(bodies, times, strict=True):
        # Wait by the clock, not from request to request, so that delays do not add up.
        if (wait_s := begin + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(send(body)))
    answers = await asyncio.gather(*tasks)
    duration_s = time.perf_counter() - begin
    progress.close()
    return answers, duration_s


def _report(
    plan: Plan, answers: Sequence[RequestResult], duration_s: float, prompts: Sequence[BenchPrompt]
) -> dict[str, Any]:
    """Print the figures of a run, save them if a flag asks for it, and return them in the saved form."""
    args = plan.args
    figures = summarize(answers, duration_s, percentiles=plan.percentiles, goodput_ms=plan.goodput_ms)
    print(table(figures, plan.shown, plan.percentiles, plan.setting()))
    for message, count in Counter(answer.error for answer in answers if answer.error is not None).items():
        print(f"{count} failed: {message}", file=sys.stderr)
    rate = plan.rate
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    result: dict[str, Any] = {
        "date": now,
        "backend": args.backend,
        "endpoint_type": plan.backend,
        "label": plan.label,
        "model_id": plan.model,
        "tokenizer_id": plan.tokenizer or plan.model,
        "num_prompts": len(prompts),
        **plan.metadata,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **figures,
    }
    if plan.ramp is not None:
        start, end = plan.ramp.start, plan.ramp.end
        result |= {"ramp_up_strategy": plan.ramp.strategy, "ramp_up_start_rps": start, "ramp_up_end_rps": end}
    if args.save_detailed:
        result |= details(answers)
    if args.save_result:
        limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        name = f"{plan.label or args.backend}-{rate}qps{limit}-{plan.model.rpartition('/')[2]}-{now}.json"
        file = Path(args.result_dir or ".") / (args.result_filename or name)
        write_json(file, result, appends=args.append_result)
    return result


def _pair(word: str, flag: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise ConfigError(f"{flag} {word} is not NAME=VALUE.")
    return name, value


def _floats(text: str, flag: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text} is not a list of numbers like 50,99.") from None


def _goodput(words: Sequence[str]) -> dict[str, float]:
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {word} is not METRIC:MILLISECONDS, such as ttft:200.") from None
        if name not in _GOODPUT_METRICS or limits[name] < 0:
            raise ConfigError(f"--goodput {word}: metrics are {', '.join(_GOODPUT_METRICS)}, limits 0 or more.")
    return limits


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body {text} is not a JSON object.")
    return value


if __name__ == "__main__":
    sys.exit(main())
