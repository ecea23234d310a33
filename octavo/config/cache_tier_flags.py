"""Checks the flags of the tiers below the device's KV cache: --kv-cache-host-gib and --kv-cache-disk."""

import math
import os
import sys

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import DiskCacheConfig
from octavo.errors import ConfigError

_GIB = 1 << 30


def host_cache_bytes(args: EngineArgs, device: str, *, shares_prefixes: bool) -> int:
    """Return the bytes of host memory for blocks that leave the GPUs, 0 without the flag. Raises `ConfigError` where
    they cannot be kept."""
    if not 0 <= args.kv_cache_host_gib < math.inf:
        raise ConfigError(f"--kv-cache-host-gib must be 0 or more GiB, got {args.kv_cache_host_gib}.")
    if args.kv_cache_host_gib == 0:
        return 0
    if device == "cpu":
        raise ConfigError(
            "--kv-cache-host-gib keeps blocks that leave a GPU, and on CPUs the KV cache is in host memory already; "
            "raise --cpu-memory-utilization instead."
        )
    _check_shares_prefixes("--kv-cache-host-gib", args, shares_prefixes)
    return int(args.kv_cache_host_gib * _GIB)


def _check_shares_prefixes(flag: str, args: EngineArgs, shares_prefixes: bool) -> None:
    if not shares_prefixes:
        reason = "is off" if not args.enable_prefix_caching else "is not possible for this model"
        raise ConfigError(f"{flag} keeps the blocks of the prefix cache, which {reason}; leave it out.")


def disk_cache_config(args: EngineArgs, device: str, *, shares_prefixes: bool) -> DiskCacheConfig | None:
    """Return the configuration of the cache on disk, or None without the flag. Raises `ConfigError` where it cannot be
    kept."""
    if not 0 < args.kv_cache_disk_gib < math.inf:
        raise ConfigError(f"--kv-cache-disk-gib must be above 0 GiB, got {args.kv_cache_disk_gib}.")
    if args.kv_cache_disk is None:
        if args.kv_cache_disk_gib != EngineArgs.kv_cache_disk_gib:
            raise ConfigError("--kv-cache-disk-gib is the size of the folder that --kv-cache-disk names; name one.")
        return None
    if not args.kv_cache_disk:
        raise ConfigError("--kv-cache-disk is empty; name a folder, or leave it out.")
    if sys.platform == "win32":
        raise ConfigError("--kv-cache-disk is not built yet on Windows; leave it out.")
    if device != "cpu" and args.kv_cache_host_gib == 0:
        raise ConfigError(
            "--kv-cache-disk needs --kv-cache-host-gib on GPUs: blocks go to the disk, and come back, by way of host "
            "memory; name a size."
        )
    _check_shares_prefixes("--kv-cache-disk", args, shares_prefixes)
    return DiskCacheConfig(os.path.abspath(os.path.expanduser(args.kv_cache_disk)), int(args.kv_cache_disk_gib * _GIB))
