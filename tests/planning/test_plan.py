"""`octavo plan`: its bytes are those that an engine takes, its times those of the same cost model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineArgs
from octavo.entrypoints.cli.main import main
from octavo.entrypoints.cli.plan import _FORMATS, _GPUS
from octavo.execution.executor import LocalExecutor
from octavo.models.registry import build, describe
from octavo.ops import load
from octavo.ops.triton.schedule import MACHINES, sum_exchanges
from octavo.planning.cache_sizes import cache_sizes
from octavo.planning.measured_steps import MeasuredStep, _part_of, fitted, measure_steps
from octavo.planning.serving_plan import SCHEMA_VERSION, PlanOptions, _gib, _speculation_note, as_text, make_plan
from octavo.planning.step_limits import GPUS, GpuSteps, Rates, StepLimits, model_work
from octavo.planning.weight_formats import AS_IS, FORMATS, packed_weight_bytes, weights_in
from octavo.speculative_config import DEFAULT
from octavo.step_cost import StepWork

_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "dtype": "bfloat16", "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "full": {"architectures": ["LlamaForCausalLM"]},
    "untied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "windows": {
        "architectures": ["Gemma3ForCausalLM"], "sliding_window": 32, "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    },
    "latent": {
        "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "rope_interleave": True,
    },
    "index": {
        "architectures": ["DeepseekV32ForCausalLM"], "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 4,
        "index_topk": 64, "index_n_heads": 4, "index_head_dim": 64,
    },
    "states": {
        "architectures": ["MambaForCausalLM"], "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 32,
        "use_conv_bias": False, "use_bias": False, "layer_norm_epsilon": 1e-5, "intermediate_size": 512,
    },
}  # fmt: skip


def folder_of(path: Path, name: str = "full") -> Path:
    """A model without weights."""
    (path / "config.json").write_text(json.dumps(_SIZES | _MODELS[name]))
    return path


def planned(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, Any], int]:
    code = main(["plan", str(path), "--json", *flags])
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan, code


@pytest.mark.parametrize(("flags", "says"), [((), True), (("--no-measure",), False), (("--gpu", "h100"), False)])
def test_a_command_that_measures_says_so_before(
    flags: tuple[str, ...], says: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shown = []

    def make_plan(*_: object) -> dict[str, Any]:
        shown.append(capsys.readouterr().err)
        return {"layout": {"fits": True}}

    monkeypatch.setattr("octavo.planning.serving_plan.make_plan", make_plan)
    assert main(["plan", str(folder_of(tmp_path)), "--json", *flags]) == 0
    assert shown == ["Measuring steps on this machine's processors ...\n" if says else ""]


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("stored", ["bf16", "int8"])
def test_bytes_are_those_that_an_engine_takes(
    name: str, stored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_tokenizer: Path
) -> None:
    folder = folder_of(tmp_path, name)
    plan, _ = planned(folder, capsys, "--format", stored, "--no-measure")
    args = EngineArgs(
        model=str(folder), tokenizer=str(tiny_tokenizer), device="cpu", load_format="dummy", max_num_seqs=4, seed=0,
        quantization=None if stored == "bf16" else stored, enforce_eager=True,
    )  # fmt: skip
    config = args.create_engine_config()
    executor = LocalExecutor(config)
    # Padding of routers and heads to whole panels is left out; of mixers of states the engine counts only matrices.
    rel = {"experts": 0.02, "latent": 0.02, "index": 0.02, "states": 0.05}.get(name, 0)
    assert plan["model"]["weight_bytes"] == pytest.approx(executor.weight_bytes, rel=rel, abs=0)
    description = describe(config.model.checkpoint.config)
    sizes = cache_sizes(config, description.layer_caches, config.cache.dtype, on_gpu=False)
    assert sizes.groups == executor.cache_groups
    taken = sum(n * size for n, size in zip(executor.num_blocks, sizes.block_bytes, strict=True))
    assert taken == executor.cache_bytes
    assert plan["cache"][0]["bytes_per_token"] == sizes.token_bytes
    assert (plan["cache"][0]["state_bytes_per_request"] > 0) == (name == "states")
    assert (sizes.later_token_bytes < sizes.token_bytes) == (name == "windows")


def test_the_default_model_takes_what_its_file_s_formats_are_packed_into() -> None:
    config = EngineArgs(device="cpu", num_gpu_blocks_override=600, max_num_seqs=4).create_engine_config()
    plan = make_plan(config, PlanOptions(measures=False))
    executor = LocalExecutor(config)
    assert plan["model"]["weight_bytes"] == executor.weight_bytes
    assert plan["cache"][0]["bytes_per_token"] * 600 * 16 == executor.cache_bytes
    assert plan["prefill"] == plan["decode"] == []


def test_the_note_on_draft_tokens_names_a_bound_only_where_there_is_one() -> None:
    assert "which the engine tries for up to 4 at once: text" in _speculation_note(DEFAULT)
    assert "which the engine tries: text" in _speculation_note(replace(DEFAULT, disable_by_batch_size=None))


@pytest.mark.long
def test_a_plan_has_this_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read it: another form is another schema_version."""
    plan, code = planned(
        folder_of(tmp_path), capsys, "--lengths", "64", "--batch-sizes", "1", "2", "--max-num-seqs", "2"
    )
    assert code == 0 and plan["schema_version"] == SCHEMA_VERSION == 1

    def form(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: form(part) for name, part in value.items()}
        return [form(value[0])] if isinstance(value, list) and value else type(value).__name__

    rate = {"seconds": "float", "tokens_per_s": "float", "limit": "str", "limit_seconds": "float"}
    assert form(plan) == {
        "schema_version": "int",
        "model": {
            "name": "str", "architecture": "str", "num_layers": "int", "num_parameters": "int", "max_model_len": "int",
            "dtype": "str", "format": "str", "held_in": "str", "weight_bytes": "int",
        },
        "device": {
            "kind": "str", "name": "str", "count": "int", "usable_bytes": "int", "bytes_per_s": "float",
            "operations_per_s": "float",
        },
        "weights": [
            {
                "format": "str", "bytes": "int", "bits_per_weight": "float", "fits_one_device": "bool",
                "fits_all_devices": "bool",
            }
        ],
        "cache": [
            {
                "dtype": "str", "bytes_per_token": "int", "bytes_per_token_beyond_windows": "int",
                "state_bytes_per_request": "int",
            }
        ],
        "layout": {
            "fits": "bool", "reason": "NoneType", "devices_per_replica": "int", "replicas": "int", "cache_bytes": "int",
        },
        "requests": [{"length": "int", "bytes": "int", "at_once": "int"}],
        "prefill": [{"prompt_tokens": "int", **rate}],
        "decode": [{"batch": "int", "context": "int", **rate}],
        "notes": ["str"],
    }  # fmt: skip
    assert [entry["batch"] for entry in plan["decode"]] == [1, 2]
    assert all(entry["seconds"] > 0 for entry in plan["prefill"] + plan["decode"])
    assert as_text(plan).count("tokens/s") == len(plan["prefill"]) + len(plan["decode"])


@pytest.mark.long
def test_what_does_not_fit_one_gpu_is_shared_or_refused_with_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(_SIZES | _MODELS["full"] | sizes))
    plan, code = planned(tmp_path, capsys, "--gpu", "h100", "--count", "8")
    assert code == 0 and plan["layout"]["devices_per_replica"] == 2 and plan["layout"]["replicas"] == 4
    assert plan["layout"]["reason"] is None
    assert plan["model"]["weight_bytes"] == pytest.approx(2 * 70.55e9, rel=1e-3)
    assert plan["decode"][0]["limit"] == "memory bandwidth (weights)"
    # Half of the model at 3.0 TB/s, and sums over two devices.
    assert plan["decode"][0]["seconds"] == pytest.approx(70e9 / 3.0e12, rel=0.15)
    plan, code = planned(tmp_path, capsys, "--gpu", "h100")
    assert code == 1 and not plan["layout"]["fits"] and "131." in plan["layout"]["reason"]
    assert "; take a smaller --format" in plan["layout"]["reason"]  # no length helps
    plan, code = planned(tmp_path, capsys, "--gpu", "h100", "--format", "int4")
    assert code == 0 and plan["layout"]["devices_per_replica"] == 1 and plan["layout"]["reason"] is None
    shown = {line.split()[0]: line for line in as_text(plan).splitlines() if " bits" in line}
    assert shown["bf16"].endswith("too large") and shown["int8"].endswith(" bits")


@pytest.mark.long
def test_a_plan_that_does_not_fit_names_a_length_that_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
             "max_position_embeddings": 131072}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(_SIZES | _MODELS["full"] | sizes))
    flags = ("--gpu", "h100", "--count", "2")
    plan, code = planned(tmp_path, capsys, *flags)
    found = re.search(r"lower --max-model-len to (\d+), or take", plan["layout"]["reason"])
    assert code == 1 and found is not None and 8192 < int(found[1]) < 131072
    bf16 = next(line for line in as_text(plan).splitlines() if line.strip().startswith("bf16"))
    assert bf16.endswith("more than one device")
    assert planned(tmp_path, capsys, *flags, "--max-model-len", str(int(1.02 * int(found[1]))))[1] == 1
    assert planned(tmp_path, capsys, *flags, "--max-model-len", found[1])[1] == 0


@pytest.mark.parametrize(
    ("flags", "mib"),
    [
        (["--kv-cache-host-gib", "8"], 3 * 64),
        (["--preemption-mode", "swap"], 3 * 64),
        (["--kv-cache-host-gib", "0.03125"], 3 * 32),  # all that the host has room for
        (["--kv-cache-host-gib", "0.03125", "--count", "8"], 3 * 4),  # of eight workers together
    ],
)
def test_buffers_of_blocks_that_move_to_host_memory_are_taken_off_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], mib: int
) -> None:
    folder = folder_of(tmp_path)
    without, _ = planned(folder, capsys, "--gpu", "h100")
    plan, _ = planned(folder, capsys, "--gpu", "h100", *flags)
    assert without["layout"]["cache_bytes"] - plan["layout"]["cache_bytes"] == mib << 20
    notes = [note for note in plan["notes"] if note not in without["notes"]]
    assert [note.split(" of each device")[0] for note in notes] == [_gib(mib << 20)]


@pytest.mark.parametrize(("settings", "like"), [
    ({"quant_method": "mxfp4"}, "int4"), ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
])  # fmt: skip
def test_formats_whose_files_are_not_here_are_taken_for_what_gpus_make_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], like: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_SIZES | _MODELS["full"] | {"quantization_config": settings}))
    plan, _ = planned(tmp_path, capsys, "--gpu", "h100")
    assert any(note.endswith(f"taken to be as large as {like}.") for note in plan["notes"])


def test_weights_fit_beside_the_buffers_of_blocks_that_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.planning.serving_plan._gpu_memory", lambda *_: 100 << 20)
    folder, fit = folder_of(tmp_path), []
    for flags in ([], ["--kv-cache-host-gib", "8"]):
        plan, _ = planned(folder, capsys, "--gpu", "h100", *flags)
        fit.append({(entry["fits_one_device"], entry["fits_all_devices"]) for entry in plan["weights"]})
    assert fit == [{(True, True)}, {(False, False)}]


def test_a_host_tier_is_refused_where_the_engine_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(folder_of(tmp_path))
    for flags, why in (
        (["--kv-cache-host-gib", "8"], "on CPUs the KV cache is in host memory already"),
        (["--kv-cache-host-gib", "-1", "--gpu", "h100"], "must be 0 or more GiB"),
    ):
        assert main(["plan", folder, *flags])
        assert why in capsys.readouterr().err


def test_sums_over_gpus_take_the_exchanges_that_the_collectives_make() -> None:
    few, many = 64 * 8192 * 4, 8192 * 8192 * 4  # bytes of rows in float32
    assert sum_exchanges(8192 * 4, 8) == (1, 7 * 8192 * 4)
    assert sum_exchanges(few, 2) == (1, few) and sum_exchanges(few, 8) == (2, 7 * few // 4)
    assert sum_exchanges(many, 2) == (1, many) and sum_exchanges(many, 8) == (2, 7 * many // 4)
    work = replace(model_work(describe(_SIZES | _MODELS["full"])), hidden_size=8192, num_layers=1)
    limits = StepLimits(work, (), 0, (0, 0))
    alone, shared = (
        GpuSteps(MACHINES["h100"], limits, n).limit(StepWork(num_tokens=8192, num_samples=0)).fixed_s for n in (1, 8)
    )
    assert shared - alone == pytest.approx(2 * (2 * 12e-6 + 7 * many / 4 / 370e9))


def test_a_format_is_computed_with_in_bfloat16_whatever_the_model_s_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_SIZES | _MODELS["full"] | {"dtype": "float32"}))
    own, floats, codes = (
        planned(tmp_path, capsys, "--format", f, "--no-measure")[0] for f in ("as-is", "bf16", "int8")
    )
    assert [plan["model"]["dtype"] for plan in (own, floats, codes)] == ["float32", "bfloat16", "bfloat16"]
    assert own["model"]["weight_bytes"] == 2 * floats["model"]["weight_bytes"]
    assert own["cache"][0]["bytes_per_token"] == 2 * codes["cache"][0]["bytes_per_token"]


def test_a_request_s_bytes_are_what_the_memory_is_divided_by() -> None:
    config = EngineArgs(device="cpu").create_engine_config()
    specs = describe(config.model.checkpoint.config).layer_caches
    sizes = cache_sizes(config, specs, "bfloat16", on_gpu=False)
    request = sizes.request_bytes(2048)
    assert request == 2048 * sizes.token_bytes
    assert [sizes.num_requests(2048, budget) for budget in (request - 1, request, 5 * request + 1, -1)] == [0, 1, 5, 0]
    assert sizes.block_bytes == cache_sizes(config, specs, "bfloat16", on_gpu=True).block_bytes
    # A pair of bfloat16 scales for each token and head, on either device.
    heads = 30 * 3
    assert cache_sizes(config, specs, "int8", on_gpu=False).token_bytes == heads * (2 * 64 + 4)
    assert cache_sizes(config, specs, "float8_e4m3fn", on_gpu=True).token_bytes == heads * (2 * 64 + 4)


def test_a_cache_of_latents_in_eight_bits_is_planned_for_gpus_as_their_kernels_allocate_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    from octavo.execution.block_mover import block_bytes
    from octavo.ops.triton.cache import allocate_kv_cache

    folder = folder_of(tmp_path, "latent")
    plan, _ = planned(folder, capsys, "--gpu", "h100", "--kv-cache-dtype", "fp8")
    a_token = block_bytes(allocate_kv_cache(1, 16, 1, 32, "float8_e4m3fn", 64)) // 16
    assert [entry["dtype"] for entry in plan["cache"]] == ["float8_e4m3fn", "bfloat16"]
    assert [entry["bytes_per_token"] for entry in plan["cache"]] == [4 * a_token, 4 * (32 + 64) * 2]
    plan, _ = planned(folder_of(tmp_path, "index"), capsys, "--gpu", "h100")
    assert [entry["dtype"] for entry in plan["cache"]] == ["bfloat16"], "scales of an index are not built"


def test_where_an_index_chooses_keys_all_of_its_own_are_held_and_read_and_of_the_others_the_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, "index")
    for flags in ((), ("--gpu", "h100")):
        plans = [
            planned(folder, capsys, "--no-measure", "--max-model-len", length, *flags)[0] for length in ("65", "64")
        ]
        with_index, without = (plan["cache"][0]["bytes_per_token"] for plan in plans)
        assert (with_index, without) == (4 * (64 + 32 + 64) * 2, 4 * (64 + 32) * 2)
    description = describe(_SIZES | _MODELS["index"])
    limits = StepLimits(model_work(description), description.layer_caches, 0, (with_index, with_index))
    rates = Rates(1.0, 1.0, 1.0)
    for num_rows, num_keys in ((1, 1000), (2, 1000), (1, 40)):
        step = StepWork.of([(0, num_keys, 1, 1, 1, ())] * num_rows)
        read = num_rows * (num_keys * (with_index - without) + min(num_keys, 64) * without)
        assert limits.of(step, rates).cache_s == pytest.approx(read)


def test_formats_of_mixtures_are_llama_cpp_s() -> None:
    description = describe(_SIZES | _MODELS["untied"] | {"num_hidden_layers": 8})
    formats = weights_in("q4_k_m", description)
    found = {layer: formats.stored_format(f"model.layers.{layer}.mlp.down_proj.weight") for layer in range(8)}
    assert [layer for layer in found if found[layer] == "Q6_K"] == [0, 3, 6, 7]
    assert formats.stored_format("model.layers.0.self_attn.q_proj.weight") == "Q4_K"
    assert formats.stored_format("lm_head.weight") == "Q6_K"
    sizes = [packed_weight_bytes(description, weights_in(name, description), "bfloat16")[0] for name in FORMATS]
    assert sizes[0] == max(sizes), "floats are the largest"


@pytest.mark.parametrize("name", ["q8_0", "q5_k_m", "q4_k_m", "q4_0"])
def test_mixtures_take_what_they_are_packed_into(name: str) -> None:
    """On CPUs superblocks keep the file's bits; on GPUs they are written out. Q4_0's output matrix is one in Q6_K."""
    description = describe(_SIZES | _MODELS["untied"] | {"num_hidden_layers": 8})
    weights = weights_in(name, description)
    packed = build(description, weights, load(1), 64, "bfloat16").num_weight_bytes()
    assert packed_weight_bytes(description, weights, "bfloat16")[0] == packed
    on_gpu = packed_weight_bytes(description, weights, "bfloat16", on_gpu=True)[0]
    assert on_gpu == packed if name == "q8_0" else on_gpu > packed


def test_the_command_names_the_formats_and_gpus_that_there_are() -> None:
    """It lists them itself, since importing them takes long."""
    assert (AS_IS, *FORMATS) == _FORMATS and set(_GPUS) == set(GPUS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--count", "2"], "--count is of GPUs"),
        (["--format", "fp8"], "--format fp8 is for GPUs"),
        (["--max-model-len", "100000"], "is more than the model's 256 positions"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder_of(tmp_path)), *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_fitted_cost_is_that_of_the_steps_that_were_measured() -> None:
    def seconds(work: StepWork) -> float:
        return 3e-3 + 4e-4 * work.num_tokens + 5e-5 * work.num_samples + 1e-7 * work.num_keys

    rows = [(1, 127, 1), (1, 1023, 1), (4, 255, 1), (16, 255, 1), (32, 127, 1), (1, 0, 64), (1, 0, 256), (1, 0, 512)]
    works = [StepWork.of([(0, done, count, 1, 1, ())] * num_rows) for num_rows, done, count in rows]
    model = fitted([MeasuredStep(work, seconds(work)) for work in works])
    between = StepWork.of([(0, 255, 1, 1, 1, ())] * 8)
    for work in (*works, between):
        assert model.seconds(work) == pytest.approx(seconds(work), rel=0.1)


def test_a_part_of_a_large_model_is_measured_and_multiplied_up() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    description = describe(_SIZES | _MODELS["full"] | sizes)
    part, layers, vocabulary = _part_of(description, weights_in("bf16", description), "bfloat16")
    assert len(part.layers) == 2 and layers == pytest.approx(8)
    assert part.vocab_size * vocabulary == description.vocab_size
    assert part.vocab_size * 2048 * 2 <= 64 << 20


@pytest.mark.long
def test_steps_of_every_kind_of_cache_can_be_measured() -> None:
    config = EngineArgs(device="cpu", max_model_len=256).create_engine_config()
    for name in ("windows", "experts", "latent", "states"):
        description = describe(_SIZES | _MODELS[name])
        cost = measure_steps(config, description, weights_in("int8", description), "bfloat16")
        assert cost.seconds(StepWork.of([(0, 255, 1, 1, 1, ())])) > 0, name


# Published decode steps: GPU, shape, sequences, tokens of context of each, milliseconds. Sources are in
# benchmarks/results/2026-11-23-plan.md.
_LLAMA_3_1_8B = (14336, 8, 128256)
_LLAMA_2_7B = (11008, 32, 32000)
_PUBLISHED = [
    ("h100", _LLAMA_3_1_8B, 1, 256, 6.48), ("h100", _LLAMA_3_1_8B, 4, 256, 6.59),
    ("a100-40gb", _LLAMA_3_1_8B, 1, 1088, 13.3), ("a100", _LLAMA_2_7B, 1, 192, 9.7),
    ("a100", _LLAMA_2_7B, 16, 1152, 18.0), ("a100", _LLAMA_2_7B, 32, 192, 12.0),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "shape", "batch", "context", "published_ms"), _PUBLISHED)
def test_steps_of_gpus_are_near_published_ones(
    gpu: str, shape: tuple[int, int, int], batch: int, context: int, published_ms: float
) -> None:
    from benchmarks.gpu_limits import LLAMA_3_1_8B

    size, num_kv_heads, vocabulary = shape
    changes = {"intermediate_size": size, "num_key_value_heads": num_kv_heads, "vocab_size": vocabulary}
    description = describe(LLAMA_3_1_8B | changes)
    work, bytes_per_token = model_work(description), 32 * 2 * num_kv_heads * 128 * 2
    step_limits = StepLimits(work, description.layer_caches, 2 * work.num_parameters, (bytes_per_token,) * 2)
    step = StepWork.of([(0, context, 1, 1, 1, ())] * batch)
    found_ms = GpuSteps(GPUS[gpu].machine, step_limits).seconds(step) * 1e3
    assert found_ms == pytest.approx(published_ms, rel=0.2)


@pytest.mark.parametrize("name", ["h100", "a100"])
def test_steps_of_gpus_are_those_of_the_model_of_tiles(name: str) -> None:
    from benchmarks.gpu_limits import LLAMA_3_1_8B, Limits

    description = describe(LLAMA_3_1_8B)
    limits, work = Limits(description, GPUS[name].machine), model_work(description)
    step_limits = StepLimits(work, description.layer_caches, 2 * work.num_parameters, (131072, 131072))
    steps = GpuSteps(GPUS[name].machine, step_limits)
    for batch in (1, 32, 64, 128, 256):
        step = StepWork.of([(0, 576, 1, 1, 1, ())] * batch)
        assert steps.seconds(step) == pytest.approx(limits.decode_step_s(batch, 576), rel=0.2), batch
    prompts = StepWork.of([(0, 0, 2048, 1, 1, ())] * 4)
    assert steps.seconds(prompts) == pytest.approx(limits.prefill_s(8192, 1024), rel=0.05)
    halves = replace(steps, num_devices=2)
    alone = StepWork.of([(0, 576, 1, 1, 1, ())])
    assert steps.seconds(alone) / 2 < halves.seconds(alone) < steps.seconds(alone)


def test_what_layers_share_is_held_once_and_read_for_each_of_them() -> None:
    types = ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"]
    config = {
        "architectures": ["Zamba2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "layers_block_type": types,
        "adapter_rank": 4, "use_shared_attention_adapter": True, "mamba_ngroups": 1, "n_mamba_heads": 2,
        "mamba_d_state": 8,
    }  # fmt: skip
    shared, each_its_own = (describe(config | {"num_mem_blocks": number}) for number in (1, 3))
    found, own = model_work(shared), model_work(each_its_own)
    assert found.num_parameters < own.num_parameters
    assert found.layer_parameters == own.layer_parameters
    assert found.read_share(1, 1) * found.num_parameters == pytest.approx(own.read_share(1, 1) * own.num_parameters)
    weights = weights_in("bf16", shared)
    held, read = (packed_weight_bytes(shared, weights, "bfloat16", with_repeated=r)[0] for r in (False, True))
    assert held < read == packed_weight_bytes(each_its_own, weights, "bfloat16")[0]
