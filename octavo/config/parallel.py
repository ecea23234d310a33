"""The flags of several workers, checked before and after a model has been found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.config.engine_args import EngineArgs
from octavo.errors import ConfigError
from octavo.node_token import check_token

if TYPE_CHECKING:
    from octavo.models.description import ModelDescription
    from octavo.pooling_params import PoolingConfig


def check_parallel(args: EngineArgs, device: str) -> None:
    """Raises `ConfigError` for what does not go together with several workers, or not yet."""
    size, num_stages, replicas = args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size
    for flag, backend in (
        ("distributed-executor-backend", args.distributed_executor_backend),
        ("data-parallel-backend", args.data_parallel_backend),
    ):
        if backend not in (None, "mp"):
            raise ConfigError(f"--{flag} {backend} is not built yet; mp is, processes of one host.")
    if args.data_parallel_size_local not in (None, replicas):
        raise ConfigError(
            f"--data-parallel-size-local {args.data_parallel_size_local} of --data-parallel-size {replicas}: several "
            "hosts are not built yet; leave it out."
        )
    if replicas > 1 and device != "cpu":
        raise ConfigError(f"--data-parallel-size {replicas} is not built yet on GPUs; start a server for each.")
    num_workers = replicas * size * num_stages // args.nnodes  # of this host
    if args.cpu_threads is not None and args.cpu_threads < num_workers:
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
    if size * num_stages == 1:
        return
    asked = f"--tensor-parallel-size {size}" if num_stages == 1 else f"--pipeline-parallel-size {num_stages}"
    draws_otherwise = (args.speculative_config or {}).get("synthetic_acceptance_rates") is not None
    guesses_by_model = "model" in (args.speculative_config or {}) or args.speculative_model not in (None, "[ngram]")
    for name, is_asked in {
        "on GPUs": device != "cpu",
        "with a model that guesses": guesses_by_model,
        "with synthetic_acceptance_rates": draws_otherwise,
    }.items():
        if is_asked:
            raise ConfigError(f"{asked} is not built yet {name}; leave one of them out.")


def _check_nodes(args: EngineArgs) -> None:
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(f"--node-rank must be 0 to {args.nnodes - 1}, as --nnodes says, got {args.node_rank}.")
    if not 0 < args.master_port < 65536:
        raise ConfigError(f"--master-port must be between 1 and 65535, got {args.master_port}.")
    if args.nnodes == 1:
        return
    if args.pipeline_parallel_size % args.nnodes:
        raise ConfigError(
            f"--nnodes {args.nnodes} shares out the stages of --pipeline-parallel-size, which is "
            f"{args.pipeline_parallel_size}: it must be a multiple. --tensor-parallel-size is within each host."
        )
    if args.data_parallel_size > 1:
        raise ConfigError("--nnodes is not built yet with --data-parallel-size; leave one of them out.")
    check_token(args.master_addr)


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


def check_shared(args: EngineArgs, description: ModelDescription, pooling: PoolingConfig | None) -> None:
    """Raises `ConfigError` for a model that so many workers cannot share, or not yet."""
    size, num_stages = args.tensor_parallel_size, args.pipeline_parallel_size
    if size * num_stages == 1:
        return
    from octavo.layers.share import Share
    from octavo.models.sharing import stage_layers, with_share, with_stage

    if pooling is not None:
        name = "tensor" if num_stages == 1 else "pipeline"
        raise ConfigError(f"--{name}-parallel-size is not built yet for models that pool; leave it out.")
    shared = with_share(description, Share(0, size), args.enable_expert_parallel)
    for layers in stage_layers(len(description.layers), num_stages, layer_partition(args)):
        with_stage(shared, layers)
