"""`octavo bench throughput` and `octavo bench latency` with the default model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.bench.offline import latency, throughput
from tests.lora.random_adapters import write_random_adapter

SMALL = ["--max-model-len", "128", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64"]


@pytest.mark.long
def test_throughput_counts_what_went_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    flags = ["--input-len", "20", "--output-len", "6", "--num-prompts", "5", "--n", "2", "--output-json", str(file)]
    assert throughput([*flags, *SMALL]) == 0
    figures = json.loads(file.read_text())
    assert (figures["num_requests"], figures["num_output_tokens"]) == (5, 5 * 2 * 6)
    assert figures["num_prompt_tokens"] == pytest.approx(5 * 20, abs=5)
    assert figures["tokens_per_second"] == pytest.approx(figures["total_num_tokens"] / figures["elapsed_time"])
    assert "Throughput: " in capsys.readouterr().out


@pytest.mark.long
def test_throughput_of_the_asynchronous_engine_with_an_adapter(tmp_path: Path) -> None:
    file, adapter = tmp_path / "t.json", write_random_adapter(tmp_path / "adapter", 0)
    flags = ["--input-len", "8", "--output-len", "4", "--num-prompts", "3", "--n", "2", "--output-json", str(file)]
    asked = [*flags, *SMALL, "--async-engine", "--enable-lora", "--lora-path"]
    assert throughput([*asked, str(adapter)]) == 0
    figures = json.loads(file.read_text())
    assert (figures["num_requests"], figures["num_output_tokens"]) == (3, 3 * 2 * 4)


@pytest.mark.long
def test_throughput_reads_sharegpt(tmp_path: Path) -> None:
    data, file = tmp_path / "data.json", tmp_path / "t.json"
    turns = [{"from": "human", "value": "What is a page?"}, {"from": "gpt", "value": "One side of a leaf in a book."}]
    data.write_text(json.dumps([{"conversations": turns}]))
    assert throughput(["--dataset", str(data), "--num-prompts", "2", "--json", str(file), *SMALL]) == 0
    assert 2 * 5 < json.loads(file.read_text())["num_output_tokens"] < 2 * 15


@pytest.mark.long
def test_latency_measures_each_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "l.json"
    flags = [
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--batch-size",
        "3",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    ]
    assert latency([*flags, "--json", str(file), *SMALL]) == 0
    figures = json.loads(file.read_text())
    assert len(figures["latencies"]) == 4
    assert min(figures["latencies"]) <= figures["percentiles"]["50"] <= max(figures["latencies"])
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 4)
    assert "Avg latency: " in capsys.readouterr().out


@pytest.mark.long
def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert latency(["--input-len", "100", "--output-len", "29", *SMALL]) == 1
    assert "are more than the engine's 128" in capsys.readouterr().err
    assert throughput(["--dataset", "/nowhere.json", *SMALL]) == 1
    assert "--dataset-path /nowhere.json cannot be read" in capsys.readouterr().err
    assert throughput(["--lora-path", "/nowhere", *SMALL]) == 1
    assert "--lora-path needs --enable-lora" in capsys.readouterr().err
    adapter = ["--enable-lora", "--lora-path", "/nowhere", "--input-len", "8", "--output-len", "4"]
    for more in ([], ["--async-engine"]):
        assert throughput([*adapter, *more, *SMALL]) == 1
        assert "there is no adapter at /nowhere" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", ["throughput", "latency"])
def test_vllms_older_names_are_there(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"octavo.benchmark_{name}", "--help"], capture_output=True, text=True, check=True
    )
    assert "--input-len" in result.stdout
