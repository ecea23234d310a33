"""A model's card: what it is and what it can do, as plain data. `octavo show` and Ollama's routes show it."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from math import prod
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.chat.tools.format_detection import ModelFormats, model_formats
from octavo.entrypoints.openai.fill_in_middle import fills_in
from octavo.errors import OctavoError
from octavo.loading.local_models import quantization_in

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.loading.checkpoint import Checkpoint
    from octavo.loading.tokenizer import ModelTokenizer


def card_of(model: str) -> dict[str, Any]:
    """Return the card of a model that is on this machine. Raises `OctavoError`."""
    from octavo.config import EngineArgs
    from octavo.loading.tokenizer import load_tokenizer

    config = EngineArgs(model=model).create_engine_config()
    return model_card(config, load_tokenizer(config.model.checkpoint, config.model.chat_template))


def model_card(config: EngineConfig, tokenizer: ModelTokenizer, formats: ModelFormats | None = None) -> dict[str, Any]:
    """Return the card of a model. `formats` are those of a server's flags; by default they are recognised."""
    model, checkpoint = config.model, config.model.checkpoint
    text = checkpoint.config.get("text_config") or checkpoint.config
    if formats is None:
        formats = model_formats(
            tokenizer,
            model_type=checkpoint.config.get("model_type"),
            response_template=getattr(tokenizer, "response_template", None),
        )
    abilities = {
        "completion": model.pooling is None,
        "embedding": model.pooling is not None,
        "vision": config.media is not None and config.media.kind == "image",
        "audio": config.media is not None and config.media.kind == "audio",
        "tools": model.pooling is None and formats.tools is not None,
        "thinking": model.pooling is None and formats.reasoning is not None and bool(formats.reasoning.start),
        "insert": model.pooling is None and fills_in(tokenizer),
    }
    template = tokenizer.chat_template
    return {
        "name": checkpoint.name,
        "path": checkpoint.path,
        "architecture": str(checkpoint.config.get("model_type") or "unknown"),
        "num_parameters": _num_parameters(config),
        "num_layers": text.get("num_hidden_layers"),
        "hidden_size": text.get("hidden_size"),
        "context_length": model.max_model_len,
        "format": checkpoint.format,
        "quantization": _quantization(checkpoint, model.dtype),
        "capabilities": [name for name, has in abilities.items() if has],
        "template": template if isinstance(template, str) else (template or {}).get("default", ""),
        "device": config.device,
        **_files(checkpoint.weight_files),
    }


def _num_parameters(config: EngineConfig) -> int:
    """Return the number of parameters in matrices; 0 if it is known only once the model starts."""
    from octavo.loading.file_weights import tensor_index
    from octavo.models.registry import describe
    from octavo.planning.step_limits import model_work

    model = config.model
    with suppress(OctavoError):
        description = describe(model.checkpoint.config, model.impl, model.code_folder, model.pooling)
        if description.impl == "octavo":
            return model_work(description).num_parameters
    with suppress(OctavoError):
        return sum(prod(shape) for _, shape in tensor_index(model.checkpoint).values())
    return 0


def _quantization(checkpoint: Checkpoint, dtype: str) -> str:
    """Return the format of the weights, such as Q4_K_M, AWQ or BF16."""
    if checkpoint.format == "gguf":
        return quantization_in(os.path.basename(checkpoint.path)) or _commonest_type(checkpoint.path)
    settings = checkpoint.config.get("quantization_config")
    if isinstance(settings, dict):
        return str(settings.get("quant_method") or "unknown").upper()
    return re.sub("float", "F", re.sub("bfloat", "BF", dtype))


def _commonest_type(path: str) -> str:
    """Return the type of most bytes of a GGUF file's tensors."""
    from octavo.loading.gguf_file import read_gguf

    num_bytes = Counter[str]()
    for tensor in read_gguf(path, texts=False).tensors.values():
        num_bytes[tensor.type.name] += tensor.num_bytes
    return max(num_bytes, key=num_bytes.__getitem__, default="unknown")


def _files(paths: list[str]) -> dict[str, Any]:
    """Return the size, the age and a digest of weight files. The digest distinguishes files, but is not computed from
    their bytes."""
    stats = [os.stat(path) for path in paths]
    modified = max((one.st_mtime for one in stats), default=0.0)
    described = [f"{os.path.basename(path)} {one.st_size}" for path, one in zip(paths, stats, strict=True)]
    return {
        "num_bytes": sum(one.st_size for one in stats),
        "modified_at": datetime.fromtimestamp(modified, UTC).isoformat().replace("+00:00", "Z"),
        "digest": hashlib.sha256("\n".join([*described, str(modified)]).encode()).hexdigest(),
    }
