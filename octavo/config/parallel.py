"""The flags of several workers, checked before and after a model has been found."""

from __future__ import annotations

import logging
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING

from octavo.config.engine_args import AUTO_LENGTH, EngineArgs
from octavo.config.engine_config import EngineHostsConfig, NodesConfig
from octavo.errors import ConfigError
from octavo.hardware import num_cuda_devices
from octavo.node_token import check_token

if TYPE_CHECKING:
    from octavo.models.description import ModelDescription
    from octavo.pooling_params import PoolingConfig

logger = logging.getLogger(__name__)

MAX_GPUS = 8  # whose sums are one tree of `octavo.ops.cuda_collectives`


def check_parallel(args: EngineArgs, device: str) -> None:
    """Raises `ConfigError` for what does not go together with several workers, or not yet."""
    size, num_stages, replicas = args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size
    if args.data_parallel_backend != "mp":
        raise ConfigError(
            f"--data-parallel-backend {args.data_parallel_backend} is not built yet; mp is: processes of each host."
        )
    _check_engine_hosts(args)
    if replicas > 1 and device != "cpu":
        raise ConfigError(f"--data-parallel-size {replicas} is not built yet on GPUs; start a server for each.")
    num_replicas = args.data_parallel_size_local or replicas
    num_workers = num_replicas * size * num_stages // num_nodes(args)  # of this host
    if device == "cuda":
        _check_devices(args, num_workers)
    elif args.cpu_threads is not None and args.cpu_threads < num_workers:
        raise ConfigError(
            f"--cpu-threads {args.cpu_threads} is the number of all workers' threads: less than the "
            f"{num_workers} workers of --tensor-parallel-size, --pipeline-parallel-size and "
            "--data-parallel-size."
        )
    layer_partition(args)
    _check_nodes(args)
    if args.enable_expert_parallel and size == 1:
        raise ConfigError(
            "--enable-expert-parallel shares experts out among the workers of --tensor-parallel-size, which is 1."
        )
    if args.reproducible_parallel and device != "cpu":
        raise ConfigError("--reproducible-parallel is not built yet on GPUs; leave it out.")
    if args.reproducible_parallel and args.enable_lora and size > 1:
        raise ConfigError(
            "--reproducible-parallel is not built yet with --enable-lora: what adapters add is not cut at the same "
            "places for any --tensor-parallel-size; leave one of them out."
        )
    if size * num_stages == 1:
        return
    asked = f"--tensor-parallel-size {size}" if num_stages == 1 else f"--pipeline-parallel-size {num_stages}"
    draws_otherwise = (args.speculative_config or {}).get("synthetic_acceptance_rates") is not None
    guesses_by_model = "model" in (args.speculative_config or {}) or args.speculative_model not in (None, "[ngram]")
    for name, is_asked in {
        "with a model that guesses": guesses_by_model,
        "with synthetic_acceptance_rates": draws_otherwise,
    }.items():
        if is_asked:
            raise ConfigError(f"{asked} is not built yet {name}; leave one of them out.")


def _check_devices(args: EngineArgs, num_workers: int) -> None:
    size, num_stages, found = args.tensor_parallel_size, args.pipeline_parallel_size, num_cuda_devices()
    if num_nodes(args) > 1:
        raise ConfigError("several hosts (--nnodes, ray) are not built yet with GPUs; leave them out.")
    if size > MAX_GPUS:
        raise ConfigError(f"--tensor-parallel-size {size} is more than the {MAX_GPUS} GPUs that may share a layer.")
    if num_workers > max(1, found):
        raise ConfigError(
            f"--tensor-parallel-size {size} times --pipeline-parallel-size {num_stages} is {num_workers} GPUs, one for "
            f"each worker, and there are {found} here (as CUDA_VISIBLE_DEVICES says)."
        )


def is_reproducible(args: EngineArgs, device: str) -> bool | None:
    """Of `EngineConfig`: products of GPUs are not cut into segments."""
    return args.reproducible_parallel if device == "cpu" else False


def uses_ray(args: EngineArgs) -> bool:
    """Whether Ray starts the nodes other than this one."""
    return args.distributed_executor_backend == "ray"


def num_nodes(args: EngineArgs) -> int:
    """Hosts that share the stages out; with Ray one for each, unless --nnodes says otherwise."""
    return args.pipeline_parallel_size if uses_ray(args) and args.nnodes == 1 else args.nnodes


def nodes_config(args: EngineArgs) -> NodesConfig:
    """Raises `ConfigError` for flags that other hosts cannot be told."""
    if not uses_ray(args):
        return NodesConfig(args.nnodes, args.node_rank, args.master_addr, args.master_port)
    flags = {f.name: getattr(args, f.name) for f in fields(EngineArgs)} | {"distributed_executor_backend": None}
    if any(map(callable, flags.values())):
        raise ConfigError("--distributed-executor-backend ray tells other hosts the flags: none may be a function.")
    address = "" if args.master_addr == EngineArgs.master_addr else args.master_addr
    return NodesConfig(num_nodes(args), 0, address, args.master_port, flags)


def _check_ray(args: EngineArgs) -> None:
    backend = args.distributed_executor_backend
    if backend not in (None, "mp", "ray"):
        raise ConfigError(f"--distributed-executor-backend {backend} is not built; mp and ray are.")
    if not uses_ray(args):
        return
    if args.pipeline_parallel_size == 1:
        raise ConfigError(
            "--distributed-executor-backend ray shares the stages of --pipeline-parallel-size out among hosts, and "
            "that is 1: leave the backend out."
        )
    if args.node_rank:
        raise ConfigError("--node-rank is for nodes that are started by hand, and Ray starts them: leave it out.")
    if find_spec("ray") is None:
        raise ConfigError("--distributed-executor-backend ray needs Ray: pip install 'octavo[ray]', on all hosts.")


def _check_nodes(args: EngineArgs) -> None:
    _check_ray(args)
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(f"--node-rank must be 0 to {args.nnodes - 1}, as --nnodes says, got {args.node_rank}.")
    if not 0 < args.master_port < 65536:
        raise ConfigError(f"--master-port must be between 1 and 65535, got {args.master_port}.")
    if num_nodes(args) == 1:
        return
    if args.pipeline_parallel_size % num_nodes(args):
        raise ConfigError(
            f"--nnodes {args.nnodes} shares out the stages of --pipeline-parallel-size, which is "
            f"{args.pipeline_parallel_size}: it must be a multiple. --tensor-parallel-size is within each host."
        )
    if args.data_parallel_size > 1:
        several = "--distributed-executor-backend ray" if uses_ray(args) else "--nnodes"
        raise ConfigError(f"{several} is not built yet with --data-parallel-size; leave one of them out.")
    if not uses_ray(args):  # for which a token is made
        check_token(args.master_addr, "--master-addr")


def _check_engine_hosts(args: EngineArgs) -> None:
    size, num_local, first = args.data_parallel_size, args.data_parallel_size_local, args.data_parallel_start_rank
    if not 0 < args.data_parallel_rpc_port < 65536:
        raise ConfigError(f"--data-parallel-rpc-port must be between 1 and 65535, got {args.data_parallel_rpc_port}.")
    if num_local is None and first:
        raise ConfigError(f"--data-parallel-start-rank {first} needs --data-parallel-size-local, the engines here.")
    num_local = num_local or size
    if not 0 <= first <= first + num_local <= size:
        raise ConfigError(
            f"--data-parallel-start-rank {first} and --data-parallel-size-local {num_local} are engines {first} to "
            f"{first + num_local - 1}, and --data-parallel-size {size} has 0 to {size - 1}."
        )
    if num_local == size:
        return
    if args.max_model_len == AUTO_LENGTH:
        raise ConfigError(
            "--max-model-len auto is not built yet with engines on several hosts, which may have room for different "
            "lengths: give a number."
        )
    check_token(args.data_parallel_address, "--data-parallel-address")


def engine_hosts_config(args: EngineArgs) -> EngineHostsConfig | None:
    """None where all engines are on this host."""
    if args.data_parallel_size_local in (None, args.data_parallel_size):
        return None
    return EngineHostsConfig(
        args.data_parallel_size_local, args.data_parallel_start_rank, args.data_parallel_address,
        args.data_parallel_rpc_port,
    )  # fmt: skip


def layer_partition(args: EngineArgs) -> list[int] | None:
    """Layers of each stage, where that is given. Raises `ConfigError`."""
    given = args.pipeline_layer_partition
    if given is None:
        return None
    counts = given.split(",")
    if args.pipeline_parallel_size == 1 or not all(count.strip().isdecimal() for count in counts):
        raise ConfigError(
            f"--pipeline-layer-partition {given} must be numbers with commas between, one for each of the stages of "
            f"--pipeline-parallel-size, which is {args.pipeline_parallel_size}."
        )
    return [int(count) for count in counts]


def check_shared(
    args: EngineArgs, description: ModelDescription, pooling: PoolingConfig | None, device: str
) -> None:  # fmt: skip
    """Raises `ConfigError` for a model that so many workers cannot share, or not yet."""
    size, num_stages = args.tensor_parallel_size, args.pipeline_parallel_size
    if size * num_stages == 1:
        return
    from octavo.layers.share import Share
    from octavo.models.sharing import stage_layers, why_not_reproducible, with_share, with_stage

    if pooling is not None:
        name = "tensor" if num_stages == 1 else "pipeline"
        raise ConfigError(f"--{name}-parallel-size is not built yet for models that pool; leave it out.")
    reproducible = is_reproducible(args, device)
    shared = with_share(description, Share(0, size), args.enable_expert_parallel, reproducible)
    if reproducible is not False and (reason := why_not_reproducible(description, size)) is not None:
        if reproducible:
            raise ConfigError(
                f"--reproducible-parallel is not possible with --tensor-parallel-size {size}: {reason}; leave one of "
                "them out."
            )
        logger.info("Answers are not to the bit those of another --tensor-parallel-size: %s.", reason)
    for layers in stage_layers(len(description.layers), num_stages, layer_partition(args)):
        with_stage(shared, layers)
