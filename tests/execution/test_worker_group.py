"""Several workers of a model, each a process of its own, answer as one does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.config import EngineArgs, EngineConfig
from octavo.config.parallel_flags import check_parallel
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError
from octavo.execution import capacity
from octavo.execution.executor import MultiprocExecutor
from octavo.lora.adapter_files import source
from octavo.request import EngineRequest, SequenceOutput
from octavo.speculative.speculation import Speculation
from octavo.step_plan import StepPlan
from tests.execution.small_overrides import (
    BAMBA,
    BITNET,
    COHERE,
    CUT,
    DEEPSEEK,
    FALCON_H1,
    GEMMA_3N,
    GEMMA_4,
    JAMBA,
    LFM_2,
    MAMBA,
    MINICPM_3,
    MINIMAX,
    OLMO_2,
    QWEN_3_5,
    QWEN_3_NEXT,
    RECURRENT_GEMMA,
    ZAMBA,
    ZAMBA_2,
)
from tests.execution.test_draft_tokens import guessed_requests
from tests.execution.test_runner import VOCAB, config_of, model, requests, run, told
from tests.lora.random_adapters import TINY_SIZES, write_adapter_of
from tests.open_files import open_files

__all__ = ["model"]

Outputs = dict[tuple[str, int], list[SequenceOutput]]


@pytest.fixture
def start_of() -> Iterator[Callable[..., EngineCore]]:
    """Cores of several workers of models, which are ended."""
    worker_groups = []

    def start(folder: Path, speculation: Speculation | None = None, **flags: Any) -> EngineCore:
        executor = MultiprocExecutor(config_of(folder, **flags))
        worker_groups.append(executor.worker_group)
        return EngineCore(config_of(folder, **flags), executor, speculation)

    yield start
    for worker_group in worker_groups:
        worker_group.close()


@pytest.fixture
def start(start_of: Callable[..., EngineCore], model: Path) -> Callable[..., EngineCore]:
    return partial(start_of, model)


def assert_near(found: Outputs, expected: Outputs) -> None:
    """Sums of halves are rounded otherwise than whole ones."""
    assert found.keys() == expected.keys()
    for key, outputs in found.items():
        was, should_be = told(outputs), told(expected[key])
        assert was.pop("values") == pytest.approx(should_be.pop("values"), abs=2e-3)
        assert was == should_be


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, {}),
        (4, {"num_gpu_blocks_override": 16}),  # each head of keys is two workers'
        pytest.param(2, {"num_gpu_blocks_override": 16, "preemption_mode": "swap"}, marks=pytest.mark.long),
        pytest.param(2, {"enforce_eager": True}, marks=pytest.mark.long),
    ],
)
def test_answers_are_those_of_one_worker(
    model: Path, start: Callable[..., EngineCore], size: int, flags: dict[str, Any]
) -> None:
    """Every way of drawing tokens, forks, beams, log-probabilities of prompts, preemption and prefixes."""
    expected = run(EngineCore(config_of(model, **flags)), requests(1), 1)
    assert_near(run(start(tensor_parallel_size=size, **flags), requests(1), 1), expected)


INT8 = {"dtype": "bfloat16", "quantization": "int8", "precise_layers": 1}  # and others that are not


EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3,
           "moe_intermediate_size": 40, "decoder_sparse_step": 1, "norm_topk_prob": True}  # fmt: skip
SHARED_EXPERT = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 512, "n_shared_experts": 1, "first_k_dense_replace": 1,
                 "norm_topk_prob": True}  # fmt: skip
GEMMA = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 16,
         "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
         "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
GATED_EXPERT = {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 3,
                "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48,
                "decoder_sparse_step": 1}  # fmt: skip
TWELVE = {"num_attention_heads": 12, "num_key_value_heads": 3}
BIASES = {"architectures": ["Starcoder2ForCausalLM"], "use_bias": True, "hidden_act": "gelu_pytorch_tanh"}


@pytest.mark.parametrize(
    ("sizes", "flags", "overrides"),
    [
        ((4,), {**INT8, "num_gpu_blocks_override": 16}, CUT),
        ((2,), {"enable_expert_parallel": True}, CUT | EXPERTS),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ((2,), {"enable_expert_parallel": True}, CUT | DEEPSEEK),
                ((2,), {**INT8, "num_gpu_blocks_override": 60}, CUT | QWEN_3_5),
                ((2, 4, 8), {"num_gpu_blocks_override": 16, "preemption_mode": "swap"}, CUT),
                ((2, 4, 8), {"dtype": "bfloat16", "enforce_eager": True}, CUT),
                ((2, 4, 8), INT8, CUT),
                ((2, 4), {"dtype": "bfloat16", "quantization": "int4"}, CUT),
                ((2, 4), {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, CUT | GEMMA),
                ((2,), {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, CUT),
                ((2, 4), {}, CUT | BIASES),
                ((4, 8), {"dtype": "bfloat16", "enable_expert_parallel": True}, CUT | EXPERTS),
                ((2,), {**INT8, "enable_expert_parallel": True}, CUT | SHARED_EXPERT),
                ((3,), {}, {"num_attention_heads": 9, "num_key_value_heads": 3}),
                ((7,), {"dtype": "bfloat16"}, {"num_attention_heads": 7, "num_key_value_heads": 1,
                                               "intermediate_size": 140}),
                ((2, 4), {**INT8, "enable_expert_parallel": True}, CUT | DEEPSEEK),
                ((2, 4), {"dtype": "bfloat16", "num_gpu_blocks_override": 16, "preemption_mode": "swap"},
                 CUT | MINICPM_3),
                ((2, 4), {**INT8, "num_gpu_blocks_override": 60, "enable_expert_parallel": True}, CUT | JAMBA),
                ((2, 4), {"dtype": "bfloat16", "num_gpu_blocks_override": 60, "enable_expert_parallel": True},
                 CUT | MINIMAX),
                # States that are swapped, and the norm over a group of channels that two workers share.
                ((2, 4), {**INT8, "num_gpu_blocks_override": 24, "preemption_mode": "swap"}, CUT | BAMBA),
                *(((2, 4), {**INT8, "num_gpu_blocks_override": 60}, CUT | overrides)
                  for overrides in (FALCON_H1, MAMBA, LFM_2, RECURRENT_GEMMA)),
                *(((2, 4), {"dtype": "bfloat16", "num_gpu_blocks_override": 60}, CUT | overrides)
                  for overrides in (ZAMBA, ZAMBA_2, GEMMA_3N, GEMMA_4)),
                *(((2, 4), {"dtype": "bfloat16"} if overrides is COHERE else INT8, CUT | overrides)
                  for overrides in (OLMO_2, COHERE, BITNET)),
            ]
        ),
    ],
)  # fmt: skip
def test_bits_are_those_of_one_worker(
    model: Path,
    start: Callable[..., EngineCore],
    sizes: tuple[int, ...],
    flags: dict[str, Any],
    overrides: dict[str, Any],
) -> None:
    """Of all that is told, in whatever company: prompts in chunks, prefixes that were cached, and preemption."""
    flags = flags | {"hf_overrides": overrides, "reproducible_parallel": True}
    of_one = {name: value for name, value in flags.items() if name != "enable_expert_parallel"}
    expected = run(EngineCore(config_of(model, **of_one)), requests(1), 1)
    for size in sizes:
        core = start(tensor_parallel_size=size, **flags)
        found = run(core, requests(1), 2)
        assert isinstance(core.executor, MultiprocExecutor)
        core.executor.worker_group.close()
        assert found.keys() == expected.keys()
        for key, outputs in found.items():
            assert told_exactly(outputs) == told_exactly(expected[key]), (size, key)


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        pytest.param((1, 2), {"num_gpu_blocks_override": 16}, marks=pytest.mark.long),
        ((1, 2), {"num_gpu_blocks_override": 16, "preemption_mode": "swap", "pipeline_layer_partition": "3,1"}),
        pytest.param(
            (1, 2), {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, marks=pytest.mark.long
        ),
        pytest.param((1, 4), {"dtype": "bfloat16", "quantization": "int8"}, marks=pytest.mark.long),
        pytest.param((1, 3), {"dtype": "bfloat16", "enforce_eager": True}, marks=pytest.mark.long),
        pytest.param((2, 2), {"scheduling_policy": "deadline"}, marks=pytest.mark.long),
    ],
)
def test_stages_answer_as_one_worker(
    model: Path, start: Callable[..., EngineCore], sizes: tuple[int, int], flags: dict[str, Any]
) -> None:
    """The same bits, where each layer is one worker's."""
    flags = flags | {"hf_overrides": {"num_hidden_layers": 4, "tie_word_embeddings": "dtype" in flags}}
    expected = run(EngineCore(config_of(model, **without_partition(flags))), guessed_requests(1), 1)
    size, num_stages = sizes
    found = run(start(tensor_parallel_size=size, pipeline_parallel_size=num_stages, **flags), guessed_requests(1), 1)
    if size == 1:
        assert {key: told(outputs) for key, outputs in found.items()} == {
            key: told(outputs) for key, outputs in expected.items()
        }
    else:
        assert_near(found, expected)


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("flags", "overrides"),
    [
        ({"tensor_parallel_size": 2}, MIXTRAL),
        pytest.param({"tensor_parallel_size": 4, "num_gpu_blocks_override": 16}, MIXTRAL, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, MIXTRAL, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2, "quantization": "int8"}, MIXTRAL, marks=pytest.mark.long),
        *(
            pytest.param({"tensor_parallel_size": 2, **flags}, overrides, marks=pytest.mark.long)
            for flags, overrides in [
                ({}, GATED_EXPERT),
                ({"num_gpu_blocks_override": 60}, CUT | QWEN_3_NEXT),
                ({"pipeline_parallel_size": 2}, CUT | DEEPSEEK),
            ]
        ),
    ],
)  # fmt: skip
def test_workers_of_whole_experts_answer_as_one(
    model: Path, start: Callable[..., EngineCore], flags: dict[str, Any], overrides: dict[str, Any]
) -> None:
    common = {"hf_overrides": overrides} | {name: flags[name] for name in flags if "parallel" not in name}
    alone = EngineCore(config_of(model, **common))
    worker_group = start(enable_expert_parallel=True, **(common | flags))
    if flags == {"tensor_parallel_size": 2}:
        assert worker_group.executor.weight_bytes < 0.6 * alone.executor.weight_bytes
    assert_near(run(worker_group, requests(1), 1), run(alone, requests(1), 1))


def test_several_workers_say_where_their_bits_are_not_those_of_one(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And do not, where nothing was asked for or that was given up."""
    caplog.set_level("INFO", "octavo")
    config = partial(config_of, model, generation_config="none")
    config(tensor_parallel_size=2)
    config(tensor_parallel_size=3, hf_overrides=TWELVE, reproducible_parallel=False)
    assert not caplog.messages
    config(tensor_parallel_size=3, hf_overrides=TWELVE)
    assert caplog.messages == [
        "Answers of another --tensor-parallel-size can have other bits: the sizes for which sums are cut alike "
        "are 1, 2, 4."
    ]
    with pytest.raises(ConfigError, match="--reproducible-parallel is not built yet on GPUs"):
        check_parallel(EngineArgs(reproducible_parallel=True), "cuda")


def without_partition(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if name != "pipeline_layer_partition"}


def test_as_many_steps_are_under_way_as_there_are_stages(
    start: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its part of the sequences."""
    core = start(pipeline_parallel_size=2)
    plans, most = [], 0
    submit = core.executor.submit

    def counted(plan: StepPlan) -> Any:
        plans.append([row.row for row in plan.rows if row.is_decode])
        return submit(plan)

    monkeypatch.setattr(core.executor, "submit", counted)
    for request in requests(2, 4, ignore_eos=True):
        core.add(request)
    while core.has_work:
        core.step()
        most = max(most, len(core._in_flight))
    assert most == 1, "the one before has not been waited for when a step ends"
    assert any(len(one) == len(other) == 2 and not {*one} & {*other} for one, other in pairwise(plans))


def test_guesses_are_verified_by_all(model: Path, start: Callable[..., EngineCore]) -> None:
    flags: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    expected = run(EngineCore(config_of(model, **flags)), guessed_requests(1), 1)
    assert_near(run(start(tensor_parallel_size=2, **flags), guessed_requests(1), 1), expected)


@pytest.mark.long
def test_bits_are_the_same_in_every_run_and_company(start: Callable[..., EngineCore]) -> None:
    """In bfloat16 and integers, which round otherwise at the slightest difference."""
    flags: dict[str, Any] = {"tensor_parallel_size": 2, "dtype": "bfloat16", "quantization": "int8"}
    flags["hf_overrides"] = {"intermediate_size": 128}  # whole groups of 32 for each
    asked = requests(4, 12, logprobs=2)
    found = []
    for seed in (1, 2):
        core = start(**flags)
        found.append(run(core, asked, seed))
        assert isinstance(core.executor, MultiprocExecutor)
        core.executor.worker_group.close()  # a process has one team at a time
    alone = start(**flags, enable_prefix_caching=False)
    for request in asked:
        for key, outputs in run(alone, [request], 0).items():
            assert [told_exactly(of_run[key]) for of_run in found] == [told_exactly(outputs)] * 2
    with pytest.raises(ConfigError, match="close that first"):
        start(**flags)
    assert run(alone, asked[:1])


SIZES = TINY_SIZES | {"lm_head": (VOCAB, 64)}


def change_ends(folder: Path, rank: int, replaces: bool) -> None:
    """An adapter also changes the embedding, or replaces that and the output matrix."""
    tensors = load_file(folder / "adapter_model.safetensors")
    generator, name = np.random.default_rng(rank), "base_model.model.model.embed_tokens"
    if replaces:
        for half in "AB":
            del tensors[f"base_model.model.lm_head.lora_{half}.weight"]
        for module in (name, "base_model.model.lm_head"):
            tensors[f"{module}.weight"] = generator.standard_normal((VOCAB, 64), np.float32)
    else:
        tensors[f"{name}.lora_embedding_A"] = generator.standard_normal((rank, VOCAB), np.float32)
        tensors[f"{name}.lora_embedding_B"] = generator.standard_normal((64, rank), np.float32)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = "all-linear"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


FEW_ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}


def write_adapters(folder: Path) -> list[Path]:
    """Four, of every product, with magnitudes and biases; one with an embedding, one with new matrices at both ends."""
    folders = [write_adapter_of(folder / f"a{i}", i, 3 + i, SIZES, 0.05, magnitudes=i % 2 == 1) for i in range(4)]
    change_ends(folders[0], 3, replaces=False)
    change_ends(folders[2], 5, replaces=True)
    return folders


def adapted(asked: list[EngineRequest], folders: list[Path]) -> list[EngineRequest]:
    """With these adapters in turns, and then with none."""
    for i, request in enumerate(asked):
        turn = i % (len(folders) + 1)
        if turn < len(folders):
            request.adapter = source(folders[turn].name, str(folders[turn]))
            request.prompt = msgspec.structs.replace(request.prompt, adapter=request.adapter.identity)
    return asked


@pytest.mark.long
@pytest.mark.parametrize(("size", "num_stages", "is_tied"), [(2, 1, False), (1, 2, True), (4, 2, True)])
def test_each_worker_has_its_share_of_adapters(
    model: Path, start: Callable[..., EngineCore], tmp_path: Path, size: int, num_stages: int, is_tied: bool
) -> None:
    """Of every product, with ranks, magnitudes and biases, an adapted embedding, new matrices at both ends, more
    of them than there is memory for; one whose files are broken fails its own, and is served once they are mended."""
    flags: dict[str, Any] = FEW_ADAPTERS.copy()
    model_flags = {"hf_overrides": {"tie_word_embeddings": is_tied}}
    flags |= model_flags
    folders = write_adapters(tmp_path)
    config = folders[3] / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"r": 5}))

    def outputs(core: EngineCore) -> Outputs:
        return run(core, adapted(requests(1, 12), folders))

    alone = EngineCore(config_of(model, **flags))
    worker_group = start(tensor_parallel_size=size, pipeline_parallel_size=num_stages, **flags)
    expected, found = outputs(alone), outputs(worker_group)
    base = run(EngineCore(config_of(model, **model_flags)), requests(1, 12))
    assert [told(base[f"r{i}", 0]) == told(expected[f"r{i}", 0]) for i in range(5)] == [False] * 4 + [True]
    refused = {key for key, parts in expected.items() if parts[-1].error is not None}
    assert len(refused) == 2
    for key in refused:
        assert "has rank 6, and the configuration says 5" in str(found.pop(key)[-1].error)
        del expected[key]
    assert_near(found, expected)
    config.write_text(json.dumps(settings))
    assert_near(outputs(worker_group), outputs(alone))


def told_exactly(outputs: list[SequenceOutput]) -> tuple[list[int], list[list[float]]]:
    entries = [entry for output in outputs for entry in [*(output.logprobs or []), *(output.prompt_logprobs or [])]]
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, [list(entry.logprobs) for entry in entries if entry is not None]


def with_host_tier(config: EngineConfig, num_bytes: int) -> EngineConfig:
    return replace(config, cache=replace(config.cache, host_bytes=num_bytes))


def test_blocks_on_the_host_must_fit_its_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 4 << 30)
    config = config_of(model, preemption_mode="swap", swap_space=4.0)
    capacity.check_host_memory(config, 1 << 30, 1 << 30, 2)
    capacity.check_host_memory(config, 0, 8 << 30, 1)
    with pytest.raises(
        ConfigError,
        match=r"--swap-space 4 takes 1.00 GiB beside 1.50 GiB of KV cache in each of 2 workers, more than the 2.00 GiB",
    ):
        capacity.check_host_memory(config, 1 << 30, 3 << 29, 2)
    with pytest.raises(ConfigError, match=r"--kv-cache-host-gib 5 takes 5.00 GiB, more than the 4.00 GiB of free RAM;"):
        capacity.check_host_memory(with_host_tier(config_of(model), 5 << 30), 5 << 30, 0, 1)
    engine = with_host_tier(config_of(model, data_parallel_size=2), 10 << 30).replica(0)
    with pytest.raises(ConfigError, match=r"--kv-cache-host-gib 10 takes 5.00 GiB, more"):
        capacity.check_host_memory(engine, 5 << 30, 0, 1)


def test_workers_share_the_memory_of_the_host_tier(model: Path) -> None:
    config = with_host_tier(config_of(model, tensor_parallel_size=2, pipeline_parallel_size=2), 1 << 30)
    assert capacity.num_host_blocks(config, [1000, 100], [1 << 16, 1 << 16]) == [3723, 372]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tensor_parallel_size": 3}, "cannot share out 4 attention heads; these sizes could: 1, 2, 4"),
        (
            {"tensor_parallel_size": 2, "quantization": "int8"},
            "columns 0 to 48 of a INT8 matrix .* stored in groups of 32",
        ),
        ({"tensor_parallel_size": 2, "cpu_threads": 1}, "make 2; give each a thread"),
        ({"tensor_parallel_size": 0}, "must be greater than 0"),
        ({"enable_expert_parallel": True}, "workers of --tensor-parallel-size, which is 1"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "LlamaForCausalLM has no experts; leave it out"),
        ({"tensor_parallel_size": 2, "hf_overrides": MIXTRAL}, "does not cut the experts of .*; add --enable-expert"),
        (
            {
                "tensor_parallel_size": 4,
                "hf_overrides": MIXTRAL | {"num_local_experts": 3},
                "enable_expert_parallel": True,
            },
            "--tensor-parallel-size 4 is more than the 3 experts",
        ),
        (
            {"tensor_parallel_size": 3, "reproducible_parallel": True, "hf_overrides": TWELVE},
            "--tensor-parallel-size 3: the sizes for which sums are cut alike are 1, 2, 4; leave one",
        ),
        (
            {
                "tensor_parallel_size": 2,
                "reproducible_parallel": True,
                "quantization": "int8",
                "hf_overrides": {"intermediate_size": 128},
            },
            "size 2: the 32 inputs of .*layers.0.self_attn.o_proj that each worker has do not end with a block of 64",
        ),
        (
            {
                "tensor_parallel_size": 2,
                "reproducible_parallel": True,
                "enable_expert_parallel": True,
                "hf_overrides": GATED_EXPERT,
            },
            "--tensor-parallel-size 2: the shared expert of Qwen2MoeForCausalLM has a gate; leave one",
        ),
        (
            {"tensor_parallel_size": 2, "reproducible_parallel": True, "enable_lora": True},
            "not built yet with --enable-l",
        ),
        ({"pipeline_parallel_size": 3}, "--pipeline-parallel-size 3 is more than the model's 2 layers"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "2"}, "must be 2 numbers above 0 that add up to"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "1;1"}, "must be numbers with commas between"),
        ({"pipeline_layer_partition": "2"}, "one for each of the stages of --pipeline-parallel-size, which is 1"),
    ],
)
def test_what_cannot_be_shared_is_refused(model: Path, flags: dict[str, Any], message: str) -> None:
    before = open_files()
    with pytest.raises(ConfigError, match=message):
        MultiprocExecutor(config_of(model, **flags))
    assert open_files() <= before


def test_ray_without_stages_has_the_workers_of_this_host(
    start: Callable[..., EngineCore], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As guides type it: `--tensor-parallel-size 2 --distributed-executor-backend ray`. Ray need not be here."""
    caplog.set_level("INFO", logger="octavo")
    by_ray = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    assert config_of(model, **by_ray).nodes == config_of(model, tensor_parallel_size=2).nodes
    assert "all workers are on this host" in caplog.text
    assert_near(run(start(**by_ray), requests(1), 1), run(EngineCore(config_of(model)), requests(1), 1))
