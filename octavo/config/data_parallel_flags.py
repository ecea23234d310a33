"""Checks the flags of several engines: which engines are on this host, whether all hosts share a server or each has its
own, and who starts the engines of other hosts."""

from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from octavo.config.engine_args import AUTO_LENGTH, EngineArgs
from octavo.config.engine_config import EngineHostsConfig
from octavo.errors import ConfigError
from octavo.node_token import check_token


def local_engines(args: EngineArgs) -> range:
    """Return the numbers of this host's engines."""
    if args.data_parallel_rank is not None:
        return range(args.data_parallel_rank, args.data_parallel_rank + 1)
    first = args.data_parallel_start_rank
    return range(first, first + (args.data_parallel_size_local or args.data_parallel_size))


def has_own_server(args: EngineArgs) -> bool:
    """Return whether this host's engines have a server of their own, and other engines another."""
    return args.data_parallel_rank is not None or args.data_parallel_hybrid_lb


def joins_others(args: EngineArgs) -> bool:
    """Return whether one server serves engines of this host and of other hosts."""
    return len(local_engines(args)) < args.data_parallel_size and not has_own_server(args)


def engine_hosts_config(args: EngineArgs) -> EngineHostsConfig | None:
    """Return the hosts of the engines, or None if all engines are on this host. Raises `ConfigError` for flags that
    cannot be sent to other hosts."""
    own = local_engines(args)
    if len(own) == args.data_parallel_size:
        return None
    address, port, ray_flags = args.data_parallel_address, args.data_parallel_rpc_port, None
    if args.data_parallel_backend == "ray":
        address = "" if address == EngineArgs.data_parallel_address else address
        ray_flags = flags_for_ray(args, "data_parallel_backend")
    return EngineHostsConfig(len(own), own.start, address, port, ray_flags, has_own_server(args))


def flags_for_ray(args: EngineArgs, backend: str) -> dict[str, Any]:
    """Return the flags for hosts that Ray starts; the flag named `backend` is reset to its default, as these hosts must
    not start others. Raises `ConfigError` if a flag is a function."""
    flags = {f.name: getattr(args, f.name) for f in fields(EngineArgs)} | {backend: getattr(EngineArgs, backend)}
    if any(map(callable, flags.values())):
        raise ConfigError(f"{_name(backend)} ray sends the flags to other hosts: none may be a function.")
    return flags


def check_ray_is_here(flag: str) -> None:
    """Raise `ConfigError` if Ray is not installed. `flag` is the flag that asks for it."""
    if find_spec("ray") is None:
        raise ConfigError(f"{flag} ray needs Ray: scripts/install ray, on all hosts.")


def check_data_parallel(args: EngineArgs, device: str) -> None:
    """Raise `ConfigError` if the engines cannot be spread over hosts as the flags ask."""
    size = args.data_parallel_size
    if not 0 < args.data_parallel_rpc_port < 65536:
        raise ConfigError(f"--data-parallel-rpc-port must be between 1 and 65535, got {args.data_parallel_rpc_port}.")
    if args.data_parallel_backend not in ("mp", "ray"):
        raise ConfigError(f"--data-parallel-backend {args.data_parallel_backend} is not built; mp and ray are.")
    if has_own_server(args) or args.data_parallel_external_lb:
        _check_own_server(args)
    elif args.data_parallel_size_local is None and args.data_parallel_start_rank:
        raise ConfigError(
            f"--data-parallel-start-rank {args.data_parallel_start_rank} needs --data-parallel-size-local, the engines "
            "here."
        )
    own = local_engines(args)
    if not 0 <= own.start <= own.stop <= size:
        if args.data_parallel_rank is not None:
            raise ConfigError(
                f"--data-parallel-rank must be 0 to {size - 1}, as --data-parallel-size says, got {own.start}."
            )
        raise ConfigError(
            f"--data-parallel-start-rank {own.start} and --data-parallel-size-local {len(own)} are engines {own.start} "
            f"to {own.stop - 1}, and --data-parallel-size {size} has 0 to {size - 1}."
        )
    if args.data_parallel_backend == "ray":
        _check_ray(args, device)
    if not joins_others(args):
        names = ("data_parallel_address", "data_parallel_rpc_port")
        refuse_idle(
            args, names, "engines of other hosts join: give --data-parallel-size-local below --data-parallel-size"
        )
        return
    if args.max_model_len == AUTO_LENGTH:
        raise ConfigError(
            "--max-model-len auto is not built yet with engines on several hosts, which may have room for different "
            "lengths: give a number."
        )
    if args.data_parallel_backend != "ray":  # with Ray, Octavo makes a token
        check_token(args.data_parallel_address, "--data-parallel-address")


def refuse_idle(args: EngineArgs, names: Sequence[str], why: str) -> None:
    """Raise `ConfigError` for flags about where other hosts join, which have no effect without other hosts."""
    for name in names:
        if getattr(args, name) != getattr(EngineArgs, name):
            raise ConfigError(f"{_name(name)} says where {why}, or leave {_name(name)} out.")


def _check_own_server(args: EngineArgs) -> None:
    flag = "--data-parallel-hybrid-lb" if args.data_parallel_hybrid_lb else "--data-parallel-rank"
    if args.data_parallel_hybrid_lb and args.data_parallel_size_local is None:
        raise ConfigError("--data-parallel-hybrid-lb needs --data-parallel-size-local, the engines of this server.")
    if args.data_parallel_external_lb and args.data_parallel_rank is None:
        raise ConfigError("--data-parallel-external-lb needs --data-parallel-rank, the engine of this server.")
    for name, why in {
        "data_parallel_address": "nobody joins this server",
        "data_parallel_rpc_port": "nobody joins this server",
        "data_parallel_backend": "this server starts nothing on other hosts",
    }.items():
        if getattr(args, name) != getattr(EngineArgs, name):
            raise ConfigError(f"{_name(name)} does not go with {flag}: {why}. Leave one of them out.")
    if args.data_parallel_rank is None:
        return
    is_alone = args.data_parallel_size_local in (None, 1) and not args.data_parallel_start_rank
    if not is_alone or args.data_parallel_hybrid_lb:
        raise ConfigError(
            f"--data-parallel-rank {args.data_parallel_rank} is the one engine of its server. For several leave it "
            "out; --data-parallel-hybrid-lb, --data-parallel-size-local and --data-parallel-start-rank are for those."
        )


def _check_ray(args: EngineArgs, device: str) -> None:
    if args.data_parallel_size_local is None or not joins_others(args):
        raise ConfigError(
            "--data-parallel-backend ray starts engines on other hosts: --data-parallel-size-local must say how many "
            f"of the {args.data_parallel_size} of --data-parallel-size each host has."
        )
    if args.data_parallel_start_rank:
        raise ConfigError("--data-parallel-start-rank is for hosts that are started by hand: leave it out.")
    if device != "cpu":
        raise ConfigError("--data-parallel-backend ray is not built yet with GPUs; leave it out.")
    check_ray_is_here("--data-parallel-backend")


def _name(field: str) -> str:
    return "--" + field.replace("_", "-")
