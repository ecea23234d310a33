"""Finds whether and how a model pools, from the flags, its architecture and its sentence-transformers folder."""

import os
from dataclasses import replace

from octavo.config.engine_args import EngineArgs
from octavo.config.wording import listed
from octavo.errors import ConfigError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.sentence_transformers import SentenceTransformer, read_sentence_transformer
from octavo.models.description import ModelDescription
from octavo.models.pooling_models import TASKS, PoolingFlags, pooling_config
from octavo.pooling_params import DenseConfig, PoolingConfig


def pooling_of(
    args: EngineArgs, checkpoint: Checkpoint, description: ModelDescription
) -> tuple[PoolingConfig | None, Checkpoint]:
    """Return how the model pools, or None if it generates; and the checkpoint, whose `classifier_from_token` becomes
    token ids. Raises `ConfigError`."""
    runner: str = args.runner
    convert: str | None = None if args.convert in ("auto", "none") else args.convert
    if args.task == "generate":
        runner = "generate"
    elif args.task != "auto":
        if args.task not in TASKS:
            raise ConfigError(f"--task must be auto, generate, {listed(TASKS, 'or')}, got {args.task!r}.")
        runner, convert = "pooling", convert or TASKS[args.task]
    sentence = read_sentence_transformer(checkpoint.path) if os.path.isdir(checkpoint.path) else None
    if checkpoint.format == "gguf" and (kind := checkpoint.config.get("pooling_type")):
        dense = [DenseConfig(name, size, False, None) for name, size in checkpoint.config["pooled_dense"]]
        sentence = SentenceTransformer(kind, dense=dense, normalizes=True)  # as llama.cpp's server does
    names = checkpoint.config.get("classifier_from_token")
    if names and not checkpoint.config.get("classifier_matrix"):
        from octavo.loading.tokenizer import read_tokenizer

        tokens = read_tokenizer(checkpoint.tokenizer_path, checkpoint.trusts_code).convert_tokens_to_ids(names)
        checkpoint = replace(checkpoint, config=checkpoint.config | {"classifier_from_token": tokens})
    overrides = {**(args.override_pooler_config or {}), **(args.pooler_config or {})}
    flags = PoolingFlags(runner, convert, overrides, args.enable_chunked_prefill)
    pooling = pooling_config(checkpoint, description, sentence, flags)
    if pooling is not None and sentence is not None:
        pooling = replace(pooling, max_length=sentence.max_length)
    return pooling, checkpoint
