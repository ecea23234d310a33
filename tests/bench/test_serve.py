"""`octavo bench serve` against a real HTTP server: what is sent, what is counted, and vLLM's names in the JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.bench import serve
from octavo.bench.client import RequestResult, Target
from octavo.bench.data import BenchPrompt, add_dataset_args, random_prompts, sample_prompts, sharegpt_prompts
from octavo.bench.results import details, summarize
from octavo.bench.serve import Ramp, arrival_times, main
from octavo.errors import ConfigError
from octavo.flags import FlagParser
from octavo.loading.checkpoint import resolve
from octavo.loading.tokenizer import ModelTokenizer, read_tokenizer
from tests.e2e.server import MODEL, running_server
from tests.entrypoints.fake_engine import FakeEngine, serving

SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"Question {i}?"}, {"from": "gpt", "value": "An answer." * (i + 1)}]}
    for i in range(5)
]


def run(address: str, folder: Path, tokenizer: Path, *flags: str, code: int = 0) -> dict[str, object]:
    """The JSON of a run."""
    file = folder / "result.json"
    always = ["--base-url", address, "--tokenizer", str(tokenizer), "--disable-tqdm", "--json", str(file)]
    assert main([*always, *flags]) == code
    return json.loads(file.read_text())


@pytest.mark.long
def test_a_closed_loop_run_has_vllms_figures(
    address: str, engine: FakeEngine, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.may_begin = lambda: len(engine.seen) != 2  # the first of two, after the one that is no prompt, waits
    flags = [
        "--num-prompts",
        "6",
        "--max-concurrency",
        "2",
        "--random-input-len",
        "20",
        "--random-output-len",
        "8",
        "--ignore-eos",
    ]
    figures = run(address, tmp_path, tiny_tokenizer, *flags, "--goodput", "ttft:60000", "e2el:60000")
    assert (figures["completed"], figures["failed"], figures["num_prompts"]) == (6, 0, 6)
    assert figures["total_output_tokens"] == 6 * 8
    assert figures["request_goodput"] == figures["request_throughput"] > 0
    assert (figures["request_rate"], figures["max_concurrency"], figures["model_id"]) == ("inf", 2, "org/fake")
    assert figures["max_concurrent_requests"] == 2
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert figures[f"median_{metric}_ms"] <= figures[f"p90_{metric}_ms"] <= figures[f"p99_{metric}_ms"]
        # Tokens of one answer may arrive together, which leaves no time between them.
        assert figures[f"median_{metric}_ms"] > 0 or metric in ("tpot", "itl")
    assert figures["mean_ttft_ms"] <= figures["mean_e2el_ms"]
    prompts = [ids for ids, params, _ in engine.seen if params.ignore_eos and params.max_tokens == 8]
    assert len(prompts) == 6 + 1  # one to see whether the server answers
    assert figures["total_input_tokens"] == sum(map(len, prompts[1:]))
    shown = capsys.readouterr().out
    assert "Successful requests:                     6\n" in shown
    assert "P99 TTFT (ms):" in shown


def test_chat_counts_from_the_first_text_and_saves_what_is_asked(
    address: str, engine: FakeEngine, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    data = tmp_path / "sharegpt.json"
    data.write_text(json.dumps(SHAREGPT))
    flags = [
        "--backend",
        "openai-chat",
        "--dataset-name",
        "sharegpt",
        "--dataset-path",
        str(data),
        "--num-prompts",
        "3",
    ]
    saved = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path / "out"), "--result-filename", "r.json"]
    asked = ["--request-rate", "200", "--metadata", "a=b", "--repetition-penalty", "1.2", "--frequency-penalty", "1"]
    figures = run(address, tmp_path, tiny_tokenizer, *flags, *saved, *asked)
    params = engine.seen[-1][1]
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.2, 1, 0)
    assert figures == json.loads((tmp_path / "out" / "r.json").read_text())
    assert (figures["a"], figures["request_rate"], figures["endpoint_type"]) == ("b", 200.0, "openai-chat")
    assert len(figures["ttfts"]) == 3
    assert all("Hello there".startswith(text) and text for text in figures["generated_texts"])
    # A chunk holds one of these tokens: the time to the first and the gaps between the others are all there is.
    for itls, length in zip(figures["itls"], figures["output_lens"], strict=True):
        assert length - 1 <= len(itls) + 1 <= length + 1
    assert engine.tokenizer.decode(engine.seen[-1][0]).startswith("user: Question")


def test_failures_are_counted_and_shown(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(tiny_tokenizer)
    engine.fails_after = (2, RuntimeError("x"))
    with serving(engine, disable_log_requests=True) as address:
        flags = [
            "--num-prompts",
            "4",
            "--random-input-len",
            "8",
            "--random-output-len",
            "6",
            "--num-warmups",
            "0",
            "--ignore-eos",
        ]
        figures = run(address, tmp_path, tiny_tokenizer, *flags, code=1)
        assert (figures["completed"], figures["failed"], figures["output_throughput"]) == (0, 4, 0)
        error = capsys.readouterr().err
        assert "4 failed: Internal error.\n" in error
        assert "not one of 4 requests succeeded" in error
        few = ["--num-prompts", "1", "--random-input-len", "8"]
        assert main(["--base-url", address, "--tokenizer", str(tiny_tokenizer), "--model", "other", *few]) == 1
        assert "HTTP 404: The model 'other' does not exist here" in capsys.readouterr().err


def test_each_request_names_one_of_several_adapters(
    address: str, engine: FakeEngine, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-prompts", "5", "--random-input-len", "8", "--random-output-len", "2", "--lora-modules", "alias"]
    assert run(address, tmp_path, tiny_tokenizer, *flags)["completed"] == 5
    figures = run(address, tmp_path, tiny_tokenizer, *flags, "other", "--lora-assignment", "round-robin")
    assert (figures["completed"], figures["failed"]) == (3, 2)
    assert "2 failed: HTTP 404: The model 'other' does not exist" in capsys.readouterr().err
    args = serve.make_parser("bench").parse_args(["--lora-modules", "a", "b", "--seed", "3"])
    models = serve.Plan(args, "http://x", None, 1.0).models(100)
    assert models == serve.Plan(args, "http://x", None, 1.0).models(100)
    assert Counter(models).keys() == {"a", "b"} and models != sorted(models)


def test_a_key_is_sent(tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(tiny_tokenizer)
    flags = ["--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "2"]
    with serving(engine, disable_log_requests=True, api_key=["secret"]) as address:
        assert run(address, tmp_path, tiny_tokenizer, *flags, "--api-key", "secret")["completed"] == 2
        assert main(["--base-url", address, *flags, "--api-key", "wrong"]) == 1
    assert "/v1/completions needs an API key, or a different one: --api-key" in capsys.readouterr().err


@pytest.mark.long
def test_a_plot_is_drawn(address: str, engine: FakeEngine, tiny_tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib: scripts/install bench")
    plot = tmp_path / "run.svg"
    flags = ["--num-prompts", "3", "--random-input-len", "8", "--random-output-len", "4", "--ignore-eos"]
    run(address, tmp_path, tiny_tokenizer, *flags, "--plot", str(plot))
    svg = plot.read_text()
    assert "3 of 3 requests answered" in svg
    assert "prefers-color-scheme" in svg


@pytest.mark.long
def test_several_rates_and_servers_are_measured_in_turn_and_drawn_as_curves(
    address: str, engine: FakeEngine, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib: scripts/install bench")
    file, plot = tmp_path / "result.json", tmp_path / "sweep.svg"
    few = ["--num-prompts", "3", "--random-input-len", "8", "--random-output-len", "4", "--ignore-eos"]
    flags = ["--tokenizer", str(tiny_tokenizer), "--disable-tqdm", "--json", str(file), "--plot", str(plot), *few]
    servers = ["--base-url", f"first={address}", f"second={address}"]
    assert main([*servers, "--request-rate", "100", "200", *flags, "--save-result", "--result-dir", str(tmp_path)]) == 0
    results = json.loads(file.read_text())
    assert [(result["label"], result["request_rate"]) for result in results] == [
        ("first", 100), ("second", 100), ("first", 200), ("second", 200)
    ]  # fmt: skip
    assert all(result["completed"] == 3 for result in results)
    assert len(list(tmp_path.glob("*qps*.json"))) == 4
    svg = plot.read_text()
    assert all(text in svg for text in ("first", "second", "100/s", "200/s", "time between tokens"))


def test_each_rate_sends_prompts_that_no_earlier_rate_has_sent(
    address: str, engine: FakeEngine, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    few = ["--num-prompts", "3", "--num-warmups", "0", "--random-input-len", "20", "--random-output-len", "2"]
    flags = ["--tokenizer", str(tiny_tokenizer), "--disable-tqdm", *few, "--request-rate", "1000", "2000"]
    assert main(["--base-url", f"first={address}", f"second={address}", *flags]) == 0
    prompts = [tuple(token_ids) for token_ids, _, _ in engine.seen]
    assert len(prompts) == 12
    assert len(set(prompts)) == 6  # both servers get the same ones


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "1"], "no server names its model for http://127.0.0.1:1/v1/completions (Connection refused)"),
        (["--request-rate", "0"], "--request-rate must be greater than 0"),
        (["--request-rate", "1", "-1"], "--request-rate must be greater than 0, got -1"),
        (["--base-url", "http://a:1", "http://b:1"], "--base-url with several servers needs a label for each"),
        (["--request-rate", "1", "2", "--result-filename", "x.json"], "--result-filename names the file of one run"),
        (["--burstiness", "-1"], "--burstiness must be greater than 0"),
        (["--goodput", "itl:5"], "metrics are ttft, tpot, e2el"),
        (["--goodput", "ttft"], "is not METRIC:MILLISECONDS"),
        (["--percentile-metrics", "ttft,speed"], "not speed"),
        (["--metric-percentiles", "101"], "must be between 0 and 100"),
        (["--extra-body", "[1]"], "is not a JSON object"),
        (["--base-url", "ftp://x"], "is no HTTP address"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy linear or exponential"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "3", "--ramp-up-end-rps", "2"], "got 3.0 and 2.0"),
        (
            [
                "--ramp-up-strategy",
                "linear",
                "--ramp-up-start-rps",
                "1",
                "--ramp-up-end-rps",
                "2",
                "--request-rate",
                "2",
            ],
            "leave --request-rate out",
        ),
        (["--plot", "run.gif"], "must end with .svg, .png, .pdf"),
    ],
)
def test_what_cannot_be_done_is_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 1
    assert message in capsys.readouterr().err


def test_arrivals_keep_the_rate_and_the_burstiness() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    for burstiness in (0.5, 1.0, 4.0):
        times = np.array(arrival_times(4000, 20.0, burstiness, 1))
        gaps = np.diff(times)
        assert times[-1] == pytest.approx(4000 / 20)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrival_times(9, 5.0, 1.0, 3) == arrival_times(9, 5.0, 1.0, 3) != arrival_times(9, 5.0, 1.0, 4)


@pytest.mark.parametrize(("strategy", "half_way"), [("linear", 6.0), ("exponential", 20**0.5)])
def test_arrivals_grow_from_one_rate_to_another(strategy: str, half_way: float) -> None:
    ramp = Ramp(strategy, 2.0, 10.0)
    assert ramp.rates(3).tolist() == pytest.approx([2.0, half_way, 10.0])
    gaps = np.diff(arrival_times(40_000, math.inf, 1.0, 1, ramp))
    for begin, rate in ((0, 2.0), (19_500, half_way), (39_000, 10.0)):
        assert 1 / gaps[begin : begin + 1000].mean() == pytest.approx(rate, rel=0.15)


def dataset(tokenizer: ModelTokenizer, *flags: str, backend: str = "openai") -> list[BenchPrompt]:
    parser = FlagParser()
    add_dataset_args(parser)
    parser.set_defaults(seed=1, backend=backend)
    return sample_prompts(parser.parse_args(flags), tokenizer)


def test_custom_prompts_are_a_files(tiny_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer, file = read_tokenizer(str(tiny_tokenizer)), tmp_path / "data.jsonl"
    file.write_text('{"prompt": "One?", "output_tokens": 3}\n\n{"prompt": "Two?", "output_tokens": 4}\n')
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    flags = ["--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "3"]
    found = dataset(tokenizer, *flags, "--custom-output-len", "-1", "--skip-chat-template")
    assert [(prompt.text, prompt.num_output_tokens) for prompt in found] == [("One?", 3), ("Two?", 4), ("One?", 3)]
    templated = dataset(tokenizer, *flags, "--no-oversample")
    assert [(prompt.text, prompt.num_output_tokens) for prompt in templated] == [
        ("user: One?\nassistant:", 256), ("user: Two?\nassistant:", 256),
    ]  # fmt: skip
    assert templated[0].num_tokens == len(tokenizer.encode(templated[0].text, add_special_tokens=False))
    assert dataset(tokenizer, *flags, backend="openai-chat")[0].text == "One?", "the server has the template"
    file.write_text('{"prompt": "One\u2028more?"}\n', encoding="utf-8")  # which JSON may hold as it is
    assert dataset(tokenizer, *flags[:-1], "1", "--skip-chat-template")[0].text == "One\u2028more?"
    with pytest.raises(ConfigError, match="--custom-output-len must be at least 1, or -1"):
        dataset(tokenizer, *flags, "--custom-output-len", "0")
    for line in ("{", '{"text": "a"}', '"a"', '{"prompt": "a"}', '{"prompt": 5, "output_tokens": 1}'):
        file.write_text(line)
        with pytest.raises(ConfigError, match=r"line 1 is not \{\"prompt\""):
            dataset(tokenizer, *flags, "--custom-output-len", "-1")


def test_sonnets_share_their_first_lines_and_keep_their_length(tiny_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer, file = read_tokenizer(str(tiny_tokenizer)), tmp_path / "sonnet.txt"
    file.write_text("".join(f"{'word ' * (1 + number % 7)}{number}\n" for number in range(50)))
    flags = ["--dataset-name", "sonnet", "--dataset-path", str(file), "--num-prompts", "20"]
    found = dataset(tokenizer, *flags)
    assert found == dataset(tokenizer, *flags)
    assert all(450 < prompt.num_tokens <= 550 and prompt.num_output_tokens == 150 for prompt in found)
    texts = [prompt.text for prompt in found]
    assert len({text[:180] for text in texts}) == 1 and len({*texts}) == len({text[180:350] for text in texts}) == 20
    with pytest.raises(ConfigError, match=r"--sonnet-prefix-len must be between \d+, .* got 20"):
        dataset(tokenizer, *flags, "--sonnet-prefix-len", "20")
    with pytest.raises(ConfigError, match="--dataset-name sonnet needs --dataset-path"):
        dataset(tokenizer, "--dataset-name", "sonnet")


def test_prefixes_repeat() -> None:
    tokenizer = read_tokenizer(resolve("").tokenizer_path)
    flags = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "3",
             "--prefix-repetition-prefix-len", "30", "--prefix-repetition-suffix-len", "10"]  # fmt: skip
    found = dataset(tokenizer, *flags, "--num-prompts", "8")
    begins = [prompt.text[:40] for prompt in found]
    assert sorted(Counter(begins).values()) == [2, 3, 3] and len({prompt.text for prompt in found}) == 8
    assert begins != sorted(begins) and all(36 <= prompt.num_tokens <= 44 for prompt in found)
    with pytest.raises(ConfigError, match="--prefix-repetition-num-prefixes 3 needs as many --num-prompts, got 2"):
        dataset(tokenizer, *flags, "--num-prompts", "2")


def test_results_are_appended_and_a_server_is_waited_for(
    address: str, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def get_json(target: Target, path: str) -> Any:
        asked.append(path)
        if len(asked) < 4:
            raise OSError("not yet")
        return {"data": [{"id": "org/fake"}]}

    monkeypatch.setattr(Target, "get_json", get_json)
    monkeypatch.setattr(serve, "_READY_CHECK_S", 0.0)
    flags = ["--base-url", address, "--tokenizer", str(tiny_tokenizer), "--disable-tqdm", "--num-prompts", "1",
             "--random-input-len", "8", "--random-output-len", "2", "--save-result", "--append-result", "--result-dir",
             str(tmp_path), "--result-filename", "r.json"]  # fmt: skip
    assert main([*flags, "--ready-check-timeout-sec", "60"]) == 0
    assert len(asked) == 5
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "100"]
    assert main([*flags, *ramp]) == 0
    lines = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [line["completed"] for line in lines] == [1, 1]
    assert [line.get("ramp_up_end_rps") for line in lines] == [None, 100.0]


def test_a_key_that_is_missing_is_asked_for(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(engine, api_key=["secret"]) as url:
        assert main(["--base-url", url, "--disable-tqdm"]) == 1
    assert "needs an API key, or a different one: --api-key, or OCTAVO_API_KEY." in capsys.readouterr().err


def test_figures_are_those_of_the_requests_that_were_answered() -> None:
    answers = [
        RequestResult(0.0, 0.1, [0.02, 0.02], 0.14, "a", 10, 3),
        RequestResult(0.0, 0.3, [0.05, 0.05, 0.05, 0.05], 0.5, "b", 10, 5),
        RequestResult(0.0, 0.2, error="gone"),
    ]
    figures = summarize(answers, 2.0, percentiles=[50.0, 99.9], goodput_ms={"ttft": 200.0, "tpot": 60.0})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["total_output_tokens"] == 8
    assert figures["output_throughput"] == 4.0
    assert figures["request_goodput"] == 0.5  # the second was late
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx((20 + 50) / 2)
    assert figures["mean_itl_ms"] == pytest.approx((2 * 20 + 4 * 50) / 6)
    assert figures["p99.9_e2el_ms"] == pytest.approx(500, rel=0.01)
    assert figures["max_concurrent_requests"] == 2
    assert details(answers)["errors"] == ["", "", "gone"]


def test_random_prompts_have_their_lengths_and_are_those_of_the_seed(tiny_tokenizer: Path) -> None:
    tokenizer = read_tokenizer(str(tiny_tokenizer))
    prompts = random_prompts(tokenizer, 40, 50, 20, range_ratio=0.5, prefix_len=10, seed=1)
    assert prompts == random_prompts(tokenizer, 40, 50, 20, range_ratio=0.5, prefix_len=10, seed=1)
    assert all(10 <= prompt.num_output_tokens <= 30 for prompt in prompts)
    # Bytes that are no UTF-8 become longer text, so this tokenizer's lengths are only near.
    assert len({prompt.num_tokens for prompt in prompts}) > 10


def test_sharegpt_takes_first_turns_and_refuses_what_it_does_not_know(tiny_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer, file = read_tokenizer(str(tiny_tokenizer)), tmp_path / "data.json"
    short = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello to you"}]}
    file.write_text(json.dumps([*SHAREGPT, short, {"conversations": []}]))
    prompts = sharegpt_prompts(tokenizer, str(file), 7)
    assert {prompt.text for prompt in prompts} == {f"Question {i}?" for i in range(5)}
    assert {prompt.num_output_tokens for prompt in prompts} == {10 * (i + 1) for i in range(5)}
    assert [prompt.num_output_tokens for prompt in sharegpt_prompts(tokenizer, str(file), 2, output_len=9)] == [9, 9]
    for text in ("{", '{"a": 1}', "[1]", "[]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="--dataset-path"):
            sharegpt_prompts(tokenizer, str(file), 2)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_real_server_names_its_model_and_tokenizer(tmp_path: Path, backend: str) -> None:
    file = tmp_path / "result.json"
    with running_server(tmp_path, "--max-model-len", "256") as server:
        flags = ["--random-input-len", "30", "--random-output-len", "10", "--num-prompts", "12", "--ignore-eos"]
        load = ["--backend", backend, "--request-rate", "20", "--burstiness", "0.7"]
        assert main(["--base-url", server.url, *load, *flags, "--disable-tqdm", "--json", str(file)]) == 0
        server.wait_until_idle()
    figures = json.loads(file.read_text())
    assert (figures["model_id"], figures["completed"], figures["total_output_tokens"]) == (MODEL, 12, 120)
    template = 0 if backend == "openai" else 12 * 5
    assert figures["total_input_tokens"] >= 12 * 29 + template
    assert figures["duration"] >= 11 / 20
