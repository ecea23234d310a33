"""Models that transformers computes, with our attention, cache and products: the same logits, the native answers."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, masking_utils
from transformers.models.llama import modeling_llama

from octavo import LLM, SamplingParams
from octavo.config import EngineArgs
from octavo.errors import LoadError
from octavo.models.registry import build, describe
from octavo.ops import Ops
from tests.models.driving import ArrayWeights, all_logits
from tests.models.small_experts import ALL_MODELS
from tests.models.small_models import MIXED, MODEL_TYPES, MODELS, SIZES, VOCAB, SmallModel

LLAMA = MODELS["llama ratio 3, head 64, tied"]
# An embedding that is scaled, windows and caps; networks below the head's own; one key head for all; sinks; experts of
# transformers' own; latent attention, whose values are smaller than its keys.
NETWORKS = {name: MODELS[name] for name in ("gemma 2", "opt", "gpt bigcode", "granite swa")} | {
    "llama": LLAMA,
    "qwen2 moe": SmallModel(
        "Qwen2MoeForCausalLM",
        SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "shared_expert_intermediate_size": 32},
    ),
    "deepseek v3": SmallModel(
        "DeepseekV3ForCausalLM",
        SIZES | {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
                 "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
                 "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 8},
    ),
}  # fmt: skip
# What this path takes though it knows nothing of it: it is compared, so that what the description cannot show (keys of
# other layers, values smaller than keys, gates) is seen in the logits.
_SPARSE: dict[str, Any] = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "layer_types": MIXED * 2, "sliding_window": 20,
    "num_hidden_layers": 4,
}  # fmt: skip
_UNKNOWN = {
    "beam": SmallModel(
        "BeamForCausalLM",
        SIZES | _SPARSE | {"num_experts": 4, "n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"] * 2},
    ),
    "laguna": SmallModel(
        "LagunaForCausalLM", SIZES | _SPARSE | {"num_experts": 4, "shared_expert_intermediate_size": 32}
    ),
    "mimo 2 flash": SmallModel("MiMoV2FlashForCausalLM", SIZES | _SPARSE | {"n_routed_experts": 4, "v_head_dim": 8}),
    "minimax m3": SmallModel("MiniMaxM3VLForCausalLM", SIZES),
    "moshi": SmallModel("MoshiForCausalLM", SIZES),
    "phi 4 multimodal": SmallModel("Phi4MultimodalForCausalLM", SIZES),
    **{name: ALL_MODELS[name] for name in ALL_MODELS if name.startswith("gemma 4")},
}  # fmt: skip
NETWORKS |= _UNKNOWN


def config_of(architecture: str, **settings: Any) -> dict[str, Any]:
    config = AutoConfig.for_model(MODEL_TYPES[architecture], **settings)
    return json.loads(config.to_json_string()) | {"architectures": [architecture]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in _UNKNOWN else ()) for name in NETWORKS]
)
def test_logits_are_those_of_transformers_alone(name: str, ops: Ops) -> None:
    reference = NETWORKS[name].reference(seed=1)
    description = describe(json.loads(reference.config.to_json_string()), "transformers")
    state = reference.state_dict()
    if description.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    weights = ArrayWeights({key: tensor.numpy() for key, tensor in state.items()})
    model = build(description, weights, ops, 128, "float32")
    weights.check_all_taken()
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (1, 9, 33, 70)]
    for tokens, found in zip(sequences, all_logits(model, ops, sequences), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_engine_answers_as_it_does_natively(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """In chunks, together, and with preemption; alone with the same bits; and in weights of few bits."""
    LLAMA.save(LLAMA.reference(seed=2), tmp_path)
    prompts = [{"prompt_token_ids": torch.randint(3, VOCAB, (n,)).tolist()} for n in (1, 7, 33, 60)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    answers, scores = {}, {}
    for impl in ("octavo", "transformers"):
        for options in ({"dtype": "float32"}, {"dtype": "bfloat16", "quantization": "int8"}):
            llm = LLM(
                str(tmp_path), tokenizer=str(tiny_tokenizer), model_impl=impl, max_model_len=96, block_size=8,
                max_num_batched_tokens=40, num_gpu_blocks_override=13, check_invariants=True, **options,
            )  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            [alone] = llm.generate(prompts[2:3], params, use_tqdm=False)
            assert alone.outputs[0].token_ids == outputs[2].outputs[0].token_ids
            assert alone.outputs[0].cumulative_logprob == outputs[2].outputs[0].cumulative_logprob
            answers[impl, options["dtype"]] = [output.outputs[0].token_ids for output in outputs]
            measured = zip(outputs[3].prompt_logprobs[1:], outputs[3].prompt_token_ids[1:], strict=True)
            scores[impl, options["dtype"]] = [position[token].logprob for position, token in measured]
    assert answers["octavo", "float32"] == answers["transformers", "float32"]
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.3)):
        assert scores["transformers", dtype] == pytest.approx(scores["octavo", dtype], abs=tolerance)


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("BloomForCausalLM", {"n_layer": 2}, "2 layers, of which 0 call an attention"),
        ("FalconMambaForCausalLM", {"num_hidden_layers": 2}, "layers of the type linear_attention are more"),
        ("GPTJForCausalLM", {"n_layer": 2}, "cannot make GPTJForCausalLM with an exchanged attention"),
        ("DeepseekV4ForCausalLM", {}, "layers of the type compressed_sparse_attention"),
    ],
)
def test_networks_whose_attention_cannot_be_exchanged_are_refused(
    architecture: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LoadError, match=f"{architecture}.*cannot run through transformers: .*{reason}"):
        describe(config_of(architecture, **settings), "transformers")


def test_models_that_nobody_knows_are_refused() -> None:
    unknown = {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys", "vocab_size": 9}
    with pytest.raises(LoadError, match="NobodysForCausalLM is not built in Octavo itself, and cannot run through"):
        describe(unknown)
    with pytest.raises(LoadError, match="own Python code is run with --trust-remote-code"):
        describe(unknown | {"auto_map": {"AutoConfig": "a.B"}})
    with pytest.raises(LoadError, match="--model-impl transformers runs many more"):
        describe(unknown, "octavo")


def test_what_is_missing_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "octavo.models.transformers_model", raising=False)
    with pytest.raises(LoadError, match=r"NobodysForCausalLM is not built .* scripts/install transformers"):
        describe({"architectures": ["NobodysForCausalLM"]})


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
open({marker!r}, "w")
"""


def test_a_checkpoints_own_code_runs_only_if_that_is_allowed(
    tmp_path: Path, tiny_tokenizer: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "own", tmp_path / "ran"
    folder.mkdir()
    reference = LLAMA.reference(seed=3)
    LLAMA.save(reference, folder)
    path = folder / "config.json"
    own = {
        "model_type": "own", "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    args = {"tokenizer": str(tiny_tokenizer), "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 16}
    with pytest.raises(LoadError, match="run with --trust-remote-code"):
        EngineArgs(model=str(folder), **args).create_engine_config()
    assert not marker.exists()
    llm = LLM(str(folder), trust_remote_code=True, **args)
    assert marker.exists()
    assert f"Python code of {folder} runs" in caplog.text
    [output] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(temperature=0, max_tokens=1))
    with torch.no_grad():
        assert output.outputs[0].token_ids == [int(reference(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())]


def test_nothing_of_a_checkpoint_runs_where_octavo_itself_computes_the_model(
    tmp_path: Path, tiny_tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LLAMA.save(LLAMA.reference(seed=3), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoConfig": "absent.Config"}}))
    args = EngineArgs(model=str(tmp_path), tokenizer=str(tiny_tokenizer), trust_remote_code=True)
    assert args.create_engine_config().model.code_folder is None
    assert "Python code" not in caplog.text


def _to_the_left(batch: int, head: int, query: int, key: int) -> bool:
    return key <= query


@pytest.mark.parametrize(
    "change",
    [
        {"or_mask_function": _to_the_left}, {"and_mask_function": _to_the_left},
        {"block_sequence_ids": torch.zeros(1, 3, dtype=torch.long)}, "create_chunked_causal_mask",
    ],
    ids=lambda change: change if isinstance(change, str) else next(iter(change)),
)  # fmt: skip
def test_a_network_that_asks_for_another_mask_is_refused(
    change: dict[str, Any] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would leave the mask out, as it does not know the attention."""
    config = config_of("LlamaForCausalLM", num_hidden_layers=2)
    assert describe(config, "transformers").layers
    make = masking_utils.create_chunked_causal_mask
    if not isinstance(change, str):
        make = partial(masking_utils.create_causal_mask, **change)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", make)
    with pytest.raises(LoadError, match="it brings a mask of its own"):
        describe(config, "transformers")
