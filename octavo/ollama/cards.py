"""Makes the descriptions of models in Ollama's API from models' cards.

A card is what `octavo show --json` prints: plain data with the keys of `entrypoints.model_card`. A card may lack any of
them, as the card of a model at another server does.
"""

from collections.abc import Mapping
from typing import Any

from octavo.errors import RequestError
from octavo.ollama.to_openai import Translated

Card = Mapping[str, Any]
NEVER = "9999-12-31T23:59:59Z"  # expiry of a model that stays loaded
_NO_TIME = "1970-01-01T00:00:00Z"


def refuse_thinking(request: Translated, card: Card) -> None:
    """Raise `RequestError` if a request asks for thinking, and the model's card says that it cannot think."""
    if request.thinks and "thinking" not in card.get("capabilities", ("thinking",)):
        raise RequestError(f'"{request.name}" does not support thinking', param="think")


def of_adapter(card: Card, base: str) -> Card:
    """Return the card of an adapter of a model with this card. It has no size, as sums of sizes have the model's."""
    return {**card, "num_bytes": 0, "parent": base}


def tag(name: str, card: Card) -> dict[str, Any]:
    """Return a model's entry in the answer to /api/tags."""
    return {
        "name": name, "model": name, "modified_at": card.get("modified_at") or _NO_TIME,
        "size": card.get("num_bytes") or 0, "digest": card.get("digest") or "", "details": _details(card),
    }  # fmt: skip


def running(name: str, card: Card, expires_at: str = NEVER) -> dict[str, Any]:
    """Return a model's entry in the answer to /api/ps."""
    size = card.get("num_bytes") or 0
    in_vram = size if card.get("device") == "cuda" else 0
    entry = {key: value for key, value in tag(name, card).items() if key != "modified_at"}
    return {**entry, "expires_at": expires_at, "size_vram": in_vram, "context_length": card.get("context_length") or 0}


def shown(card: Card) -> dict[str, Any]:
    """Return the answer to /api/show."""
    architecture = card.get("architecture") or "unknown"
    sizes = {"context_length": "context_length", "embedding_length": "hidden_size", "block_count": "num_layers"}
    info = {"general.architecture": architecture, "general.parameter_count": card.get("num_parameters") or 0}
    info |= {f"{architecture}.{name}": card[key] for name, key in sizes.items() if card.get(key)}
    return {
        "modelfile": f"FROM {card.get('path') or card.get('name') or ''}\n", "parameters": "",
        "template": card.get("template") or "", "details": _details(card), "model_info": info,
        "capabilities": card.get("capabilities") or ["completion"], "modified_at": card.get("modified_at") or _NO_TIME,
    }  # fmt: skip


def _details(card: Card) -> dict[str, Any]:
    family = card.get("architecture") or "unknown"
    return {
        "parent_model": card.get("parent") or "", "format": card.get("format") or "",
        "family": family, "families": [family],
        "parameter_size": parameter_size(card.get("num_parameters") or 0),
        "quantization_level": card.get("quantization") or "",
    }  # fmt: skip


def parameter_size(number: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 134.5M or 8.0B; empty for 0."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return str(number) if number else ""
