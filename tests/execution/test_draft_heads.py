"""Heads of random weights change no answer, and guess what they would guess if they saw the whole sequence at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.engine.core import EngineCore
from octavo.execution.executor import LocalExecutor
from octavo.models.draft_heads import ChainHead
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.speculative.methods import make_speculation
from octavo.speculative.proposer import ToBeDrafted
from octavo.speculative.speculation import Speculation
from octavo.step_batch import GroupTables, StepBatch
from tests.execution.late_device import LateDevice
from tests.execution.test_draft_model import assert_same
from tests.execution.test_draft_tokens import guessed_requests
from tests.execution.test_runner import EOS, VOCAB, config_of, late_executor, requests, run

HIDDEN, INNER = 64, 96
SHAPE = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 128, "model_type": "llama",
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "rms_norm_eps": 1e-5,
}  # fmt: skip
NUM_OWN = 100  # tokens of EAGLE-3's vocabulary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A model that is deep enough for EAGLE-3."""
    folder = tmp_path_factory.mktemp("deep")
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 6, "eos_token_id": EOS}))
    for file in tiny_tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By method: a head in its published layout."""
    rng = np.random.default_rng(1)

    def layer(prefix: str, num_inputs: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}self_attn.q_proj.weight": (64, num_inputs * HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (32, num_inputs * HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (32, num_inputs * HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, 64), f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN), f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }  # fmt: skip

    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "eagle": layer("layers.0.", 1) | {"embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN)},
        "eagle3": layer("midlayer.", 2) | {
            "fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (NUM_OWN, HIDDEN),
            "midlayer.input_layernorm.weight": (HIDDEN,), "midlayer.hidden_norm.weight": (HIDDEN,),
        },
        "medusa": {
            name: shape
            for i in range(3)
            for name, shape in ((f"{i}.0.linear.weight", (HIDDEN, HIDDEN)), (f"{i}.0.linear.bias", (HIDDEN,)),
                                (f"{i}.1.weight", (VOCAB, HIDDEN)))
        },
    }  # fmt: skip
    own = {
        "eagle": {"num_hidden_layers": 1}, "eagle3": {
            "num_hidden_layers": 1, "draft_vocab_size": NUM_OWN,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        },
        "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 1},
    }  # fmt: skip
    folders = {}
    for method, tensors in shapes.items():
        folders[method] = folder = tmp_path_factory.mktemp(method)
        (folder / "config.json").write_text(json.dumps(SHAPE | own[method]))
        arrays = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in tensors.items()}
        if method == "eagle3":
            arrays |= {"d2t": np.arange(NUM_OWN) * 2, "t2d": np.zeros(VOCAB, bool)}
        save_file(arrays, folder / "model.safetensors")
    return folders


def settings(method: str, heads: dict[str, Path]) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "model": str(heads[method]), "num_speculative_tokens": 3}}


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
@pytest.mark.parametrize("place", ["cpu", "late device"])
def test_a_head_changes_no_answer(model: Path, heads: dict[str, Path], method: str, place: str) -> None:
    flags = {"num_gpu_blocks_override": 13, "preemption_mode": "swap" if method == "eagle" else "recompute"}
    expected = run(EngineCore(config_of(model, **flags)), guessed_requests(1), 1)
    config = config_of(model, **flags, **settings(method, heads))
    executor = None if place == "cpu" else late_executor(config, LateDevice(1))
    found = run(EngineCore(config, executor, Speculation(ToBeDrafted(96), 3)), guessed_requests(1), 1)
    assert_same(found, expected, place)


def test_heads_that_are_read_once_for_all_tokens_are_no_large_draft(
    model: Path, heads: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """They have more weights than the model, but fewer for each token."""
    worker = LocalExecutor(config_of(model, hf_overrides={"num_hidden_layers": 1}, **settings("medusa", heads))).worker
    assert worker._draft is not None
    assert 2 * worker._draft.num_weight_bytes > worker.weight_bytes and "choose a smaller one" not in caplog.text


def answer_of(core: EngineCore) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The prompt and answer of one request, and what was guessed by the place of the first guess."""
    guessed: dict[int, tuple[int, ...]] = {}
    submit = core.executor.submit

    def watched(plan: Any) -> Any:
        step: Any = submit(plan)
        [planned] = plan.rows
        if planned.draft_tokens:
            guessed[planned.num_computed + 1] = step._draft_tokens[planned.row]
        return step

    core.executor.submit = watched  # type: ignore[method-assign]
    tokens = [5 + i * 7 % 90 for i in range(31)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    core.add(EngineRequest("r", Prompt(list(tokens)), params, [EOS], 20, 0.0))
    while core.has_work:
        tokens += [token for output in core.step().outputs for token in output.token_ids]
    core.executor.submit = submit  # type: ignore[method-assign]
    return tokens, guessed


@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "call by call"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_guesses_are_those_of_the_whole_sequence(model: Path, heads: dict[str, Path], method: str, eager: bool) -> None:
    config = config_of(model, enforce_eager=eager, enable_prefix_caching=False, **settings(method, heads))
    core = EngineCore(config, None, Speculation(ToBeDrafted(96), 3))
    executor = core.executor
    assert isinstance(executor, LocalExecutor)
    tokens, guessed = answer_of(core)
    assert len(guessed) > 5
    runner = executor.worker.runner
    head: Any = executor.worker._draft.runner.model  # type: ignore[union-attr]
    assert isinstance(head, ChainHead)

    def batch(ids: list[int]) -> StepBatch:
        positions, blocks = np.arange(len(ids)), np.arange(-(-len(ids) // 8), dtype=np.int32)
        return StepBatch(
            token_ids=np.array(ids, np.int32), positions=positions,
            query_start_loc=np.array([0, len(ids)], np.int32), seq_lens=np.array([len(ids)], np.int32),
            sample_rows=positions, groups=(GroupTables(positions, blocks[None]),),
        )  # fmt: skip

    hidden: Any = runner.model.forward(batch(tokens), runner.submitter.caches)
    features: Any = head.features_of(
        hidden
        if (aux_hidden_states := runner.submitter.computation.aux_hidden_states) is None
        else aux_hidden_states.features
    )  # type: ignore[arg-type]
    head.features, head.rows = features[:-1], np.arange(len(tokens) - 1)
    own: Any = head.forward(batch(tokens[1:]), executor.worker._draft.runner.submitter.caches)  # type: ignore[union-attr]
    best: Any = head.logits(own)
    expected = np.asarray(best).argmax(1)
    if head.target_token_ids is not None:
        expected = head.target_token_ids[expected]
    assert {at: draft_tokens[0] for at, draft_tokens in guessed.items()} == {
        at: int(expected[at - 2]) for at in guessed
    }
    assert any(len(set(draft_tokens)) > 1 for draft_tokens in guessed.values())


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_a_head_guesses_on_a_device_that_runs_ahead_what_it_guesses_elsewhere(
    model: Path, heads: dict[str, Path], method: str
) -> None:
    config = config_of(model, **settings(method, heads))
    of_method = make_speculation(config.speculative, None, 96)
    expected = answer_of(EngineCore(config, None, of_method))
    of_method = make_speculation(config.speculative, None, 96)
    assert answer_of(EngineCore(config, late_executor(config, LateDevice(0)), of_method)) == expected


_EXPERTS = {
    "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
DEEPSEEK_MODULE = _EXPERTS | _LATENT | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
_INDEX = _LATENT | {"index_topk": 6, "index_n_heads": 4, "index_head_dim": 16}
_DELTA = {
    "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "shared_expert_intermediate_size": 40,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"},
        DEEPSEEK_MODULE,
        {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **_INDEX},
        {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "indexer_types": ["full", "shared"],
            **_INDEX,
        },
        {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **_DELTA},
    ],
    ids=[
        "keys and values",
        "latent attention",
        "an index of keys",
        "an index, where the last layer has none",
        "states beside keys and values",
    ],
)
def test_modules_of_multi_token_prediction_change_no_answer(
    tmp_path: Path, tiny_tokenizer: Path, settings: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | _EXPERTS | settings))
    for file in tiny_tokenizer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    expected = run(EngineCore(config_of(tmp_path)), requests(1, 6), 1)
    config = config_of(tmp_path, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    core = EngineCore(config, None, Speculation(ToBeDrafted(96), 2))
    assert_same(run(core, requests(1, 6), 1), expected, "cpu")
