"""The table of architectures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.entrypoints.cli.main import main
from octavo.models import catalogue
from octavo.models.multimodal_models import MEDIA_FAMILIES
from octavo.models.registry import architectures
from octavo.models.whisper import WHISPER
from tests.models.small_encoders import ENCODERS
from tests.models.small_experts import ALL_MODELS
from tests.models.small_latent import LATENT_MODELS
from tests.models.small_recurrent import RECURRENT_MODELS

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_documentation_has_the_table_that_the_program_makes() -> None:
    assert catalogue.as_markdown() in DOCS.read_text(), (
        "octavo models --markdown prints what docs/models.md should have"
    )


def test_the_table_has_every_architecture_and_each_is_tested() -> None:
    names = [entry.architecture for entry in catalogue.entries()]
    assert names == [name for name in architectures() if name in names]  # other tests register more
    tested = {model.architecture for model in (ALL_MODELS | LATENT_MODELS | RECURRENT_MODELS).values()}
    encoders = {name for name in ENCODERS if not name.endswith("Classification")}
    others = {"HF_ColBERT", "NewModel", WHISPER, *MEDIA_FAMILIES}  # New is Gte by another name
    assert set(names) == tested | encoders | others


def test_the_documentation_names_every_decoder_class_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes, text = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), DOCS.read_text()
    native = classes & set(architectures())
    assert f"Of the {len(classes)} decoder classes" in text and f" {len(native)} run natively" in text
    section = text.split("### Classes that are not built in Octavo itself")[1].split("\n## ")[0]
    assert {name for name in classes - native if name not in re.findall(r"\w+", section)} == set()


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(catalogue.entries())
    [llama_4] = [line for line in lines if line.startswith("Llama4ForConditionalGeneration")]
    assert "sees pictures; contexts up to attention_chunk_size" in llama_4
