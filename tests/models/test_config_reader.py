"""Configurations: what they leave out has the default of the configuration class in `transformers`; what is not built
is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.errors import LoadError
from octavo.models.config_reader import _HEADS, _OWN_DEFAULTS, num_labels
from octavo.models.description import ModelDescription, check_numbers
from octavo.models.families import FAMILIES as ALL_FAMILIES
from octavo.models.families.dense import FAMILIES
from octavo.models.inventory import required_tensors
from octavo.models.multimodal_models import OTHER_NAMES
from octavo.models.registry import architectures, describe
from tests.models.small_models import MODEL_TYPES

SIZES = {
    "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 30, "num_attention_heads": 32,
}  # fmt: skip
# Which all classes take, whatever their defaults: heads of keys and values divide these, patterns have 24 layers.
COMMON_SIZES = SIZES | {"num_attention_heads": 160, "hidden_size": 2560, "num_hidden_layers": 24}


def described(architecture: str, **config: Any) -> ModelDescription:
    return describe(SIZES | config | {"architectures": [architecture]})


# What classes without a default, and without an "intermediate_size", call it.
OWN_NAMES = {"OPTForCausalLM": "ffn_dim", "XGLMForCausalLM": "ffn_dim", "CTRLLMHeadModel": "dff"}


def windows(description: ModelDescription) -> list[int]:
    return [layer.attention.window for layer in description.layers]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("given", [{}, {"use_sliding_window": True, "sliding_window": 7}], ids=["sizes only", "window"])
def test_what_is_left_out_is_the_configuration_classes_own_default(architecture: str, given: dict[str, Any]) -> None:
    given = COMMON_SIZES | given
    if architecture in OWN_NAMES:
        given[OWN_NAMES[architecture]] = given.pop("intermediate_size")
    config = AutoConfig.for_model(MODEL_TYPES[architecture], **given)
    assert described(architecture, **given) == describe(config.to_dict() | {"architectures": [architecture]})
    for tied in (True, False):
        assert described(architecture, **given, tie_word_embeddings=tied).tie_word_embeddings == tied


def test_every_architecture_of_the_table_is_known_to_transformers() -> None:
    assert set(FAMILIES) <= set(architectures())
    assert set(FAMILIES) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def test_every_row_of_defaults_is_that_of_an_architecture() -> None:
    assert set(_OWN_DEFAULTS) == {_HEADS.sub("", name) for name in ALL_FAMILIES}


def test_mistral_layers_have_the_window_that_layer_types_say() -> None:
    types = ["sliding_attention", "full_attention"] * 15
    assert windows(described("MistralForCausalLM", sliding_window=9)) == [9] * 30
    assert windows(described("MistralForCausalLM", sliding_window=9, layer_types=types)) == [9, 0] * 15
    assert windows(described("MistralForCausalLM", sliding_window=None)) == [0] * 30


def test_qwen_windows_begin_after_max_window_layers() -> None:
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        given = {"use_sliding_window": True, "sliding_window": 9}
        assert windows(described(architecture, **given)) == [0] * 28 + [9] * 2
        assert windows(described(architecture, **given, max_window_layers=0)) == [9] * 30
        assert windows(described(architecture, sliding_window=9, max_window_layers=0)) == [0] * 30


def test_smollm3_windows_are_on_the_layers_that_do_not_rotate() -> None:
    description = described("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=9)
    rotates = [layer.attention.rope is not None for layer in description.layers]
    assert rotates[:8] == [True, True, True, False] * 2
    assert windows(description) == [0 if flag else 9 for flag in rotates]


def test_theta_comes_from_wherever_a_version_of_transformers_has_written_it() -> None:
    for given in ({"rope_theta": 5.0}, {"rope_parameters": {"rope_theta": 5.0}}):
        for architecture in ("LlamaForCausalLM", "GraniteSWAForCausalLM"):
            rope = described(architecture, **given).layers[0].attention.rope
            assert rope is not None
            assert rope.theta == 5.0


def test_queries_grow_as_the_form_says_that_counts() -> None:
    said = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for beta in (None, 0.5):
        for name in ("rope_scaling", "rope_parameters"):
            given = {name: said if beta is None else said | {"llama_4_scaling_beta": beta}}
            growth = described("Ministral3ForCausalLM", **given).layers[0].attention.attention_temperature
            assert (None if growth is None else growth.rate) == beta


def test_olmo_hybrids_attention_does_not_rotate_where_its_base_is_null() -> None:
    given: dict[str, Any]
    for given, theta in (
        ({}, 1e4), ({"rope_theta": 5.0}, 5.0), ({"rope_parameters": {"rope_theta": 5.0}}, 5.0),
        ({"rope_parameters": {"rope_theta": None}}, None),
    ):  # fmt: skip
        rope = described("OlmoHybridForCausalLM", **given).layers[3].attention.rope
        assert (None if rope is None else rope.theta) == theta


def test_a_share_of_a_head_that_rotates_counts_before_how_many_elements_do() -> None:
    given: dict[str, Any] = {"head_dim": 16, "rotary_dim": 12}
    for rope, size in ({"rope_theta": 5.0}, 12), ({"rope_theta": 5.0, "partial_rotary_factor": 0.5}, 8):
        description = described("MiniMaxM2ForCausalLM", **given, rope_parameters=rope)
        assert description.layers[0].attention.rope.rotary_dim == size


def test_nomic_berts_own_files_name_the_activation_with_its_gate() -> None:
    for given, activation in (
        ({}, "silu"), ({"activation_function": "swiglu"}, "silu"), ({"activation_function": "geglu"}, "gelu"),
        ({"hidden_act": "gelu"}, "gelu"),
    ):  # fmt: skip
        assert described("NomicBertModel", **given).layers[0].feed_forward.activation == activation


def ropes(description: ModelDescription) -> list[tuple[float, str] | None]:
    """Theta and kind of each layer."""
    found = [layer.attention.rope for layer in description.layers]
    return [None if rope is None else (rope.theta, rope.kind) for rope in found]


def test_layer_types_may_have_rotations_of_their_own_in_old_and_new_form() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear}
    new = {
        "rope_parameters": {"full_attention": linear | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    }
    for given in (old, new):
        description = described("Gemma3ForCausalLM", **given)
        assert ropes(description) == ([(1e4, "default")] * 5 + [(1e6, "linear")]) * 5
        assert windows(description) == ([4096] * 5 + [0]) * 5


def test_layers_that_do_not_rotate() -> None:
    for architecture in ("Cohere2ForCausalLM", "Exaone4ForCausalLM"):
        description = described(architecture)
        assert [rope is None for rope in ropes(description)] == [window == 0 for window in windows(description)]
    assert None not in ropes(described("Exaone4ForCausalLM", sliding_window=None))
    assert ropes(described("BloomForCausalLM")) == [None] * 30


def test_sizes_have_the_names_of_each_configuration_class() -> None:
    sizes = {"vocab_size": 128, "n_embd": 96, "n_layer": 3, "n_head": 4, "n_inner": 50, "n_positions": 70}
    description = describe(sizes | {"architectures": ["GPT2LMHeadModel"]})
    assert (description.hidden_size, len(description.layers), description.max_position_embeddings) == (96, 3, 70)
    layer = description.layers[0]
    assert (layer.attention.num_heads, layer.attention.head_size) == (4, 24)
    assert layer.feed_forward.intermediate_size == 50
    assert (
        describe(sizes | {"n_inner": None, "architectures": ["GPT2LMHeadModel"]})
        .layers[0]
        .feed_forward.intermediate_size
        == 384
    )


@pytest.mark.parametrize(
    ("architecture", "given", "message"),
    [
        ("NoSuchForCausalLM", {}, "architecture NoSuchForCausalLM is not built in Octavo itself, and cannot run"),
        (
            "LlamaForCausalLM",
            {"hidden_act": "gelu_10"},
            "LlamaForCausalLM: activation 'gelu_10' in a gated feed-forward",
        ),
        ("LlamaForCausalLM", {"num_key_value_heads": 5}, "32 query heads do not divide into 5 key/value heads"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "ntk"}}, "rope scaling 'ntk' is not built yet"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 30 layers"),
        ("MistralForCausalLM", {"layer_types": ["mamba"] * 30}, "layer type 'mamba' is not built yet"),
        ("ZambaForCausalLM", {"layers_block_type": ["hybrid"]}, "layer_types has 1 entries for 30 layers"),
        ("GPTNeoForCausalLM", {"attention_types": [[["global"], 2]]}, "a list of the model's configuration has fewer"),
        ("NemotronHForCausalLM", {}, "a list of the model's configuration has fewer entries than there are layers"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su"}}, "short_factor of longrope must have 1 numbers"),
        ("MptForCausalLM", {"logit_scale": 0.5}, "logit_scale = 0.5 is not built"),
        ("NomicBertModel", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor = 2.0 is not built"),
        ("MambaForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu' before a state is not built yet"),
        (
            "NemotronHForCausalLM",
            {"mamba_hidden_act": "gelu", "hybrid_override_pattern": "M" * 30},
            "mamba_hidden_act = 'gelu' before a state is not built",
        ),
        ("ZambaForCausalLM", {"hidden_mamba_act": "gelu"}, "mamba_hidden_act = 'gelu' before a state is not built"),
        ("OlmoHybridForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu' before a state is not built yet"),
        ("KimiLinearForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu' before a state is not built yet"),
        ("FalconH1ForCausalLM", {"mamba_proj_bias": True, "ssm_in_multiplier": 0.5}, "mamba_proj_bias with an ssm_in"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not built"),
    ],
)
def test_what_is_not_built_is_refused_by_name(architecture: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        described(architecture, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size = '64' is not a whole number"),
        ({"hidden_size": 64.5}, "hidden_size = 64.5 is not a whole number"),
        ({"hidden_size": True}, "hidden_size = True is not a whole number"),
        ({"hidden_size": -64}, "hidden_size = -64 is not a number from 1 to"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is not a number from 1 to 8192"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 is not a number from 1 to"),
        ({"n_heads": {}, "num_attention_heads": None}, "num_attention_heads = {} is not a whole number"),
        ({"num_key_value_heads": -1}, "num_key_value_heads = -1 is not a number from 0 to"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings = 1099511627776 is not a number from 1 to"),
        ({"rms_norm_eps": "1e-5"}, "norm_eps = 1e-5 is not a number"),
        ({"rms_norm_eps": {"__float__": "Infinity"}}, "norm_eps = {'__float__': 'Infinity'} is not a number"),
        ({"rope_scaling": "linear"}, "rope_scaling = linear is not an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "of the model's configuration, or a setting"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "above 0, got .*, -2.0 and"),
        ({"rope_theta": 0.0, "rope_parameters": {"rope_theta": -1}}, "above 0, got -1.0"),
        ({"layer_types": 7}, "layer_types = 7 is not a list of names"),
        ({"layer_types": [["full_attention"]]}, r"layer_types = \[\['full_attention'\]\] is not a list of names"),
        ({"hidden_act": []}, "has a wrong value"),
        ({"head_dim": 0, "hidden_size": 8}, "has a wrong value"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = LlamaForCausalLM .* is not a list of names"),
        ({"architectures": [7]}, r"architectures = \[7\] .* is not a list of names"),
    ],
)  # fmt: skip
def test_values_that_no_setting_has_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as refused:
        describe(SIZES | {"architectures": ["MistralForCausalLM"]} | given)
    assert str(refused.value).isprintable()


def test_a_field_of_a_description_is_a_number() -> None:
    """Settings may be lists where a class has one for each layer, and other classes take one number."""
    with pytest.raises(LoadError, match=r"makes \w+\.hidden_size \[64\], which it cannot be"):
        described("LlamaForCausalLM", hidden_size=[64], head_dim=8)
    with pytest.raises(LoadError, match="num_experts = 1048576 is not a number from -1 to 8192"):
        described("MixtralForCausalLM", num_local_experts=1 << 20)


@pytest.mark.parametrize("annotation", [int, "int"])  # "int": in modules whose annotations are texts
def test_fields_are_checked_whatever_their_annotations_are(annotation: Any) -> None:
    sizes = make_dataclass("Sizes", [("width", annotation)])
    check_numbers(sizes(8))
    with pytest.raises(LoadError, match=r"makes Sizes\.width \[8\], which it cannot be"):
        check_numbers(sizes([8]))


def test_sizes_that_do_not_fit_each_other_are_refused() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.95}
    with pytest.raises(LoadError, match="the sizes of the model's configuration do not fit each other"):
        required_tensors(described("LlamaForCausalLM", hidden_size=256, num_attention_heads=16, rope_scaling=yarn))


def test_no_more_rotates_than_there_is() -> None:
    with pytest.raises(LoadError, match="6 rotated elements do not fit into heads of 3"):
        required_tensors(described("LlamaForCausalLM", partial_rotary_factor=2.0))


def test_whole_numbers_may_be_written_as_floats() -> None:
    assert described("LlamaForCausalLM", hidden_size=64.0) == described("LlamaForCausalLM", hidden_size=64)


@pytest.mark.parametrize("count", [-1, 10**12, "2", 2.0])
def test_a_classifier_has_a_number_of_labels(count: Any) -> None:
    with pytest.raises(LoadError, match=r"num_labels = .* is not a number from 1 to"):
        num_labels({"num_labels": count})


@pytest.mark.parametrize("size", SIZES)
def test_a_configuration_without_a_size_is_refused(size: str) -> None:
    config = {name: value for name, value in SIZES.items() if name != size} | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(LoadError, match=f"has no '{size}'"):
        describe(config)


@pytest.mark.parametrize(
    ("architecture", "names", "given"),
    [
        ("DeepseekV2ForCausalLM", ["n_group", "topk_group", "n_routed_experts"], {"num_experts_per_tok": 2}),
        ("Dots1ForCausalLM", ["n_group", "topk_group"], {"n_routed_experts": 8, "num_experts_per_tok": 2}),
        ("LlamaForCausalLM", ["rms_norm_eps", "rope_theta", "hidden_act", "rope_scaling", "mlp_bias"], {}),
        ("ApertusForCausalLM", ["rope_parameters"], {}),
        ("RobertaModel", ["pad_token_id"], {}),
    ],
)
def test_null_is_as_if_it_were_left_out(architecture: str, names: list[str], given: dict[str, Any]) -> None:
    assert described(architecture, **given, **dict.fromkeys(names)) == described(architecture, **given)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3", "Exaone4", "Cwm"])
def test_biases_count_where_the_class_has_them(name: str) -> None:
    given = COMMON_SIZES | {"attention_bias": True, "mlp_bias": True}
    architecture = f"{name}ForCausalLM"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(MODEL_TYPES[architecture], **given))
    theirs, ours = model.model.layers[0], described(architecture, **given).layers[0]
    assert bool(ours.attention.qkv_bias) == (theirs.self_attn.q_proj.bias is not None)
    assert bool(ours.attention.output_bias) == (theirs.self_attn.o_proj.bias is not None)
    assert bool(ours.feed_forward.bias) == (theirs.mlp.down_proj.bias is not None)


def test_null_is_none_where_configurations_mean_that_and_no_where_they_have_a_switch() -> None:
    assert windows(described("MistralForCausalLM", sliding_window=None)) == [0] * 30
    assert windows(described("MistralForCausalLM", sliding_window=None, window_size=7)) == [7] * 30
    assert described("Gemma2ForCausalLM", final_logit_softcapping=None).logits_softcap == 0
    assert not described("SmolLM3ForCausalLM", tie_word_embeddings=None).tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("DeepseekV2ForCausalLM", "num_experts_per_tok"), ("Dots1ForCausalLM", "num_experts"),
     ("LlamaForCausalLM", "hidden_size")],
)  # fmt: skip
def test_null_in_the_place_of_what_a_model_must_have_is_refused_by_name(architecture: str, name: str) -> None:
    given = {"num_experts": 8, "num_experts_per_tok": 2} | {name: None}
    with pytest.raises(LoadError, match=f"the model's configuration has no '{name}'"):
        described(architecture, **given)


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "Mistral4"])
def test_weights_of_experts_are_normalized_as_the_configuration_says(name: str) -> None:
    def normalizes(**given: bool) -> bool:
        sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
        return bool(described(f"{name}ForCausalLM", **sizes, **given).layers[0].feed_forward.routing.normalize)

    assert [normalizes(norm_topk_prob=value) for value in (True, False)] == [True, False]
    assert normalizes() == AutoConfig.for_model(MODEL_TYPES[f"{name}ForCausalLM"]).norm_topk_prob


@pytest.mark.parametrize("published", OTHER_NAMES)
def test_a_class_may_be_called_as_checkpoints_call_it(published: str) -> None:
    known = OTHER_NAMES[published]
    assert known in architectures() and hasattr(transformers, known)
    config = getattr(transformers, known).config_class().to_dict()
    if known == "Kimi_K25ForConditionalGeneration":
        config["text_config"]["vocab_size"] = config["image_token_id"] + 1
    given = [config | {"architectures": [name]} for name in (published, known)]
    assert describe(given[0]) == describe(given[1])


def test_time_steps_of_nemotron_h_have_the_limits_that_the_configuration_says() -> None:
    def limits(**given: Any) -> tuple[float, float]:
        sizes = {"hybrid_override_pattern": "M" * 30, "mamba_num_heads": 4, "mamba_head_dim": 8}
        [mixer, *_] = [layer.attention for layer in described("NemotronHForCausalLM", **sizes, **given).layers]
        return mixer.time_limit

    assert limits() == limits(time_step_min=0.1) == (0.0, math.inf)
    assert limits(time_step_limit=[0.3, 0.9]) == (0.3, 0.9)


def test_a_configuration_without_architectures_says_which_to_write() -> None:
    for kind, name in (("llama", "LlamaForCausalLM"), ("qwen3_moe", "Qwen3MoeForCausalLM"), ("", "NameOfTheModels")):
        with pytest.raises(LoadError, match=rf'model_type is .{kind}.: write "architectures": \["{name}'):
            describe({"model_type": kind, "architectures": None})
