"""Configurations: what they leave out has the default of the configuration class in `transformers`; what is not built
is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.errors import LoadError
from octavo.models.description import ModelDescription
from octavo.models.families import FAMILIES
from octavo.models.registry import architectures, describe

MODEL_TYPES = {name: model_type for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
}


def described(architecture: str, **config: Any) -> ModelDescription:
    return describe(SIZES | config | {"architectures": [architecture]})


def windows(description: ModelDescription) -> list[int]:
    return [layer.attention.window for layer in description.layers]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("given", [{}, {"use_sliding_window": True, "sliding_window": 7}], ids=["sizes only", "window"])
def test_what_is_left_out_is_the_configuration_classes_own_default(architecture: str, given: dict[str, Any]) -> None:
    config = AutoConfig.for_model(MODEL_TYPES[architecture], **SIZES, **given).to_dict()
    assert described(architecture, **given) == describe(config | {"architectures": [architecture]})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_default_in_the_table_is_the_configuration_classes_own(architecture: str) -> None:
    config = AutoConfig.for_model(MODEL_TYPES[architecture])
    for setting, default in FAMILIES[architecture].defaults.items():
        if setting == "rope_theta":
            assert config.rope_parameters["rope_theta"] == default
        elif setting == "sliding_window" and not getattr(config, "use_sliding_window", True):
            assert type(config)(use_sliding_window=True).sliding_window == default
        elif setting != "no_rope_layers":  # which the class fills in
            expected = getattr(config, setting)
            assert expected in (default, config.num_attention_heads if default is None else default), setting


@pytest.mark.parametrize("architecture", FAMILIES)
def test_whether_the_output_matrix_is_the_embedding_follows_the_configuration_class(architecture: str) -> None:
    config = AutoConfig.for_model(MODEL_TYPES[architecture])
    assert described(architecture).tie_word_embeddings == config.tie_word_embeddings
    for tied in (True, False):
        assert described(architecture, tie_word_embeddings=tied).tie_word_embeddings == tied


def test_every_architecture_of_the_table_is_known_to_transformers() -> None:
    assert set(FAMILIES) <= set(architectures())
    assert all(
        AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(MODEL_TYPES[name]))].__name__ == name
        for name in FAMILIES
    )


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
        rope = described("LlamaForCausalLM", **given).layers[0].attention.rope
        assert rope is not None
        assert rope.theta == 5.0


@pytest.mark.parametrize(
    ("architecture", "given", "message"),
    [
        ("NoSuchForCausalLM", {}, "architecture NoSuchForCausalLM is not built yet; Octavo runs Granite"),
        (
            "LlamaForCausalLM",
            {"hidden_act": "gelu_10"},
            "LlamaForCausalLM: activation 'gelu_10' in a gated feed-forward",
        ),
        ("LlamaForCausalLM", {"num_key_value_heads": 5}, "32 query heads do not divide into 5 key/value heads"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quantized with 'gptq'"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope' is not built yet"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 30 layers"),
        ("MistralForCausalLM", {"layer_types": ["mamba"] * 30}, "layer type 'mamba' is not built yet"),
    ],
)
def test_what_is_not_built_is_refused_by_name(architecture: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        described(architecture, **given)


@pytest.mark.parametrize("size", SIZES)
def test_a_configuration_without_a_size_is_refused(size: str) -> None:
    config = {name: value for name, value in SIZES.items() if name != size} | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(LoadError, match=f"has no '{size}'"):
        describe(config)
