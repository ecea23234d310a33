"""Workers that each have a device, as GPUs are, answer as one worker on the CPU does: their rows are exchanged by the
collectives of the CUDA backend, over gloo, and their devices are late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from octavo import LLM
from octavo.config import EngineArgs, EngineConfig, parallel_flags
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError, LoadError
from octavo.execution.executor import MultiprocExecutor
from octavo.execution.node import Node
from octavo.execution.stage_links import worker_ranks_of
from octavo.kv_cache import host_tier
from octavo.kv_cache.block_pool import BlockName
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from tests.distributed.test_nodes import Beside
from tests.execution.late_worker_group import late_followers
from tests.execution.small_overrides import BAMBA, CUT, DEEPSEEK, OLMO_2
from tests.execution.test_draft_tokens import guessed_requests
from tests.execution.test_host_blocks_on_disk import blocks_read, counted, on_host, reads_are_worth_it
from tests.execution.test_runner import EOS, config_of, model, requests, run
from tests.execution.test_stages import GEMMAS, ZAMBAS
from tests.execution.test_worker_group import EXPERTS, FEW_ADAPTERS, adapted, assert_near, told_exactly, write_adapters
from tests.execution.test_worker_group_ends import kill_amid_steps
from tests.kv_cache.test_host_tier import Cost
from tests.lora.random_adapters import TINY_SIZES, write_adapter_of
from tests.open_files import open_files
from tests.ports import held_port
from tests.waiting import within

__all__ = ["model", "reads_are_worth_it"]

ON_GPU = {"device": "cuda"}
# Triton's interpreter takes long for a step.
FEW: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "enforce_eager": True}
ONE_LAYER = {"num_hidden_layers": 1, "intermediate_size": 64}


def few_requests() -> list[EngineRequest]:
    """In chunks, beside each other; greedy and drawn."""
    params = [SamplingParams(temperature=t, seed=1, max_tokens=3, ignore_eos=True, logprobs=2) for t in (0.0, 1.0)]
    return [EngineRequest(f"r{i}", Prompt([5 + i] * (4 + 7 * i)), params[i], [EOS], 3, 0.0) for i in range(2)]


@pytest.fixture
def start(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineCore]]:
    """Cores of several workers, which are ended."""
    executors = []

    def start(ops: str = "reference", **flags: Any) -> EngineCore:
        late_followers(monkeypatch, ops=ops)
        config: EngineConfig = config_of(model, **ON_GPU, **flags)
        executor = MultiprocExecutor(config)
        executors.append(executor)
        return EngineCore(config, executor)

    yield start
    for executor in executors:
        executor.worker_group.close()
        assert all(process.wait(within(60)) is not None for process in executor.worker_group.processes)


def of_one_on_cpu(model: Path, **flags: Any) -> EngineCore:
    return EngineCore(config_of(model, reproducible_parallel=False, **flags))


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ((2, 1), {}),
        ((1, 2), {"num_gpu_blocks_override": 16, "preemption_mode": "swap"}),
        ((2, 1), {"num_gpu_blocks_override": 16, "preemption_mode": "swap"}),
        ((2, 1), {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        ((4, 1), {"enforce_eager": True}),
        ((2, 1), {"hf_overrides": CUT | DEEPSEEK, "enable_expert_parallel": True}),
        ((4, 1), {"hf_overrides": CUT | BAMBA, "num_gpu_blocks_override": 60, "enforce_eager": True}),
        ((4, 1), {"hf_overrides": CUT | OLMO_2}),
        ((1, 2), {"enforce_eager": True}),
        ((1, 2), {"hf_overrides": GEMMAS[0], "num_gpu_blocks_override": 60}),
        ((1, 2), {"hf_overrides": ZAMBAS[1], "num_gpu_blocks_override": 60, "enforce_eager": True}),
        ((2, 2), {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
)
def test_answers_are_those_of_one_worker(
    model: Path, start: Callable[..., EngineCore], sizes: tuple[int, int], flags: dict[str, Any]
) -> None:
    """One step ahead of the tokens where layers are shared, a step a stage where they are shared out."""
    alone = {name: value for name, value in flags.items() if name != "enable_expert_parallel"}
    expected = run(of_one_on_cpu(model, **alone), guessed_requests(1), 1)
    size, num_stages = sizes
    core = start(tensor_parallel_size=size, pipeline_parallel_size=num_stages, **flags)
    assert_near(run(core, guessed_requests(1), 1), expected)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_each_worker_keeps_its_part_of_a_block_on_its_host(
    model: Path, start: Callable[..., EngineCore], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, "_LOAD_S_PER_BYTE", 1.0)
    few, loaded = {"num_gpu_blocks_override": 13}, list[bytes]()
    core = start(tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], kv_cache_host_gib=0.01, **few)
    # Each part has a bus of its own: a block comes as fast as the largest part.
    tier, executor = core.scheduler.host_tier, core.executor
    assert tier is not None and executor.part_bytes[0] < executor.block_bytes[0]
    with monkeypatch.context() as changed:
        changed.setattr(tier, "_cost", Cost((executor.part_bytes[0] + executor.block_bytes[0]) / 2))
        assert tier._is_worth_it([(0, b"")], 0, 1)
    monkeypatch.setattr(host_tier, "_LOAD_S_PER_BYTE", 0.0)
    load = core.scheduler.cache.load_from_host
    monkeypatch.setattr(core.scheduler.cache, "load_from_host", lambda pool, key: (loaded.append(key), load(pool, key)))
    expected = run(of_one_on_cpu(model, **few), requests(1), 1)
    for _ in range(2):
        assert_near(run(core, requests(1), 1), expected)
    assert loaded


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "flags"),
    [((2, 1), {}), ((1, 2), {}), ((1, 2), {"hf_overrides": GEMMAS[0], "num_gpu_blocks_override": 60})],
)
def test_each_worker_has_its_part_of_a_block_from_disk(
    model: Path, start: Callable[..., EngineCore], tmp_path: Path, sizes: tuple[int, int], flags: dict[str, Any],
    reads_are_worth_it: None,
) -> None:  # fmt: skip
    expected = run(of_one_on_cpu(model, **flags), requests(1), 1)
    shape = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    kept, num_hits = dict[BlockName, bytes](), list[int]()
    for _ in range(2):
        core = start(kv_cache_host_gib=0.01, kv_cache_disk=str(tmp_path), **shape, **flags)
        executor, disk = core.executor, core.disk
        assert isinstance(executor, MultiprocExecutor) and disk is not None
        goes_on_while_it_waits(executor)
        total, read = counted(core), blocks_read(core)
        assert_near(run(core, requests(1), 1), expected)
        assert disk.save_all()
        found = on_host(core)
        assert all(found[name] == contents for name, contents in read.items()) and found.keys() >= read.keys()
        assert all(found[name] == contents for name, contents in kept.items() if name in read)
        kept, num_hits = found, [*num_hits, total.num_disk_hits]
        disk.close()
        executor.worker_group.close()
    assert num_hits[0] == 0 < num_hits[1]


def goes_on_while_it_waits(executor: MultiprocExecutor) -> None:
    """Have the first worker's device work while its host waits for blocks of the others, which wait for its rows."""
    read, device = executor.worker_group.read_blocks, executor.worker._device

    def read_blocks(pool: int, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        for stream in (device.compute, device.copies):
            stream.record().wait()
        return read(pool, blocks)

    executor.worker_group.read_blocks = read_blocks  # type: ignore[method-assign]


@pytest.mark.long
def test_engines_answer_likewise_each_on_devices_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of two workers each, whose processes see two of the four devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    late_followers(monkeypatch, num_devices=4)
    prompts: list[Any] = [{"prompt_token_ids": [5 + i] * (4 + 7 * i)} for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)

    def told(**flags: Any) -> list[Any]:
        config = config_of(model, **flags)
        with monkeypatch.context() as changed:
            changed.setattr(EngineArgs, "create_engine_config", lambda args: config)
            llm = LLM()
        with llm:
            answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            for core in psutil.Process().children():
                if core.children():
                    seen.append([one.environ().get("CUDA_VISIBLE_DEVICES") for one in (core, *core.children())])
        return [(one.token_ids, [x.logprob for of in one.logprobs or [] for x in of.values()]) for one in answers]

    seen: list[list[str | None]] = []
    expected = [(ids, pytest.approx(values, abs=1e-3)) for ids, values in told(reproducible_parallel=False)]
    assert told(**ON_GPU, data_parallel_size=2, tensor_parallel_size=2) == expected
    assert sorted(seen, key=str) == [["2,3"] * 2, [None] * 2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "overrides"), [({}, {}), ({"enable_expert_parallel": True}, EXPERTS | {"num_experts": 4})]
)
def test_kernels_of_gpus_answer_likewise(
    model: Path, start: Callable[..., EngineCore], flags: dict[str, Any], overrides: dict[str, Any]
) -> None:
    """Triton's, in its interpreter: products of shares, whole experts, sums over workers, columns of logits."""
    common = FEW | {"hf_overrides": ONE_LAYER | overrides}
    expected = run(of_one_on_cpu(model, **common), few_requests())
    assert_near(run(start("triton", tensor_parallel_size=2, **common, **flags), few_requests()), expected)


@pytest.mark.parametrize(
    ("size", "num_stages", "is_tied"), [(2, 1, False), (1, 2, True), pytest.param(2, 2, True, marks=pytest.mark.long)]
)
@pytest.mark.long
def test_each_device_has_its_share_of_adapters(
    model: Path, start: Callable[..., EngineCore], tmp_path: Path, size: int, num_stages: int, is_tied: bool
) -> None:
    """In pages, which all workers number alike, of more adapters than there is room for."""
    flags = FEW_ADAPTERS | {"hf_overrides": {"tie_word_embeddings": is_tied}, "lora_memory_gb": 0.0004}
    folders = write_adapters(tmp_path)
    expected = run(of_one_on_cpu(model, **flags), adapted(requests(1, 12), folders))
    core = start(tensor_parallel_size=size, pipeline_parallel_size=num_stages, **flags)
    assert_near(run(core, adapted(requests(1, 12), folders)), expected)
    assert core.adapters is not None
    assert 0 < len(core.adapters.pool.resident) < len(folders)
    core.adapters.pool.check([])


@pytest.mark.long
def test_workers_of_unequally_many_experts_agree_on_slots(
    model: Path, start: Callable[..., EngineCore], tmp_path: Path
) -> None:
    """A device's tables have a row for each slot and expert; the first worker, of the last stage, has no experts."""
    flags = FEW_ADAPTERS | {"hf_overrides": EXPERTS | {"mlp_only_layers": [1]}, "lora_memory_gb": 1.0}
    sizes = {name: size for name, size in TINY_SIZES.items() if "self_attn" in name}
    folders = [write_adapter_of(tmp_path / f"a{i}", i, 4, sizes, 0.05) for i in range(3)]
    expected = run(of_one_on_cpu(model, **flags), adapted(requests(1, 8), folders))
    core = start(pipeline_parallel_size=2, **flags)
    assert core.executor.adapter_memory.num_slots == 4096 // 8
    assert_near(run(core, adapted(requests(1, 8), folders)), expected)


@pytest.mark.long
def test_kernels_of_gpus_add_shares_of_adapters(model: Path, start: Callable[..., EngineCore], tmp_path: Path) -> None:
    """Triton's: factors of the inputs and outputs that a worker has."""
    flags = FEW | FEW_ADAPTERS | {"hf_overrides": {"num_hidden_layers": 1}, "lora_memory_gb": 0.01}
    folders = write_adapters(tmp_path)[1:3]
    expected = run(of_one_on_cpu(model, **flags), adapted(few_requests(), folders))
    found = run(start("triton", tensor_parallel_size=2, **flags), adapted(few_requests(), folders))
    assert_near(found, expected)


@pytest.mark.long
def test_bits_do_not_depend_on_company(start: Callable[..., EngineCore]) -> None:
    """Of Triton's kernels in bfloat16, where sums are rounded otherwise at the slightest difference."""
    flags: dict[str, Any] = FEW | {"dtype": "bfloat16", "hf_overrides": ONE_LAYER, "enable_prefix_caching": False}
    core = start("triton", tensor_parallel_size=2, **flags)
    together = run(core, few_requests())
    for request in few_requests():
        for key, outputs in run(core, [request], 1).items():
            assert told_exactly(together[key]) == told_exactly(outputs)


@pytest.mark.parametrize(
    ("flags", "victim"),
    [
        ({"tensor_parallel_size": 2}, 0),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1, marks=pytest.mark.long),
    ],
)
def test_a_worker_that_dies_ends_the_step_and_the_others(
    start: Callable[..., EngineCore], flags: dict[str, int], victim: int
) -> None:
    core = start(**flags)
    processes, told = kill_amid_steps(core, victim)
    with pytest.raises((RuntimeError, ConnectionError), match=r"Connection closed by peer|has ended"):
        run(core, [])
    core.executor.worker_group.close()  # type: ignore[attr-defined]
    statuses = [process.wait(within(60)) for process in processes]
    assert statuses.pop(victim) == -9
    assert all(status in (0, 1) for status in statuses), "gloo tells those that wait, too"
    assert any("ended with status -9" in message for message in told)


@pytest.mark.long
def test_what_a_worker_lacks_is_told_at_once(start: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody waits for rows of it."""
    monkeypatch.setenv("OCTAVO_TESTS_NO_DEVICE", "1")
    with pytest.raises(LoadError, match=r"worker 1 of 2 ended before it was ready"):
        start(tensor_parallel_size=2)


@pytest.mark.long
@pytest.mark.parametrize(("size", "num_stages"), [(1, 2), (2, 2), (1, 4)])
def test_nodes_with_devices_answer_as_one_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch, size: int, num_stages: int
) -> None:
    """Stages on two nodes, which here are one host: hidden states go from a device over TCP to the next."""
    late_followers(monkeypatch)
    layers, port = {"hf_overrides": {"num_hidden_layers": 4}}, held_port()
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages, "nnodes": 2, "master_port": port}
    own, others = (config_of(model, node_rank=rank, **ON_GPU, **sizes, **layers) for rank in (0, 1))
    node = Beside().submit(Node(others, 60).run)
    executor = MultiprocExecutor(own)
    try:
        found = run(EngineCore(own, executor), guessed_requests(1), 1)
    finally:
        executor.worker_group.close()
    node.result(within(60))
    assert_near(found, run(of_one_on_cpu(model, **layers), guessed_requests(1), 1))


def test_one_worker_of_each_node_compiles() -> None:
    for num_stages, size, num_nodes in ((1, 1, 1), (1, 4, 1), (4, 2, 1), (4, 2, 2), (6, 1, 3)):
        ranks = worker_ranks_of(num_stages, size, num_nodes)
        assert sorted(rank.node for rank in ranks if rank.compiles) == list(range(num_nodes))
        assert ranks[(num_stages - 1) * size].compiles, "the first worker does"
        assert sorted(stage for rank in ranks if rank.compiles for stage in rank.stages_of_node) == [*range(num_stages)]
        assert all(rank.stage in rank.stages_of_node for rank in ranks)


@pytest.mark.long
def test_a_step_without_memory_ends_the_team(start: Callable[..., EngineCore]) -> None:
    """Others wait for what was not computed, so that nothing can go on."""
    core = start(tensor_parallel_size=2)
    device: Any = core.executor.worker.runner.device  # type: ignore[attr-defined]
    device.memory_failures = 1.0
    core.add(requests(1, 1)[0])
    with pytest.raises(torch.OutOfMemoryError):
        core.step()


def test_ray_is_not_asked_for_stages_that_this_hosts_gpus_hold(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray need not be here."""
    late_followers(monkeypatch, num_devices=3)
    monkeypatch.setattr(parallel_flags, "check_ray_is_here", lambda flag: pytest.fail("somebody needs Ray"))
    stages: dict[str, Any] = {"pipeline_parallel_size": 2}
    by_ray = config_of(model, **ON_GPU, **stages, distributed_executor_backend="ray")
    assert by_ray.nodes == config_of(model, **ON_GPU, **stages).nodes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tensor_parallel_size": 4}, "4 times --pipeline-parallel-size 1 is 4 GPUs, one for each .* there are 3 here"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "2 times --pipeline-parallel-size 2 is 4 GPUs"),
        ({"tensor_parallel_size": 16}, "16 is more than the 8 GPUs that may share a layer"),
        ({"tensor_parallel_size": 2, "reproducible_parallel": True}, "--reproducible-parallel is not built yet on GPU"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, "times 2 engines of --data-parallel-size is 4 GPUs"),
        (
            {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_backend": "ray"},
            "--data-parallel-backend ray is not built yet with GPUs",
        ),
        ({"pipeline_parallel_size": 8, "nnodes": 2}, "8, over --nnodes 2, is 4 GPUs, one for each worker"),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray", "nnodes": 2},
            "ray with --pipeline-parallel-size reserves no GPUs on Ray's hosts yet",
        ),
        (
            {"pipeline_parallel_size": 4, "distributed_executor_backend": "ray"},
            "ask for no more than the 3 GPUs of this host",
        ),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "ray with --pipeline-parallel-size reserves no GPUs on Ray's hosts yet",
        ),
        ({"tensor_parallel_size": 2, "speculative_model": "other"}, "not built yet with a draft model on GPUs"),
        (
            {"tensor_parallel_size": 2, "speculative_config": {"method": "mtp"}},
            "-size 2 is not built yet with mtp, which reads the model's hidden states, on GPUs",
        ),
        ({"tensor_parallel_size": 3}, "cannot share out 4 attention heads; these sizes could: 1, 2, 4"),
    ],
)
def test_what_is_not_built_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], message: str
) -> None:
    late_followers(monkeypatch, num_devices=3)
    before = open_files()
    with pytest.raises(ConfigError, match=message):
        MultiprocExecutor(config_of(model, **ON_GPU, **flags))
    assert open_files() <= before
