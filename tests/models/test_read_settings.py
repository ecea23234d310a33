"""No setting is passed over that changes an answer: what the modules of `transformers` read of an architecture's
configuration is read here too, refused by name, or one of those that change nothing here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from octavo.models import config_reader
from octavo.models.families import FAMILIES
from octavo.models.registry import describe, unread_settings
from tests.models.test_parity import MODELS

# What only training, losses, caches or the choice of a kernel read.
_CHANGES_NOTHING = re.compile(
    r"""\w*(dropout|pdrop|layerdrop|jitter|initializer|variance_scale|rescale|fp32|_loss_coef|loss_coefficient|token_id)\w*
    |output_\w+|summary_\w+|return_dict|use_cache|problem_type|id2label|is_decoder|is_encoder_decoder|dtype|pretraining_tp
    |(mamba_)?chunk_size|num_logits_to_keep|use_mamba\w+|use_associative_scan|slow_but_exact|reorder_and_upcast_attn
    |time_step_(floor|max|scale|init_scheme|rank)|linear_(a_log|dt)_\w+|altup_coef_clip""",
    re.VERBOSE,
)
# And what has no meaning there: it follows from other settings, is a least number to divide by, or tells of layers
# that the smallest models lack.
_LATENT = "AXK1|Bailing|Deepseek|Glm4MoeLite|GlmMoeDsa|Kimi|Longcat|MiniCPM3|Mistral4|Youtu"
_HAVE_NO_MEANING = {
    "attention_hidden_size": "Zamba", "attention_layers": "GPTNeo", "block_size": "MiniMax", "expand": "Mamba2",
    "head_dim": _LATENT, "hybrid_layer_ids": "Zamba2", "layer_types": "Llama4", "layers_block_type": "FalconH1",
    "intermediate_size": "(Falcon)?Mamba|KimiLinear|Kolibri1|Mellum|Qwen3_5Moe|Solar",
    "linear_conv_kernel_dim": "Bailing", "linear_num_heads": "Bailing",
    "mamba_expand": "FalconH1", "mamba_headdim": "Zamba2", "moe_norm_min": "Ernie4_5",
    "n_ctx": "CodeGen", "num_key_value_heads": _LATENT, "qk_head_dim": "Longcat", "sliding_window": "Qwen[23]Moe",
    "sliding_window_pattern": "Exaone", "time_step_min": "(Falcon)?Mamba|Zamba|NemotronH",
}  # fmt: skip
_STANDARD = {own: standard for standard, names in config_reader._ALIASES.items() for own in names}


class _Noting(dict[str, Any]):
    """A configuration that notes what is read of it."""

    def __init__(self, settings: dict[str, Any], seen: set[str]) -> None:
        super().__init__(settings)
        self._seen = seen

    def __getitem__(self, name: str) -> Any:
        self._seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._seen.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("architecture", sorted({model.architecture for model in MODELS.values()}))
def test_what_transformers_reads_is_read(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, has, merged = set[str](), set[str](), config_reader._merged
    monkeypatch.setattr(config_reader, "_merged", lambda name, given: _Noting(merged(name, given), seen))
    for model in MODELS.values():
        if model.architecture == architecture:
            config = model.config()
            settings = config.to_dict()
            describe(settings | {"architectures": [architecture]})
            has |= {*settings, *config.attribute_map}
    module = sys.modules[getattr(transformers, architecture).__module__]
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    used = set(re.findall(r"\bconfig\.(\w+)", source)) | set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source))
    names = {config.attribute_map.get(name, name) for name in used & has}
    missing = {
        name for name in names if not {name, _STANDARD.get(name, name)} & (seen | {*FAMILIES[architecture].refuses})
    }
    missing = {name for name in missing if not _CHANGES_NOTHING.fullmatch(name)}
    assert {name for name in missing if not re.match(_HAVE_NO_MEANING.get(name, "-"), architecture)} == set()


# Read for every family alike, but for what older versions of transformers have written under these names.
_OF_ALL = {
    "first_k_dense_replace", "head_dim", "hidden_act", "intermediate_size", "layer_types", "mlp_layer_types",
    "moe_intermediate_size", "n_shared_experts", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "num_key_value_heads", "routed_scaling_factor", "sliding_window",
}  # fmt: skip
_OF_TRANSFORMERS = [architecture for architecture in sorted(FAMILIES) if hasattr(transformers, architecture)]


def _configs(architecture: str) -> list[Any]:
    small = [model.config() for model in MODELS.values() if model.architecture == architecture]
    return small or [getattr(transformers, architecture).config_class()]


def _source(thing: type) -> str:
    file = sys.modules[thing.__module__].__file__
    assert file is not None
    return Path(file).read_text()


@pytest.mark.parametrize("architecture", _OF_TRANSFORMERS)
def test_the_settings_that_a_class_lacks_are_those_that_transformers_does_not_know(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, has, merged = set[str](), set[str](), config_reader._merged
    monkeypatch.setattr(config_reader, "_merged", lambda name, given: _Noting(merged(name, given), seen))
    for config in _configs(architecture):
        settings = config.to_dict()
        describe(settings | {"architectures": [architecture]})
        has |= {*settings, *config.attribute_map}
    model_class = getattr(transformers, architecture)
    has |= set(re.findall(r"\w+", _source(model_class.config_class)))
    has |= set(re.findall(r'\bconfig(?:\.|, ")(\w+)', _source(model_class)))
    name = config_reader._HEADS.sub("", architecture)
    assert {setting for setting, names in config_reader._ABSENT.items() if name in names} == (seen & _OF_ALL) - has


@pytest.mark.parametrize("architecture", _OF_TRANSFORMERS)
def test_a_setting_that_a_class_lacks_changes_nothing_and_is_named(architecture: str) -> None:
    name = config_reader._HEADS.sub("", architecture)
    lacks = [setting for setting, names in config_reader._ABSENT.items() if name in names]
    for config in _configs(architecture):
        settings = config.to_dict() | {"architectures": [architecture]}
        for setting in lacks:
            stray = settings | {setting: ["moe"] if setting.endswith("types") else 3}
            assert describe(stray) == describe(settings)
            assert unread_settings(stray, "auto") == [setting]


@pytest.mark.parametrize("architecture", _OF_TRANSFORMERS)
def test_of_what_transformers_writes_nothing_is_named_and_of_what_nobody_knows_all_is(architecture: str) -> None:
    for config in _configs(architecture):
        settings = config.to_dict() | {"architectures": [architecture]}
        assert unread_settings(settings, "auto") == []
        assert unread_settings(settings | {"scale_of_nothing": 2, "num_hidden_heads": 1}, "auto") == [
            "num_hidden_heads", "scale_of_nothing"
        ]  # fmt: skip


def test_what_says_how_a_model_pools_is_not_named() -> None:
    """Errors name these settings, for --hf-overrides."""
    settings = _configs("Qwen3ForCausalLM")[0].to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    pools: dict[str, Any] = {"is_matryoshka": True, "matryoshka_dimensions": [8]}
    pools |= {"is_original_qwen3_reranker": True, "classifier_from_token": ["no", "yes"]}
    assert unread_settings(settings | pools, "auto") == []
