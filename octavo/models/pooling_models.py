"""The decision whether a model pools, and how: by its architecture, then by a sentence-transformers folder, then by the
user's flags.

Encoders always pool. A decoder pools if its class is the bare network or a classifier, if its folder is a
sentence-transformers model, or if flags ask for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ConfigError, LoadError
from octavo.layers.pooler import KINDS, PoolingDescription
from octavo.layers.projection_head import ProjectionHeadDescription
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.sentence_transformers import SentenceTransformer
from octavo.models.config_reader import num_labels
from octavo.models.description import ModelDescription
from octavo.models.families import FAMILIES
from octavo.models.multimodal_models import OTHER_NAMES
from octavo.pooling_params import PoolingConfig

_EMBEDS = ("Model",)
_BASES = {"Gemma3Text": "Gemma3"}  # name of a class before its suffix -> that of its decoder
_CLASSIFIES = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "ForProcessRewardModel")
# Value of --task, as in older versions of vLLM -> "embed" or "classify".
TASKS = {
    "embed": "embed", "embedding": "embed", "token_embed": "embed", "encode": "embed", "classify": "classify",
    "token_classify": "classify", "score": "classify", "reward": "classify",
}  # fmt: skip
_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
# The prompt template of Qwen3-Reranker's model card.
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_OVERRIDES = ("pooling_type", "seq_pooling_type", "normalize", "use_activation", "dimensions", "task")


@dataclass(frozen=True, slots=True)
class PoolingFlags:
    """The flags: --runner, --task or --convert, --pooler-config."""

    runner: str = "auto"
    convert: str | None = None  # "embed" or "classify"
    overrides: Mapping[str, Any] | None = None
    may_chunk: bool = True


def decoder_of(name: str) -> str:
    """Return the decoder (ForCausalLM) with the same network as architecture `name`, which has another head or none.
    Other architectures are returned unchanged."""
    for suffix in (*_CLASSIFIES, *_EMBEDS):
        base = _BASES.get(name.removesuffix(suffix), name.removesuffix(suffix))
        if name.endswith(suffix) and f"{base}ForCausalLM" in FAMILIES:
            return f"{base}ForCausalLM"
    return name


def with_pooling(
    name: str, description: ModelDescription, config: Mapping[str, Any], settings: PoolingConfig
) -> ModelDescription:
    """Return `description`, which is of architecture `name` or of its decoder, with pooling by `settings`."""
    own = description.pooling or _of_decoder(name, description, config, settings)
    heads = [*own.head]
    heads += [ProjectionHeadDescription(one.name, one.size, one.bias, one.activation) for one in settings.dense]
    unused = description.unused if description.is_bidirectional else (*description.unused, "lm_head.")
    if "classify" not in settings.task:
        unused = (*unused, "score.")
    pooling = replace(own, kind=settings.kind, head=tuple(heads))
    return replace(description, pooling=pooling, unused=unused)


def _of_decoder(
    name: str, description: ModelDescription, config: Mapping[str, Any], settings: PoolingConfig
) -> PoolingDescription:
    if settings.label_tokens:
        output = description.embedding_name if description.tie_word_embeddings else description.output_name
        output, rows = config.get("classifier_matrix") or (output, None)  # GGUF files have only the labels' rows
        return PoolingDescription("LAST", (), tuple(settings.label_tokens), settings.is_difference, output, rows)
    if name.endswith(("ForRewardModel", "ForProcessRewardModel")):
        size = 1 if name.endswith("ForRewardModel") else num_labels(config)
        hidden = description.hidden_size
        return PoolingDescription(
            "ALL",
            (
                ProjectionHeadDescription("score.0", hidden, True, "relu"),
                ProjectionHeadDescription("score.2", size, True),
            ),
        )
    if name.endswith("ForTokenClassification"):
        return PoolingDescription("ALL", (ProjectionHeadDescription("score", num_labels(config), True),))
    if "classify" in settings.task:
        return PoolingDescription("LAST", (ProjectionHeadDescription("score", num_labels(config)),))
    return PoolingDescription("LAST")


def pooling_config(
    checkpoint: Checkpoint, description: ModelDescription, sentence: SentenceTransformer | None, flags: PoolingFlags
) -> PoolingConfig | None:
    """Return how the model pools; None if it generates. Raises `ConfigError` for flags that contradict the model."""
    config = checkpoint.config
    name = str((config.get("architectures") or ["(none)"])[0])
    name = OTHER_NAMES.get(name, name)
    is_pooler = description.pooling is not None or decoder_of(name) != name
    if flags.runner == "generate" and is_pooler:
        raise ConfigError(
            f"--runner generate: {name} has no output matrix to generate with; leave it out to serve its vectors."
        )
    is_asked = flags.runner == "pooling" or flags.convert is not None or bool(config.get("classifier_from_token"))
    if description.is_bidirectional and not (is_pooler or is_asked or sentence is not None):
        raise ConfigError(f"{name} has bidirectional attention here and cannot generate; add --runner pooling.")
    if flags.runner == "generate" or not (is_pooler or is_asked or sentence is not None):
        if flags.overrides:
            raise ConfigError("--pooler-config is for models that pool; add --runner pooling.")
        return None
    if description.impl != "octavo":
        raise ConfigError(f"{name} runs through transformers, where pooling is not built.")
    settings = _settings(name, config, description, sentence, flags)
    return _overridden(settings, flags.overrides or {})


def _settings(
    name: str, config: Mapping[str, Any], description: ModelDescription, sentence: SentenceTransformer | None,
    flags: PoolingFlags,
) -> PoolingConfig:  # fmt: skip
    classifies = name.endswith(_CLASSIFIES) or bool(config.get("classifier_from_token"))
    if flags.convert == "embed" and classifies:
        raise ConfigError(f"{name} is a classifier, which gives no embeddings; leave --task and --convert out.")
    if flags.convert == "classify" and not classifies:
        raise ConfigError(
            f"{name} has no classifier. One that judges by tokens is told so: --hf-overrides "
            '\'{"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": true}\'.'
        )
    if classifies:
        return _classifier(name, config, description, flags)
    kind = "LAST" if description.pooling is None else description.pooling.kind
    task, normalizes = "embed", True
    if kind == "ALL":
        task = "token_embed"
    found = PoolingConfig(task, kind)
    if sentence is not None:
        is_multi = sentence.kind is None
        found = PoolingConfig(
            "token_embed" if is_multi else "embed", sentence.kind or "ALL", dense=sentence.dense,
            prompts=sentence.prompts, default_prompt=sentence.default_prompt, pools_prompts=sentence.pools_prompts,
            lowers_case=sentence.lowers_case,
        )  # fmt: skip
        normalizes = sentence.normalizes
    own = 0 if description.pooling is None else description.pooling.size(description.hidden_size)
    size = found.dense[-1].size if found.dense else own or description.hidden_size
    sizes = list(config.get("matryoshka_dimensions") or ())
    return replace(
        found, size=size, activation="normalize" if normalizes else "identity",
        may_cut=bool(sizes or config.get("is_matryoshka")), dimensions=sizes,
        whole_prompts=not flags.may_chunk or description.is_bidirectional or found.kind != "LAST",
    )  # fmt: skip


def _classifier(
    name: str, config: Mapping[str, Any], description: ModelDescription, flags: PoolingFlags
) -> PoolingConfig:
    count = num_labels(config)
    is_difference = bool(config.get("is_original_qwen3_reranker"))
    tokens = [token for token in config.get("classifier_from_token") or () if isinstance(token, int)]
    if config.get("classifier_from_token"):
        count = 1 if is_difference else len(tokens)
    is_reward = name.endswith(("ForRewardModel", "ForProcessRewardModel"))
    if name.endswith("ForRewardModel"):
        count = 1
    kind = "LAST" if description.pooling is None else description.pooling.kind
    kind = "ALL" if is_reward or name.endswith("ForTokenClassification") else kind
    names = config.get("id2label") or {}
    labels = [str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(count)]
    return PoolingConfig(
        "token_classify" if kind == "ALL" else "classify", kind, size=count,
        activation="identity" if is_reward else _activation(config, count), labels=labels,
        whole_prompts=not flags.may_chunk or description.is_bidirectional or kind != "LAST",
        label_tokens=tokens, is_difference=is_difference,
        score_template=_QWEN3_RERANKER if is_difference else None, score_instruction=_QWEN3_INSTRUCTION,
    )  # fmt: skip


def _activation(config: Mapping[str, Any], count: int) -> str:
    """Return the activation of a classifier's outputs: as its configuration names it, else by its problem type."""
    given = (config.get("sentence_transformers") or {}).get("activation_fn")
    given = given or config.get("sbert_ce_default_activation_function")
    if given:
        name = str(given).split(".")[-1].removesuffix("()")
        if name not in _ACTIVATIONS:
            raise LoadError(f"activation {given} of a classifier is not built yet; {', '.join(_ACTIVATIONS)} are.")
        return _ACTIVATIONS[name]
    if config.get("problem_type") == "regression":
        return "identity"
    return "sigmoid" if count == 1 or config.get("problem_type") == "multi_label_classification" else "softmax"


def _overridden(settings: PoolingConfig, overrides: Mapping[str, Any]) -> PoolingConfig:
    """Return `settings` with the `overrides` of --pooler-config. Raises `ConfigError` for a setting that is unknown or
    does not fit."""
    for name, value in overrides.items():
        if name not in _OVERRIDES:
            raise ConfigError(f"--pooler-config has {name}, which is not built; {', '.join(_OVERRIDES)} are.")
        if value is None:
            continue
        if name in ("pooling_type", "seq_pooling_type"):
            settings = _pooled_by(settings, str(value).upper())
        elif name in ("normalize", "use_activation"):
            if not isinstance(value, bool):
                raise ConfigError(f"--pooler-config {name} must be true or false, got {value!r}.")
            is_embedding = "embed" in settings.task
            if value and settings.activation == "identity":
                plain = "softmax" if settings.size > 1 else "sigmoid"
                settings = replace(settings, activation="normalize" if is_embedding else plain)
            elif not value:
                settings = replace(settings, activation="identity")
        elif name == "dimensions":
            if type(value) is not int or not 1 <= value <= settings.size or "embed" not in settings.task:
                raise ConfigError(f"--pooler-config dimensions must be 1 to {settings.size}, got {value!r}.")
            settings = replace(settings, default_dimensions=value)
        elif name == "task":
            if value not in settings.tasks and value not in ("token_embed", "token_classify"):
                raise ConfigError(f"--pooler-config task must be one of {', '.join(settings.tasks)}, got {value!r}.")
            kind = "ALL" if str(value).startswith("token_") else settings.kind
            settings = replace(settings, task=str(value), kind=kind, whole_prompts=True)
    return settings


def _pooled_by(settings: PoolingConfig, kind: str) -> PoolingConfig:
    kind = {"MEAN_SQRT_LEN": "MEAN_SQRT", "WEIGHTEDMEAN": "WEIGHTED_MEAN"}.get(kind, kind)
    if kind not in KINDS:
        raise ConfigError(f"--pooler-config pooling_type must be one of {', '.join(KINDS)}, got {kind!r}.")
    task = settings.task.removeprefix("token_")
    task = f"token_{task}" if kind == "ALL" else task
    return replace(settings, kind=kind, task=task, whole_prompts=settings.whole_prompts or kind != "LAST")
