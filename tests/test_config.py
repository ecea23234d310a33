"""Flags and `EngineArgs` are one list; what cannot be honoured is refused, the rest becomes an `EngineConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.config import AsyncEngineArgs, EngineArgs, EngineConfig
from octavo.config.checks import check
from octavo.errors import ConfigError, LoadError
from octavo.execution.capacity import num_blocks
from octavo.flags import FlagParser
from octavo.kv_cache.groups import group_layers
from octavo.loading.overrides import longest_context, overridden
from octavo.models.registry import describe

# The engine flags that launch scripts for vLLM use.
FLAGS = (
    "--model", "--tokenizer", "--served-model-name", "--revision", "--download-dir", "--load-format", "--dtype",
    "--quantization", "--kv-cache-dtype", "--max-model-len", "--gpu-memory-utilization", "--block-size", "--swap-space",
    "--max-num-seqs", "--max-num-batched-tokens", "--enable-chunked-prefill", "--enable-prefix-caching",
    "--preemption-mode", "--scheduling-policy", "--enforce-eager", "--seed", "--trust-remote-code",
    "--disable-log-stats", "--device",
)  # fmt: skip


def parse(*args: str) -> EngineArgs:
    parser = FlagParser(exit_on_error=False)
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse_args(args))


def write_model(folder: Path, **config: Any) -> str:
    """A folder that `--load-format dummy` can serve."""
    (folder / "config.json").write_text(
        json.dumps({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 32,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
            **config,
        })
    )  # fmt: skip
    return str(folder)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr("octavo.config.checks.why_not_cuda", lambda: "no CUDA device was found")


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    """Keywords of a model that costs nothing to find."""
    return {"model": write_model(tmp_path), "load_format": "dummy"}


def config(**args: Any) -> EngineConfig:
    return EngineArgs(**args).create_engine_config()


def test_every_field_is_a_flag_with_help_and_the_same_default() -> None:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    assert set(actions) == {f.name for f in dataclasses.fields(EngineArgs)}
    for name, action in actions.items():
        assert "--" + name.replace("_", "-") in action.option_strings
        assert action.help
        assert action.help.endswith(".")
    assert parse() == EngineArgs()
    assert parser.format_help(), "percent signs in help texts are escaped"


def test_every_promised_flag_is_known() -> None:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert set(FLAGS) <= known


@pytest.mark.parametrize(("given", "target_step_s"), [("auto", None), ("0", 0.0), ("80", 0.08)])
def test_the_target_of_a_step_is_in_milliseconds(
    model: dict[str, Any], given: str, target_step_s: float | None
) -> None:
    target = parse("--target-step-time", given).target_step_time
    assert config(**model, target_step_time=target).scheduler.target_step_s == target_step_s
    assert config(**model, target_step_time="auto").scheduler.target_step_s is None


def test_flags_fill_fields_of_their_types() -> None:
    args = parse(
        "--model", "org/name", "--max-model-len", "1024", "--swap-space", "0.5", "--dtype", "float32", "--seed", "-3",
        "--served-model-name", "a", "b", "--served-model-name", "c", "--no-enable-prefix-caching", "--enforce-eager",
        "--preemption-mode", "swap", "--scheduling-policy", "priority",
    )  # fmt: skip
    assert args == EngineArgs(
        model="org/name", max_model_len=1024, swap_space=0.5, dtype="float32", seed=-3,
        served_model_name=["a", "b", "c"], enable_prefix_caching=False, enforce_eager=True, preemption_mode="swap",
        scheduling_policy="priority",
    )  # fmt: skip
    assert EngineArgs().served_model_name == [], "a list of one command line does not leak into the default"


@pytest.mark.parametrize("args", [("--dtype", "int4"), ("--block-size", "many"), ("--no-such-flag",)])
def test_command_lines_refuse_what_no_field_takes(args: tuple[str, ...]) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse(*args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dtype": "int4"}, "--dtype must be one of auto, float32, float16, bfloat16, half, float, got 'int4'"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy must be one of fcfs, priority"),
        ({"target_step_time": -1.0}, "--target-step-time must be 0 or more milliseconds, got -1"),
        ({"target_step_time": float("nan")}, "--target-step-time must be 0 or more milliseconds, got nan"),
        ({"target_step_time": "soon"}, "--target-step-time must be a number, got 'soon'"),
        ({"target_step_time": 50.0, "enable_chunked_prefill": False}, "--target-step-time cuts prompts, which --no-en"),
        ({"load_format": "onnx"}, "--load-format must be one of"),
        ({"max_model_len": 0}, "--max-model-len must be greater than 0, got 0"),
        ({"max_num_seqs": -1}, "--max-num-seqs must be greater than 0"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens must be greater than 0"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override must be greater than 0"),
        ({"max_num_seqs": "8"}, "--max-num-seqs must be an integer, got '8'"),
        ({"max_model_len": -2}, "--max-model-len must be greater than 0, got -2"),
        ({"max_model_len": "1.5K"}, "--max-model-len must be a number of tokens, .*; got '1.5K'"),
        ({"max_model_len": "many"}, "--max-model-len must be a number of tokens, .*; got 'many'"),
        ({"max_model_len": 4096}, "more than the model's 512 positions; --hf-overrides can"),
        ({"hf_overrides": "a"}, "--hf-overrides must be an object, got 'a'"),
        ({"hf_overrides": {"vocab_size.x": 1}}, "--hf-overrides vocab_size.x: vocab_size is 100 in the configuration"),
        ({"hf_overrides": lambda config: None}, "hf_overrides returned a NoneType"),
        ({"override_generation_config": {"num_beams": 2}}, "has num_beams, which nothing reads; temperature, .* are"),
        ({"max_num_seqs": True}, "--max-num-seqs must be an integer, got True"),
        ({"swap_space": "4"}, "--swap-space must be a number, got '4'"),
        ({"enforce_eager": 1}, "--enforce-eager must be true or false, got 1"),
        ({"served_model_name": [1]}, "--served-model-name must be a list of strings"),
        ({"block_size": 12}, "--block-size must be 8, 16 or 32 on CPUs, got 12"),
        ({"gpu_memory_utilization": 0.0}, r"--gpu-memory-utilization must be in \(0, 1\], got 0.0"),
        ({"cpu_memory_utilization": 1.1}, "--cpu-memory-utilization must be in"),
        ({"cpu_memory_utilization": float("nan")}, "--cpu-memory-utilization must be in"),
        ({"swap_space": -1.0}, "--swap-space must be 0 or more GiB"),
        ({"swap_space": float("nan")}, "--swap-space must be 0 or more GiB"),
        ({"swap_space": float("inf")}, "--swap-space must be 0 or more GiB"),
        ({"kv_cache_host_gib": -1.0}, "--kv-cache-host-gib must be 0 or more GiB"),
        ({"kv_cache_host_gib": 1.0}, "on CPUs the KV cache is in host memory already"),
        ({"preemption_mode": "swap", "swap_space": 0.0}, "--preemption-mode swap needs --swap-space above 0"),
        ({"device": "cuda"}, "--device cuda: no CUDA device was found.* Or use --device cpu"),
        ({"dtype": "float16"}, "--dtype float16 is not built for CPUs"),
        (
            {"kv_cache_dtype": "nvfp4"},
            "--kv-cache-dtype nvfp4 is not built yet; auto, int8, fp8, fp8_e4m3 and fp8_e5m2 are",
        ),
        ({"kv_cache_dtype": "float32", "dtype": "bfloat16"}, "floats of the cache must be the model's"),
        ({"quantization": "aqlm"}, "--quantization aqlm is not built yet on CPUs; int8, int4, gguf, gptq"),
        ({"quantization": "q4_k_m"}, "Leave it out, and name a GGUF file of Q4_K_M: FILE.gguf or org/name:Q4_K_M."),
        ({"quantization": "awq"}, "--quantization awq is for checkpoints quantized with awq, but .* has dummy weights"),
        ({"quantization": "gguf"}, "--quantization gguf is for GGUF files, but .* has dummy weights"),
        ({"max_model_len": 513}, "--max-model-len 513 is more than the model's 512 positions"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
            "--max-num-batched-tokens 100 is less than --max-model-len 512",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(
    model: dict[str, Any], args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        config(**(model | args))
    assert "\n" not in str(refused.value)


def test_flags_that_are_not_built_take_their_default_only(model: dict[str, Any]) -> None:
    unbuilt = [f for f in dataclasses.fields(EngineArgs) if not f.metadata["built"]]
    assert len(unbuilt) >= 4
    for f in unbuilt:
        flag = "--" + f.name.replace("_", "-")
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        check(EngineArgs(**{f.name: default}))
        asked = (
            True
            if isinstance(default, bool)
            else default + 1
            if isinstance(default, int)
            else ["x"]
            if default == []
            else "x"
        )
        with pytest.raises(ConfigError, match=f"{flag} .* is not built yet"):
            config(**model, **{f.name: asked})


def test_a_model_that_is_not_there_is_a_load_error() -> None:
    with pytest.raises(LoadError):
        config(model="./no/such/folder/anywhere")


def test_what_was_left_open_is_settled_from_the_model(model: dict[str, Any]) -> None:
    found = config(**model)
    assert (found.model.max_model_len, found.model.vocab_size, found.model.dtype) == (512, 100, "bfloat16")
    assert found.model.served_model_names == [model["model"]]
    assert (found.scheduler.max_num_seqs, found.scheduler.max_num_batched_tokens) == (256, 2048)
    assert (found.cache.block_size, found.cache.swap_space_bytes) == (16, 4 << 30)
    assert found.device == "cpu"
    assert found.log_stats


def test_what_was_asked_for_is_kept(model: dict[str, Any]) -> None:
    found = config(
        **model, max_model_len=100, served_model_name=["a", "b"], max_num_batched_tokens=64, swap_space=0.5,
        preemption_mode="swap", scheduling_policy="priority", seed=7, disable_log_stats=True, check_invariants=True,
        enable_prefix_caching=False, num_gpu_blocks_override=9, dtype="float32",
    )  # fmt: skip
    assert (found.model.max_model_len, found.model.served_model_names, found.model.seed) == (100, ["a", "b"], 7)
    assert found.model.dtype == "float32"
    assert (found.cache.swap_space_bytes, found.cache.num_blocks_override) == (1 << 29, 9)
    assert not found.cache.enable_prefix_caching
    scheduler = found.scheduler
    assert (scheduler.policy, scheduler.preemption_mode, scheduler.check_invariants) == ("priority", "swap", True)
    assert not found.log_stats


def test_one_served_name_may_be_a_string_and_a_whole_number_a_share(model: dict[str, Any]) -> None:
    found = config(**model, served_model_name="only", swap_space=2, cpu_memory_utilization=1)
    assert found.model.served_model_names == ["only"]
    assert found.cache.swap_space_bytes == 2 << 30


def test_none_is_the_default_of_every_flag() -> None:
    given = {one.name: None for one in dataclasses.fields(EngineArgs)}
    assert EngineArgs(**given) == EngineArgs()


def test_each_sequence_of_a_step_has_a_token_to_compute(model: dict[str, Any]) -> None:
    found = config(**model, max_num_batched_tokens=48, max_num_seqs=256)
    assert found.scheduler.max_num_seqs == 48


def test_without_chunked_prefill_a_step_holds_the_longest_prompt(tmp_path: Path) -> None:
    long = write_model(tmp_path, max_position_embeddings=5000)
    found = config(model=long, load_format="dummy", enable_chunked_prefill=False)
    assert found.scheduler.max_num_batched_tokens == 5000
    short = config(model=long, load_format="dummy", enable_chunked_prefill=False, max_model_len=100)
    assert short.scheduler.max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]
)
def test_auto_keeps_float32_models_in_float32(tmp_path: Path, stored: str, dtype: str) -> None:
    for name in ("dtype", "torch_dtype"):
        assert config(model=write_model(tmp_path, **{name: stored}), load_format="dummy").model.dtype == dtype


def test_sampling_defaults_come_from_the_model_unless_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "octavo.config.creation")
    folder = write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None, "eos_token_id": [1, 2]})
    )
    found = config(model=folder, load_format="dummy").model
    assert found.default_sampling_params == {"temperature": 0.6, "top_k": 20}
    assert found.checkpoint.eos_token_ids == (1, 2)
    assert not caplog.messages
    assert config(model=folder, load_format="dummy", generation_config="vllm").model.default_sampling_params == {}
    assert not caplog.messages, "who asks for none knows"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    config(model=folder, load_format="dummy")
    config(model=folder, load_format="dummy", override_generation_config={"max_new_tokens": 9})
    with_context, with_limit = (line for line in caplog.messages if "has no sampling defaults" in line)
    for said in ("without temperature gets 1", "--override-generation-config", "may fill the context"):
        assert said in with_context
    assert "context" not in with_limit
    (tmp_path / "generation_config.json").write_text('{"temperature": -1, "top_k": true}')
    with pytest.raises(
        ConfigError, match=r"the generation config of .*temperature .*--generation-config none leaves it out"
    ):
        config(model=folder, load_format="dummy")
    bert = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}
    assert config(model=write_model(tmp_path, **bert), load_format="dummy").model.default_sampling_params == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_position_embeddings": (1 << 31) - 1}, "says 2147483647 positions, more than the 1073741824"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e9}}, "positions, more than the 1073741824"),
    ],
)
def test_positions_that_no_sequence_has_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        config(model=write_model(tmp_path, **given), load_format="dummy")


def test_settings_of_the_configuration_may_be_overridden(model: dict[str, Any]) -> None:
    nested = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_parameters.rope_theta": 5e5}
    found = config(**model, hf_overrides=nested).model
    assert found.checkpoint.config["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert found.max_model_len == 1024

    def with_more_positions(given: dict[str, Any]) -> dict[str, Any]:
        assert given["vocab_size"] == 100
        return {**given, "max_position_embeddings": 2048}

    assert config(**model, hf_overrides=with_more_positions).model.max_model_len == 2048


@pytest.mark.parametrize("as_path", [False, True])
@pytest.mark.parametrize("by_type", [False, True])
@pytest.mark.parametrize("within", [(), ("text_config",)])
def test_an_overridden_rope_scaling_keeps_what_it_does_not_say_of_the_rotation(
    as_path: bool, by_type: bool, within: tuple[str, ...]
) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    given: dict[str, Any] = {
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding} if by_type else rope
    }
    scaling: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
    overrides: dict[str, Any] = {"rope_scaling": scaling}
    if as_path:
        overrides = {f"rope_scaling.{name}": value for name, value in scaling.items()}
        overrides = {".".join((*within, name)): value for name, value in overrides.items()}
    else:
        for name in within:
            overrides = {name: overrides}
    for name in within:
        given = {name: given}
    found = overridden(given, overrides)
    for name in within:
        found = found[name]
    scaled = {"rope_theta": 5e5, "partial_rotary_factor": 0.5, **scaling}
    whole = {"full_attention": scaled, "sliding_attention": sliding} if by_type else scaled
    assert found["rope_scaling"] == whole


def test_keys_of_config_json_that_nobody_reads_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config(model=write_model(tmp_path, atention_bias=True, scale=3), load_format="dummy")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records if "config.json" in record.msg] == [
        "atention_bias, scale are not read and change nothing"
    ]


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
    ],
)
def test_rope_scaling_lengthens_what_config_json_has_from_before(rope: dict[str, Any], length: int) -> None:
    assert longest_context({"rope_scaling": rope}, 512) == length
    assert longest_context({"rope_parameters": rope}, 512) == length


@pytest.mark.parametrize(
    ("text", "number"),
    [("64", 64), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2M", 1 << 21), ("auto", -1), ("-1", -1)],
)
def test_lengths_may_have_units(text: str, number: int) -> None:
    assert parse("--max-model-len", text).max_model_len == number
    assert EngineArgs(max_model_len=text).max_model_len == number


def test_objects_may_be_given_as_json_and_key_by_key() -> None:
    args = parse(
        "--hf-overrides", '{"rope_theta": 1e6, "a": {"b": 1}}', "--hf_overrides.rope_parameters.rope_type", "yarn",
        "--hf-overrides.a.c=[2]", "--override-generation-config.top_k=5",
    )  # fmt: skip
    assert args.hf_overrides == {"rope_theta": 1e6, "a": {"b": 1}, "rope_parameters.rope_type": "yarn", "a.c": [2]}
    assert args.override_generation_config == {"top_k": 5}
    assert overridden({"a": {"d": 3}}, args.hf_overrides)["a"] == {"d": 3, "b": 1, "c": [2]}
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse("--hf-overrides", "[1]")


def test_the_model_generates_as_the_overrides_say(tmp_path: Path) -> None:
    model = {"model": write_model(tmp_path), "load_format": "dummy"}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 3}')
    overrides = {"top_k": 5, "eos_token_id": [3, 4]}
    found = config(**model, override_generation_config=overrides).model
    assert found.default_sampling_params == {"temperature": 0.6, "top_k": 5}
    assert found.default_max_tokens is None
    assert config(**model, override_generation_config={"max_new_tokens": 7}).model.default_max_tokens == 7
    assert (
        config(**model, runner="pooling", override_generation_config={"max_new_tokens": 7}).model.default_max_tokens
        is None
    )
    with pytest.raises(ConfigError, match="max_new_tokens of the generation config must be 1 or more, got 0"):
        config(**model, override_generation_config={"max_new_tokens": 0})
    assert found.checkpoint.eos_token_ids == (3, 4)
    alone = config(**model, override_generation_config=overrides, generation_config="vllm").model
    assert alone.default_sampling_params == {"top_k": 5}


def test_a_config_crosses_processes_as_json(model: dict[str, Any]) -> None:
    found = config(**model, seed=2**62)
    assert msgspec.json.decode(msgspec.json.encode(found), type=EngineConfig) == found


def test_the_async_engine_takes_the_same_arguments() -> None:
    own = {"enable_log_requests": False, "disable_log_requests": True, "max_log_len": None}
    assert dataclasses.asdict(AsyncEngineArgs()) == dataclasses.asdict(EngineArgs()) | own


def test_threads_are_a_number_or_a_list_of_processors(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    args = ("--model", model, "--load-format", "dummy")
    config = parse(*args, "--cpu-threads-bind", "0-2, 5").create_engine_config()
    assert (config.cpu_threads, config.cpus) == (None, [0, 1, 2, 5])
    config = parse(*args, "--cpu-threads", "3").create_engine_config()
    assert (config.cpu_threads, config.cpus) == (3, None)
    for bad in (["--cpu-threads-bind", "0-"], ["--cpu-threads-bind", "1,1"], ["--cpu-threads-bind", "3-1"],
                ["--cpu-threads-bind", "0,1", "--cpu-threads", "3"], ["--cpu-threads", "0"]):  # fmt: skip
        with pytest.raises(ConfigError, match="--cpu-threads"):
            parse(*args, *bad).create_engine_config()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    monkeypatch.setattr("octavo.config.checks.why_not_cuda", lambda: None)


def test_a_gpu_is_taken_if_there_is_one_and_nothing_else_was_said(model: dict[str, Any], gpu: None) -> None:
    assert [config(device=device, **model).device for device in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


def test_blocks_of_a_gpu_go_to_the_disk_by_way_of_the_host(model: dict[str, Any], gpu: None) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-disk needs --kv-cache-host-gib on GPUs: "):
        config(device="cuda", kv_cache_disk="folder", **model)
    cache = config(device="cuda", kv_cache_disk="folder", kv_cache_host_gib=1.0, **model).cache
    assert cache.disk is not None and cache.host_bytes == 1 << 30


def test_an_index_of_keys_is_left_out_where_it_would_choose_all_and_refused_with_a_cache_of_eight_bits(
    tmp_path: Path, gpu: None
) -> None:
    sizes = {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 9, "num_nextn_predict_layers": 0, "index_topk": 48,
    }  # fmt: skip
    model: dict[str, Any] = {
        "model": write_model(tmp_path, architectures=["DeepseekV32ForCausalLM"], **sizes),
        "load_format": "dummy",
    }

    def num_chosen(**args: Any) -> tuple[int, int]:
        made = config(**model, **args).model
        return made.max_model_len, describe(made.checkpoint.config).num_chosen_keys

    for device in ("cpu", "cuda"):
        assert num_chosen(device=device) == (512, 48)
        assert num_chosen(device=device, max_model_len=49) == (49, 48)
        assert num_chosen(device=device, max_model_len=48) == (48, 0)
    assert num_chosen(device="cuda", max_model_len=48, kv_cache_dtype="fp8") == (48, 0)
    with pytest.raises(
        ConfigError, match=r"--kv-cache-dtype fp8 is not built yet .* 48 keys \(index_topk\) .* --max-model-len 48"
    ):
        config(device="cuda", max_model_len=49, kv_cache_dtype="fp8", **model)


def test_an_encoder_on_a_gpu_is_float16_and_has_room_for_two_steps(tmp_path: Path, gpu: None) -> None:
    """As vLLM has what is stored in float32, or was before there was anything else: tensor cores take no float32."""
    bert = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}
    for stored, types in {None: ("float16", "float32"), "float32": ("float16", "float32"),
                          "bfloat16": ("bfloat16", "bfloat16")}.items():  # fmt: skip
        folder = write_model(tmp_path, **bert, dtype=stored)
        on_gpu, on_cpu = (config(model=folder, load_format="dummy", device=device) for device in ("cuda", "cpu"))
        assert (on_gpu.model.dtype, on_cpu.model.dtype) == types
    assert config(model=folder, load_format="dummy", dtype="float32").model.dtype == "float32"
    groups = group_layers(describe(on_gpu.model.checkpoint.config, pooling=on_gpu.model.pooling).layer_caches)
    blocks = {made.device: num_blocks(made, groups, [1], 0, "") for made in (on_gpu, on_cpu)}
    step = 2048 // 16 + 256  # of as many tokens and sequences as there may be
    assert blocks == {"cuda": [2 * step + 1], "cpu": [step + 1]}


def test_a_gpu_has_types_and_sizes_of_its_own(model: dict[str, Any], gpu: None) -> None:
    made = config(dtype="float16", kv_cache_dtype="fp8", quantization="fp8", block_size=256, **model)
    assert (made.model.dtype, made.cache.dtype, made.model.quantization) == ("float16", "float8_e4m3fn", "fp8")
    assert config(kv_cache_dtype="fp8_e5m2", **model).cache.dtype == "float8_e5m2"
    assert config(dtype="bfloat16", **model).cache.dtype == "bfloat16"
    for args, message in [
        ({"block_size": 12}, "--block-size must be 8, 16, 32, 64, 128 or 256, got 12"),
        ({"quantization": "hqq"}, "--quantization hqq is not built yet; int8, int4, fp8, gguf, gptq"),
        ({"cpu_threads": 2}, "--cpu-threads is for CPUs, and the device is a GPU"),
        ({"cpu_threads_bind": "0"}, "--cpu-threads-bind is for CPUs"),
        ({"cpu_memory_utilization": 0.5}, "--cpu-memory-utilization is for CPUs"),
        ({"precise_layers": 2}, "--precise-layers is for CPUs"),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype int4 is not built yet; auto, int8"),
    ]:
        with pytest.raises(ConfigError, match=message):
            config(**(model | args))


def test_several_gpus_have_adapters(model: dict[str, Any], gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.config.parallel_flags.num_cuda_devices", lambda: 2)
    assert config(tensor_parallel_size=2, enable_lora=True, **model).lora is not None


def test_the_first_of_10_layers_is_precise_where_weights_have_few_bits(tmp_path: Path, model: dict[str, Any]) -> None:
    (tmp_path / "deep").mkdir()
    deep = {"model": write_model(tmp_path / "deep", num_hidden_layers=48), "load_format": "dummy"}
    assert config(**deep).model.num_precise_layers == 4
    assert config(**deep, quantization="int8", precise_layers=48).model.num_precise_layers == 48
    assert config(**model).model.num_precise_layers == 0
    for flags, message in [
        ({"precise_layers": 3, "quantization": "int8"}, "--precise-layers must be 0 to 2, the number of layers, got 3"),
        ({"precise_layers": 1}, "--precise-layers is for weights of few bits, and .* has floats throughout"),
        ({"precise_layers": 1, "quantization": "int8", "dtype": "float32"}, "has floats throughout"),
        (
            {"precise_layers": 1, "quantization": "int8", "model_impl": "transformers"},
            "not built yet with --model-impl",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            config(**(model | flags))
