"""The names of adapters at a server: given at its start, loaded by clients, or found below --lora-root.

A name stands for the contents of its files at the time it was given. Requests carry the identity of these contents, so
that a later change of the name does not affect them.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from octavo.config import LoRAConfig
from octavo.errors import LoadError, RequestError
from octavo.lora.adapter_files import refusal, source
from octavo.request import AdapterSource

_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    name: str
    path: str  # as the caller gave it
    source: AdapterSource
    base_model_name: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))


class AdapterNames:
    """The names of one server. `read`, and `find` for a new name, read files: call them in a thread."""

    def __init__(self, config: LoRAConfig, taken: list[str]) -> None:
        """`taken` are the base model's names. Raises `LoadError` if an adapter of --lora-modules cannot be found or has
        a name that is in use."""
        self._config, self._taken = config, taken
        self.named: dict[str, NamedAdapter] = {}
        self._changing = WeakValueDictionary[str, asyncio.Lock]()
        for module in config.modules:
            if module.name in taken or module.name in self.named:
                raise LoadError(f"--lora-modules has {module.name!r}, which is the name of another model here.")
            found = source(module.name, module.path, config.download_dir, may_fetch=True)
            self.named[module.name] = NamedAdapter(module.name, module.path, found, module.base_model_name)

    def __contains__(self, name: str) -> bool:
        return name in self.named or self._in_root(name) is not None

    def changing(self, name: str) -> asyncio.Lock:
        """Return the lock to hold while the adapter behind `name` is changed."""
        return self._changing.setdefault(name, asyncio.Lock())

    def find(self, name: str) -> AdapterSource:
        """Return the adapter behind `name` now. Raises `RequestError` if there is none or it cannot be read."""
        named = self.named.get(name)
        if named is not None:
            return named.source
        path = self._in_root(name)
        if path is None:
            raise RequestError(f"adapter {name!r}: there is no adapter {name!r}.", param="model")
        try:
            return source(name, str(path))
        except LoadError as e:
            raise refusal(name, e, _folder(path), "model") from None

    def read(self, name: str, path: str, replaces: bool) -> NamedAdapter:
        """Return the adapter at `path` under the `name` that a client gives it. `replaces` allows a name that is in
        use. Raises `RequestError`."""
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise RequestError("lora_name must be 1 to 256 printable characters.", param="lora_name")
        if name in self._taken:
            raise RequestError(f"{name!r} is the name of the base model.", param="lora_name")
        if name in self.named and not replaces:
            raise RequestError(
                f"there is an adapter {name!r} already; unload it first, or set load_inplace.", param="lora_name"
            )
        place = self._below_root(Path(path))
        if place is None:
            roots = ", ".join(self._config.roots) or "none is given"
            raise RequestError(
                "lora_path must be a folder or a .gguf file below a folder of --lora-root "
                f"({roots}), where relative paths begin.",
                param="lora_path",
            )
        try:
            return NamedAdapter(name, path, source(name, str(place)))
        except LoadError as e:
            raise refusal(name, e, _folder(place), "lora_path") from None

    def unload(self, name: str) -> NamedAdapter:
        """Remove a name and return its adapter. Raises `RequestError` (404) if there is no such name."""
        if name not in self.named:
            raise RequestError(f"there is no adapter {name!r}.", param="lora_name", status=404, code="model_not_found")
        return self.named.pop(name)

    def _in_root(self, name: str) -> Path | None:
        """Return the folder or .gguf file called `name` in a folder of --lora-root, or None."""
        if not name or len(name) > _MAX_NAME or not name.isprintable() or name in self._taken:
            return None
        for root in self._config.roots:
            place = self._below_root(Path(root) / name)
            if place is not None and (place.is_dir() or place.suffix == ".gguf") and place != Path(root):
                return place
        return None

    def _below_root(self, path: Path) -> Path | None:
        """Return `path` resolved, without links and dots, if it is below a root; else None. A relative path is tried
        from each root."""
        for root in self._config.roots:
            try:
                place = (Path(root) / path.expanduser()).resolve(strict=True)
            except (OSError, ValueError, RuntimeError):
                continue
            if place.is_relative_to(root):
                return place
        return None


def _folder(place: Path) -> str:
    return str(place.parent if place.is_file() else place)
