"""The flags of several workers, checked before a model has been found."""

from __future__ import annotations

from octavo.config.engine_args import EngineArgs
from octavo.errors import ConfigError


def check_parallel(args: EngineArgs, device: str) -> None:
    """Raises `ConfigError` for what does not go together with several workers, or not yet."""
    size = args.tensor_parallel_size
    backend = args.distributed_executor_backend
    if backend not in (None, "mp"):
        raise ConfigError(f"--distributed-executor-backend {backend} is not built yet; mp is, processes of one host.")
    if size == 1:
        return
    draws_otherwise = (args.speculative_config or {}).get("synthetic_acceptance_rates") is not None
    guesses_by_model = "model" in (args.speculative_config or {}) or args.speculative_model not in (None, "[ngram]")
    for name, is_asked in {
        "on GPUs": device != "cpu",
        "with --enable-lora": args.enable_lora,
        "with a model that guesses": guesses_by_model,
        "with synthetic_acceptance_rates": draws_otherwise,
    }.items():
        if is_asked:
            raise ConfigError(f"--tensor-parallel-size {size} is not built yet {name}; leave one of them out.")
    if args.cpu_threads is not None and args.cpu_threads < size:
        raise ConfigError(
            f"--cpu-threads {args.cpu_threads} is the number of all workers' threads: less than --tensor-parallel-size "
            f"{size}."
        )
