"""Checks --kv-events-config and makes the `KVEventsConfig`."""

import re
from dataclasses import fields

import msgspec

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import KVEventsConfig
from octavo.errors import ConfigError

_FLAG = "--kv-events-config"


def kv_events_config(args: EngineArgs, *, shares_prefixes: bool) -> KVEventsConfig | None:
    """Return the configuration of the cache's events, or None if none are published. Raises `ConfigError`."""
    if args.kv_events_config is None:
        return None
    known = [one.name for one in fields(KVEventsConfig)]
    if unknown := sorted(args.kv_events_config.keys() - set(known)):
        raise ConfigError(f"{_FLAG} has no {unknown[0]!r}; it takes {', '.join(known)}.")
    try:
        config = msgspec.convert(args.kv_events_config, KVEventsConfig)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{_FLAG}: {e}.") from None
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{_FLAG}: {name} must be at least 1, got {getattr(config, name)}.")
    for endpoint in (config.endpoint, config.replay_endpoint):
        if endpoint is not None and not re.fullmatch(r"tcp://.+:\d{1,5}|ipc://.+", endpoint):
            raise ConfigError(f"{_FLAG}: {endpoint!r} is no endpoint; write tcp://*:5557 or ipc:///run/events.")
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    if not shares_prefixes:
        reason = "is off" if not args.enable_prefix_caching else "is not possible for this model"
        raise ConfigError(f"{_FLAG} publishes the blocks of the prefix cache, which {reason}; leave it out.")
    return config
