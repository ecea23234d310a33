"""What cannot be served is refused in one clear line, without a traceback, before anything listens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.loading.checkpoint import resolve
from tests.e2e.server import serve


def write_config(folder: Path, **changes: object) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_truncated_gguf_file(tmp_path: Path) -> None:
    whole = Path(resolve("").path).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    status, error = serve(str(cut))
    assert status == 1
    assert "cut.gguf" in error
    assert len(error.strip().splitlines()) == 1


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_text("not a model at all")
    status, error = serve(str(other))
    assert status == 1
    assert len(error.strip().splitlines()) == 1


@pytest.mark.long
def test_an_unknown_architecture(tmp_path: Path, tiny_tokenizer: Path) -> None:
    folder = write_config(tmp_path, architectures=["RwkvForCausalLM"])
    status, error = serve(str(folder), "--load-format", "dummy", "--tokenizer", str(tiny_tokenizer))
    assert status == 1
    assert "RwkvForCausalLM" in error
    assert "octavo models" in error, "says where what is built is listed"


def test_a_model_that_does_not_fit_the_memory(tmp_path: Path, tiny_tokenizer: Path) -> None:
    folder = write_config(tmp_path, hidden_size=65536, intermediate_size=262144, num_hidden_layers=200)
    status, error = serve(str(folder), "--load-format", "dummy", "--tokenizer", str(tiny_tokenizer))
    assert status == 1
    assert error.count("GiB") >= 2, "says what is needed and what there is"


def test_a_cache_too_small_for_one_request() -> None:
    status, error = serve("--num-gpu-blocks-override", "8", "--max-model-len", "4096")
    assert status == 1
    assert "lower --max-model-len to at most 128" in error


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-scheduler-steps", "2"], "--num-scheduler-steps 2 is not built yet"),
        (["-tp", "2"], "--tensor-parallel-size 2 cannot share out 9 attention heads; these sizes could: 1, 3, 9"),
        (["--device", "cuda"], "--device cuda: no CUDA device was found"),
        (["--quantization", "hqq"], "--quantization hqq is not built yet"),
        (["--quantization", "awq"], "--quantization awq is for checkpoints quantized with awq"),
        (["--kv-cache-dtype", "int4"], "--kv-cache-dtype int4 is not built yet"),
        (["--block-size", "17"], "--block-size must be 8, 16 or 32"),
        (["--max-model-len", "100000000"], "more than the model's 8192 positions"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be greater than 0"),
        (["--lora-modules", "a=/path"], "--lora-modules needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a=/path"], "there is no adapter at /path"),
    ],
)
def test_flags_that_cannot_be_honoured(flags: list[str], said: str) -> None:
    status, error = serve(*flags, CUDA_VISIBLE_DEVICES="")
    assert status in (1, 2)
    assert said in error


@pytest.mark.parametrize("flags", [["--tensor-parallel-size", "2"], ["--max-queue-len", "-1"]])
def test_in_json_form_the_reason_is_a_line_of_json(flags: list[str]) -> None:
    status, error = serve("--log-format", "json", *flags)
    assert status == 1
    (line,) = [json.loads(line) for line in error.splitlines()]
    assert line["level"] == "CRITICAL"
    assert flags[0] in line["message"]


def test_no_network_and_no_cache_says_what_to_do(tmp_path: Path) -> None:
    status, error = serve(
        OCTAVO_CACHE=str(tmp_path), PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_NO_INDEX="1", PIP_RETRIES="0",
        PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="",
    )  # fmt: skip
    assert status == 1
    assert "--model" in error
