"""Which models there are and where they run: a YAML file, checked, or models named on the command line."""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from octavo.api_keys import key_of
from octavo.errors import ConfigError
from octavo.flags import read_yaml
from octavo.gateway.discovery import read_source
from octavo.gateway.request_body import reason_of

# Flags of `octavo serve` that no entry may have, with the reason.
_RESERVED_FLAGS = {
    **dict.fromkeys(
        ("model", "host", "port", "api-key", "served-model-name", "log-format"), "the gateway sets it; leave it out"
    ),
    **dict.fromkeys(
        ("config", "uds", "root-path", "headless", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"),
        "it is not for servers that the gateway starts; leave it out",
    ),
    "lora-modules": "leave it out, and give each adapter an entry with adapter_of (docs/gateway.md, Adapters)",
}
_Positive = Annotated[float, Meta(gt=0)]


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model of the catalogue. It runs here, as `octavo serve` with `flags`, or at `addresses`, or where `discover`
    finds it; or it is an adapter of a model that runs here."""

    model: str | None = None  # what `octavo serve` is given; the entry's name by default
    adapter_of: str | None = None  # another entry, whose servers serve this one as an adapter
    flags: dict[str, Any] = {}
    replicas: Annotated[int, Meta(ge=1, le=1024)] | None = None
    memory_gib: _Positive | None = None  # of one replica
    keep_alive: Annotated[float, Meta(ge=0)] | None = 300.0  # seconds without a request; None: for ever
    preload: bool = False
    # Seconds that a start may make no progress; None: any.
    start_timeout: Annotated[float, Meta(gt=0, le=1e8)] | None = 900.0
    addresses: list[str] = []
    discover: str | None = None  # discovery.DnsName or discovery.KubernetesService
    served_model_name: str | None = None  # at the addresses; the entry's name by default
    api_key_env: str | None = None  # the variable with the key that the addresses want
    health: str = "/health"
    aliases: list[str] = []
    fallbacks: list[str] = []
    # Other entries, and the percentage of new conversations that each answers in this one's place.
    canaries: dict[str, Annotated[float, Meta(ge=0, le=100)]] = {}
    prefill_model: str | None = None  # another entry, which computes long prompts for this one
    prefill_min_tokens: Annotated[int, Meta(ge=1)] = 8192  # that no replica has had

    @property
    def is_local(self) -> bool:
        return not self.addresses and self.discover is None and self.adapter_of is None

    @property
    def num_replicas(self) -> int:
        return len(self.addresses) or self.replicas or 1

    @property
    def may_be_several(self) -> bool:
        """Return whether the model may have several replicas at a time."""
        return self.discover is not None or self.num_replicas > 1

    @property
    def total_gib(self) -> float:
        """Memory of all replicas."""
        return (self.memory_gib or 0.0) * self.num_replicas

    def flag_words(self) -> list[str]:
        """The flags as words of a command line."""
        words = []
        for key, value in self.flags.items():
            name = key.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            elif isinstance(value, list):
                words += [f"--{name}={item}" for item in value]
            else:
                words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
        return words


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models by name."""

    models: dict[str, ModelEntry]

    def with_adapters(self) -> Catalogue:
        """Return the catalogue with the flags of adapters at the models whose servers serve them, and with the number
        of these servers at the adapters."""
        models, modules = dict(self.models), defaultdict[str, list[str]](list)
        for name, entry in self.models.items():
            if (base := entry.adapter_of) is not None:
                modules[base].append(json.dumps({"name": name, "path": entry.model or name}))
                models[name] = msgspec.structs.replace(entry, replicas=self.models[base].replicas)
        for base, its in modules.items():
            flags = self.models[base].flags | {"enable-lora": True, "lora-modules": its}
            models[base] = msgspec.structs.replace(self.models[base], flags=flags)
        return Catalogue(models)


def named_models(models: Sequence[str]) -> Catalogue:
    """Return a catalogue of models that are named on the command line. Raises `ConfigError`."""
    if len(set(models)) < len(models):
        raise ConfigError("a model is named twice; name each once, or write a --catalogue with replicas.")
    for name in models:
        _check_path(name)
    return Catalogue({name: ModelEntry() for name in models})


def read_catalogue(path: str) -> Catalogue:
    """Read and check a file. Raises `ConfigError`, which names the file and the key."""
    where = f"--catalogue {path}"
    content = read_yaml(path, where)
    if not isinstance(content, dict):
        raise ConfigError(f"{where} has no key models with entries by name (docs/gateway.md, The catalogue).")
    try:
        catalogue = msgspec.convert(_with_entries(content, where), Catalogue)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {reason_of(error, Catalogue)}.") from None
    _check(catalogue, where)
    return catalogue


def _check_path(model: str, at: str = "") -> None:
    """Raise `ConfigError` if a model can only be a path, as no Hugging Face id has this form, and nothing is there."""
    is_file = model.endswith(".gguf") and ":" not in model
    is_path = is_file or model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_path and not os.path.exists(os.path.expanduser(model)):
        raise ConfigError(f"{at}there is no file or folder {model}: give a path that exists, or a Hugging Face id.")


def _with_entries(content: dict[Any, Any], where: str) -> dict[Any, Any]:
    """Return a file's content with the entries of its models read one by one, because msgspec's errors do not name the
    key of a map. Raises `ConfigError`."""
    models = content.get("models")
    if not isinstance(models, dict):
        return content
    entries = {}
    for name, entry in models.items():
        if not isinstance(name, str):
            raise ConfigError(f"{where}: models.{name}: a name is a text, and YAML reads this one otherwise; quote it.")
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{where}: models.{name} must be an object with keys such as model; {{}} has the defaults."
            )
        try:
            entries[name] = msgspec.convert(entry, ModelEntry)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: models.{name}: {reason_of(error, ModelEntry)}.") from None
    return {**content, "models": entries}


def check_memory(catalogue: Catalogue, budget_gib: float | None) -> None:
    """Raise `ConfigError` if a model can never fit, or does not say what it needs."""
    if budget_gib is None:
        return
    for name, entry in catalogue.models.items():
        if not entry.is_local:
            continue
        if entry.memory_gib is None:
            raise ConfigError(
                f"--memory-gib {budget_gib:g} needs the memory_gib of each model that runs here, and {name} has none: "
                "write it into the --catalogue (`octavo plan` says what a model takes)."
            )
        if entry.total_gib > budget_gib:
            raise ConfigError(f"{name} needs {entry.total_gib:g} GiB and --memory-gib is {budget_gib:g}: raise it.")


def _check(catalogue: Catalogue, where: str) -> None:
    if not catalogue.models:
        raise ConfigError(f"{where} has no models.")
    names = set(catalogue.models)
    for name, entry in catalogue.models.items():
        at = f"{where}: models.{name}"
        for text in (name, *entry.aliases, entry.model, entry.served_model_name):
            if text is not None and (not text.isprintable() or text.strip() != text or text[:1] in ("", "-")):
                # A line of the log, a label of a metric or a command line cannot have it.
                raise ConfigError(f"{at}: {text!a} is no name: give one of printable characters that begins without -.")
        for alias in entry.aliases:
            if alias in names:
                raise ConfigError(f"{at}: {alias} names two models; aliases and names must differ.")
            names.add(alias)
        for key, others in (("fallbacks", entry.fallbacks), ("canaries", entry.canaries)):
            for other in others:
                if other not in catalogue.models or other == name:
                    raise ConfigError(f"{at}.{key}: {other} is not another model of the catalogue.")
        if (total := math.fsum(entry.canaries.values())) > 100 + 1e-9:  # decimals are not exact
            raise ConfigError(f"{at}.canaries: their percentages are {total:g} together, and 100 is the most.")
        if (base := entry.adapter_of) is not None:
            if base == name or base not in catalogue.models or not catalogue.models[base].is_local:
                raise ConfigError(f"{at}.adapter_of: {base} is not another model that the gateway starts.")
            if "--no-enable-lora" in catalogue.models[base].flag_words():
                raise ConfigError(f"{at}.adapter_of: {base} has the flag enable-lora: false; leave it out.")
            _check_adapter(name, entry, at)
            continue
        if (helper := entry.prefill_model) is not None:
            its = catalogue.models.get(helper)
            if its is None or its.adapter_of is not None or helper == name:
                raise ConfigError(f"{at}.prefill_model: {helper} is not another model of the catalogue, or an adapter.")
            if its.is_local and not (its.preload and its.keep_alive is None):
                raise ConfigError(
                    f"{at}.prefill_model: {helper} must always run: give it preload: true and keep_alive: null."
                )
        elif entry.prefill_min_tokens != ModelEntry().prefill_min_tokens:
            raise ConfigError(f"{at}.prefill_min_tokens needs prefill_model, the entry that computes the prompts.")
        if entry.is_local:
            _check_local(name, entry, at)
        else:
            _check_addresses(entry, at)


def _check_local(name: str, entry: ModelEntry, at: str) -> None:
    _check_path(entry.model or name, f"{at}: ")
    _check_unset(entry, ("served_model_name", "api_key_env", "health"), at, "for models with addresses; leave it out")
    for key, value in entry.flags.items():
        if (why := _RESERVED_FLAGS.get(name := key.replace("_", "-"))) is not None:
            raise ConfigError(f"{at}.flags: --{name}: {why}.")
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float | dict) for item in items):
            raise ConfigError(f"{at}.flags.{key} must be a text, a number, a list of them or an object, got {value!r}.")


def _check_adapter(name: str, entry: ModelEntry, at: str) -> None:
    _check_path(entry.model or name, f"{at}: ")
    _check_unset(
        entry, set(entry.__struct_fields__) - {"model", "adapter_of", "aliases", "fallbacks", "canaries"}, at,
        "not for an adapter, which runs with the model of adapter_of; leave it out",
    )  # fmt: skip


def _check_unset(entry: ModelEntry, keys: Iterable[str], at: str, why: str) -> None:
    """Raise `ConfigError` if one of the keys has another value than its default."""
    unset = ModelEntry()
    for key in sorted(keys):
        if getattr(entry, key) != getattr(unset, key):
            raise ConfigError(f"{at}.{key} is {why}.")


def _check_addresses(entry: ModelEntry, at: str) -> None:
    _check_unset(
        entry, ("model", "flags", "replicas", "memory_gib", "preload", "keep_alive", "start_timeout"), at,
        "for models that the gateway starts; this one has addresses",
    )  # fmt: skip
    if entry.api_key_env is not None:
        try:
            has_key = key_of(entry.api_key_env) is not None
        except ConfigError as error:
            raise ConfigError(f"{at}.api_key_env: {error}") from None
        if not has_key:
            raise ConfigError(f"{at}.api_key_env: the variable {entry.api_key_env} is not set.")
    if not entry.health.startswith("/"):
        raise ConfigError(f"{at}.health must be a path such as /health, got {entry.health}.")
    for text in (*entry.addresses, entry.health):
        if not re.fullmatch("[!-~]+", text):  # it becomes a part of a request's head
            raise ConfigError(f"{at}: write the characters of {text!a} other than printable ASCII as %XX.")
    if len(set(entry.addresses)) < len(entry.addresses):
        raise ConfigError(f"{at}.addresses has an address twice.")
    if entry.discover is not None:
        if entry.addresses:
            raise ConfigError(f"{at} has both addresses and discover: leave one out.")
        try:
            read_source(entry.discover)
        except ConfigError as error:
            raise ConfigError(f"{at}.discover: {error}") from None
    for address in entry.addresses:
        try:
            parts = urlsplit(address)
            if parts.port == 0:
                raise ValueError("no server listens at port 0")
        except ValueError as error:
            raise ConfigError(f"{at}.addresses: {address} is no HTTP address: {error}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{at}.addresses: {address} is no HTTP address, such as http://127.0.0.1:8000.")
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                f"{at}.addresses: leave the user and password out of the address of {parts.hostname}: logs and metrics "
                "show addresses. api_key_env names a key."
            )
        if parts.path.rstrip("/").endswith("/v1"):
            raise ConfigError(f"{at}.addresses: leave /v1 out of {address}; requests bring it.")
