"""Checks the flags of several workers, before and after a model has been found."""

import logging

from octavo.config.data_parallel_flags import (
    check_data_parallel,
    check_ray_is_here,
    flags_for_ray,
    joins_others,
    local_engines,
    refuse_idle,
)
from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import NodesConfig
from octavo.config.speculation_flags import speculative_config
from octavo.errors import ConfigError
from octavo.hardware import expects_cuda, num_cuda_devices
from octavo.models.description import ModelDescription
from octavo.node_token import check_token
from octavo.speculative_config import DRAFT_METHODS, HEAD_METHODS

logger = logging.getLogger(__name__)

MAX_GPUS = 8  # the most that one tree of sums in `octavo.ops.cuda_collectives` spans


def check_parallel(args: EngineArgs, device: str) -> None:
    """Raise `ConfigError` for flags that do not work with several workers."""
    size, num_stages = args.tensor_parallel_size, args.pipeline_parallel_size
    check_data_parallel(args, device)
    num_workers = len(local_engines(args)) * size * num_stages // num_nodes(args, device)  # on this host
    if device == "cuda":
        _check_devices(args, num_workers)
    elif args.cpu_threads is not None and args.cpu_threads < num_workers:
        raise ConfigError(
            f"--cpu-threads {args.cpu_threads} is for all workers together, and --tensor-parallel-size, "
            f"--pipeline-parallel-size and --data-parallel-size make {num_workers}; give each a thread."
        )
    layer_partition(args)
    _check_nodes(args, device)
    if args.enable_expert_parallel and size == 1:
        raise ConfigError(
            "--enable-expert-parallel shares experts out among the workers of --tensor-parallel-size, which is 1."
        )
    if args.reproducible_parallel and device != "cpu":
        raise ConfigError("--reproducible-parallel is not built yet on GPUs; leave it out.")
    if args.reproducible_parallel and args.enable_lora and size > 1:
        raise ConfigError(
            "--reproducible-parallel is not built yet with --enable-lora: the terms of adapters are cut at "
            "other places for another --tensor-parallel-size. Leave one of them out."
        )
    if size * num_stages == 1:
        return
    asked = f"--tensor-parallel-size {size}" if num_stages == 1 else f"--pipeline-parallel-size {num_stages}"
    speculative = speculative_config(args)
    if speculative is None:
        return
    method = speculative.method
    for name, is_asked in {
        f"with {method}, which reads the model's hidden states, on GPUs": device == "cuda" and method in HEAD_METHODS,
        "with a draft model on GPUs": device == "cuda" and method in DRAFT_METHODS,
        "with synthetic_acceptance_rates": speculative.synthetic_acceptance_rates is not None,
    }.items():
        if is_asked:
            raise ConfigError(f"{asked} is not built yet {name}; leave one of them out.")


def _check_devices(args: EngineArgs, num_workers: int) -> None:
    size, num_stages, found = args.tensor_parallel_size, args.pipeline_parallel_size, num_cuda_devices()
    if uses_ray(args, "cuda"):
        raise ConfigError(
            "--distributed-executor-backend ray with --pipeline-parallel-size reserves no GPUs on Ray's hosts yet; "
            f"start them by hand with --nnodes, or ask for no more than the {found} GPUs of this host."
        )
    if size > MAX_GPUS:
        raise ConfigError(f"--tensor-parallel-size {size} is more than the {MAX_GPUS} GPUs that may share a layer.")
    if num_workers > max(1, found) and not expects_cuda():
        engines = len(local_engines(args))
        times = f" times {engines} engines of --data-parallel-size" if engines > 1 else ""
        over = f", over --nnodes {args.nnodes}," if args.nnodes > 1 else ""
        raise ConfigError(
            f"--tensor-parallel-size {size} times --pipeline-parallel-size {num_stages}{times}{over} is {num_workers} "
            f"GPUs, one for each worker, and there are {found} here (as CUDA_VISIBLE_DEVICES says)."
        )


def is_reproducible(args: EngineArgs, device: str) -> bool | None:
    """Return `EngineConfig.reproducible_parallel`. It is False on GPUs, which do not cut products into segments."""
    return args.reproducible_parallel if device == "cpu" else False


def uses_ray(args: EngineArgs, device: str) -> bool:
    """Return whether Ray starts the other nodes. There are no other nodes without stages, or if this host has a GPU for
    each worker: this host starts all workers itself, whatever the backend."""
    if args.distributed_executor_backend != "ray" or args.pipeline_parallel_size == 1:
        return False
    num_workers = len(local_engines(args)) * args.tensor_parallel_size * args.pipeline_parallel_size
    has_all = device == "cuda" and (expects_cuda() or num_workers <= num_cuda_devices())
    return args.nnodes > 1 or not has_all


def num_nodes(args: EngineArgs, device: str) -> int:
    """Return the number of hosts that share the stages. With Ray each stage has a host, unless --nnodes says
    otherwise."""
    return args.pipeline_parallel_size if uses_ray(args, device) and args.nnodes == 1 else args.nnodes


def nodes_config(args: EngineArgs, device: str) -> NodesConfig:
    """Return the hosts of the stages. Raises `ConfigError` for flags that cannot be sent to other hosts."""
    if not uses_ray(args, device):
        return NodesConfig(args.nnodes, args.node_rank, args.master_addr, args.master_port)
    flags = flags_for_ray(args, "distributed_executor_backend")
    address = "" if args.master_addr == EngineArgs.master_addr else args.master_addr
    return NodesConfig(num_nodes(args, device), 0, address, args.master_port, flags)


def _check_ray(args: EngineArgs, device: str) -> None:
    backend = args.distributed_executor_backend
    if backend not in (None, "mp", "ray"):
        raise ConfigError(f"--distributed-executor-backend {backend} is not built; mp and ray are.")
    if not uses_ray(args, device):
        if backend == "ray":
            logger.info(
                "--distributed-executor-backend ray: all workers are on this host, which starts them itself; Ray is "
                "asked for other hosts, with --pipeline-parallel-size on CPUs."
            )
        return
    if args.node_rank:
        raise ConfigError("--node-rank is for nodes that are started by hand, and Ray starts them: leave it out.")
    check_ray_is_here("--distributed-executor-backend")


def _check_nodes(args: EngineArgs, device: str) -> None:
    _check_ray(args, device)
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(f"--node-rank must be 0 to {args.nnodes - 1}, as --nnodes says, got {args.node_rank}.")
    if not 0 < args.master_port < 65536:
        raise ConfigError(f"--master-port must be between 1 and 65535, got {args.master_port}.")
    if num_nodes(args, device) == 1:
        refuse_idle(args, ("master_addr", "master_port"), "other hosts join: give --nnodes, too")
        return
    if args.pipeline_parallel_size % num_nodes(args, device):
        raise ConfigError(
            f"--nnodes {args.nnodes} shares out the stages of --pipeline-parallel-size, which is "
            f"{args.pipeline_parallel_size}: it must be a multiple. --tensor-parallel-size is within each host."
        )
    if len(local_engines(args)) > 1 or joins_others(args):
        several = "--distributed-executor-backend ray" if uses_ray(args, device) else "--nnodes"
        raise ConfigError(
            f"{several} is not built yet with --data-parallel-size, except where each engine has a server of its own "
            "(--data-parallel-rank); leave one of them out."
        )
    if not uses_ray(args, device):  # with Ray, Octavo makes a token
        check_token(args.master_addr, "--master-addr")


def layer_partition(args: EngineArgs) -> list[int] | None:
    """Return the number of layers of each stage, or None without --pipeline-layer-partition. Raises `ConfigError`."""
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


def check_shared(args: EngineArgs, description: ModelDescription, device: str) -> None:
    """Raise `ConfigError` if the workers of the flags cannot share the model."""
    size, num_stages = args.tensor_parallel_size, args.pipeline_parallel_size
    if size * num_stages == 1:
        return
    from octavo.layers.tensor_parallel import Shard
    from octavo.models.sharding import stage_layers, why_not_reproducible, with_shard, with_stage

    reproducible = is_reproducible(args, device)
    shared = with_shard(description, Shard(0, size), args.enable_expert_parallel, reproducible)
    if reproducible is not False and (reason := why_not_reproducible(description, size)) is not None:
        if reproducible:
            raise ConfigError(
                f"--reproducible-parallel is not possible with --tensor-parallel-size {size}: {reason}; leave one of "
                "them out."
            )
        logger.info("Answers of another --tensor-parallel-size can have other bits: %s.", reason)
    for layers in stage_layers(description, num_stages, layer_partition(args)):
        with_stage(shared, layers)
