"""A whole engine core on Triton's kernels: the answers of the CPU's engine, and of itself whatever is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from transformers import BambaConfig, DeepseekV32Config, LlamaConfig, PreTrainedConfig

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.execution.cuda_device import CudaDevice
from octavo.execution.device import Device
from octavo.execution.executor import LocalExecutor
from octavo.ops import cuda
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from tests.execution.late_device import LateDevice
from tests.ops.triton.conftest import DEVICE

VOCAB = 96


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "attention": LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES),
    "states and attention": BambaConfig(
        architectures=["BambaForCausalLM"], attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
        mamba_n_groups=1, mamba_d_state=8, mamba_expand=1, **SIZES,
    ),
    "chosen keys": DeepseekV32Config(
        architectures=["DeepseekV32ForCausalLM"], q_lora_rank=40, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=12, first_k_dense_replace=2, index_n_heads=3, index_head_dim=24, index_topk=8,
        **{name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 4},
    ),
}  # fmt: skip


pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=CONFIGS)
def config(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path
) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    CONFIGS[request.param].save_pretrained(folder)
    return EngineArgs(
        model=str(folder), tokenizer=str(tiny_tokenizer), load_format="dummy", seed=5, max_num_seqs=3,
        max_num_batched_tokens=16, num_gpu_blocks_override=24, block_size=8, device="cpu", check_invariants=True,
        reproducible_parallel=False,  # as GPUs have it
    ).create_engine_config()  # fmt: skip


def triton_executor(config: EngineConfig) -> LocalExecutor:
    device: Device = LateDevice(0) if DEVICE.type == "cpu" else CudaDevice()
    return LocalExecutor(config, device, cast(Any, cuda))


def triton_core(config: EngineConfig) -> EngineCore:
    return EngineCore(config, triton_executor(config))


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None
            found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return found


def request(name: str, prompt: list[int], **params: Any) -> EngineRequest:
    settings = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True} | params
    return EngineRequest(name, Prompt(prompt), SamplingParams(**settings), [2], settings["max_tokens"], 0.0)


def test_answers_are_those_of_the_cpu(config: EngineConfig) -> None:
    pytest.importorskip("octavo._cpu", reason="the CPU's kernels are not built", exc_type=ImportError)
    requests = [
        request("greedy", list(range(5, 26))),  # in two chunks
        request("sampled", [40, 41, 42], temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3),
        request("penalized", [7, 7, 8], repetition_penalty=1.3, presence_penalty=0.4, logprobs=2),
        request("forked", [50, 51], temperature=1.0, seed=9, n=2),
        request("biased", [60] * 9, logit_bias={5: 4.0}, bad_words_token_ids=[[6], [5, 5]]),
    ]
    assert run(triton_core(config), requests) == run(EngineCore(config), requests)
