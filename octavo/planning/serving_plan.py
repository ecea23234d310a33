"""Makes a plan of a model: its memory, how many requests fit, how fast it runs and what limits its speed.

`make_plan` returns plain data; `SCHEMA_VERSION` is the version of its form. `octavo plan --json` prints the data,
`as_text` makes a table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError, LoadError
from octavo.execution import capacity
from octavo.execution.block_mover import staging_bytes
from octavo.loading.file_weights import open_weights
from octavo.loading.memory import available_memory_bytes
from octavo.loading.recording import RecordingWeights
from octavo.loading.weights import Weights
from octavo.models.description import ModelDescription
from octavo.models.inventory import record
from octavo.models.registry import describe
from octavo.planning.cache_sizes import CacheSizes, cache_sizes
from octavo.planning.step_limits import Gpu, GpuSteps, Limit, Rates, StepLimits, model_work
from octavo.planning.weight_formats import AS_IS, FORMATS, packed_weight_bytes, weights_in, weights_like
from octavo.speculative_config import SpeculativeConfig
from octavo.step_cost import StepCost, StepWork

SCHEMA_VERSION = 1
GIB = 1 << 30
_GPU_RESERVE_BYTES = GIB  # the CUDA context, kernels, activations of a step of 2,048 tokens
# A limit below this share of the time is not worth naming.
_LEAST_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of `make_plan`."""

    format: str = AS_IS
    gpu: Gpu | None = None  # None: this machine's processors
    num_gpus: int = 1
    lengths: Sequence[int] = ()  # of requests: tokens of prompt and output
    prompt_tokens: int = 512
    context: int = 256  # tokens of each sequence in decode steps
    batch_sizes: Sequence[int] = (1, 4, 16, 64)
    measures: bool = True  # whether to measure steps on this machine's processors

    def __post_init__(self) -> None:
        if self.format == "fp8" and self.gpu is None:
            raise ConfigError("--format fp8 is for GPUs; int8 is for every device.")


def make_plan(config: EngineConfig, options: PlanOptions) -> dict[str, Any]:
    """Return the plan as plain data. `config` is an engine's on the CPU; differences of GPUs are handled here. Reads
    only the headers of weight files.

    Raises `ConfigError` and `LoadError`."""
    checkpoint, dtype = config.model.checkpoint, config.model.dtype
    description = describe(checkpoint.config, config.model.impl, config.model.code_folder, config.model.pooling)
    if description.impl != "octavo":
        raise ConfigError(f"{checkpoint.name} runs through transformers, which gives no sizes before it runs.")
    if description.num_cross_tokens:
        raise ConfigError(f"{checkpoint.name} has cross attention to media; plans of such models are not built yet.")
    weights, notes = _weights(config, description, options)
    if options.format != AS_IS:
        dtype = "bfloat16"  # of weights that are not quantized
    try:
        recorded = RecordingWeights(dtype, weights)
        record(description, recorded)
        weight_bytes, kinds = recorded.packed_bytes(keeps_superblocks=options.gpu is None)
        table_bytes = config.model.max_model_len * recorded.position_bytes
        caches = _caches(config, description, dtype, options.gpu is not None)
        memory = _gpu_memory(config, options, description) if options.gpu else available_memory_bytes()
        placed = _Placed(config, options, weight_bytes + table_bytes, memory, caches[0][1])
        layout = _layout(placed, description, options)
        lengths = options.lengths or _lengths(config.model.max_model_len)
        if staging := placed.staging_bytes(max(1, layout["devices_per_replica"])):
            notes.append(f"{_gib(staging)} of each device are for moves of blocks to and from host memory.")
        plan: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "model": {
                "name": checkpoint.name,
                "architecture": description.architecture,
                "num_layers": len(description.layers),
                "num_parameters": model_work(description).num_parameters,
                "max_model_len": config.model.max_model_len,
                "dtype": dtype,
                "format": options.format,
                "held_in": kinds,
                "weight_bytes": weight_bytes,
            },
            "device": _device(options, memory),
            "weights": _formats(description, placed),
            "cache": [_cache(name, sizes) for name, sizes in caches],
            "layout": layout,
            "requests": [
                {
                    "length": length,
                    "bytes": caches[0][1].request_bytes(length),
                    "at_once": placed.num_requests(length, layout["devices_per_replica"]) if layout["fits"] else 0,
                }
                for length in lengths
            ],
            "prefill": [],
            "decode": [],
            "notes": notes,
        }
        if layout["fits"] and config.model.pooling is None:
            timed = dtype, weights, weight_bytes, caches[0][1]
            plan["prefill"], plan["decode"] = _rates(config, description, options, timed, plan)
        return plan
    finally:
        weights.close()


def _weights(config: EngineConfig, description: ModelDescription, options: PlanOptions) -> tuple[Weights, list[str]]:
    """Return the weights that the plan is for, and notes about them. Raises `ConfigError`."""
    checkpoint, wanted = config.model.checkpoint, options.format
    if wanted != AS_IS:
        return weights_in(wanted, description), []
    settings = checkpoint.config.get("quantization_config")
    if checkpoint.format == "dummy" and settings:
        bits = settings.get("bits") or settings.get("weight_bits") or (4 if "4" in str(settings) else 8)
        method = settings.get("quant_method")
        stands_in = "int4" if int(bits) == 4 else "int8"
        return weights_in(stands_in, description), [
            f"Its files are not here: its {method} weights are taken to be as large as {stands_in}."
        ]
    opened = open_weights(checkpoint, config.model.dtype, 0, None, description.tie_word_embeddings)
    return opened, []


def _caches(
    config: EngineConfig, description: ModelDescription, dtype: str, on_gpu: bool
) -> list[tuple[str, CacheSizes]]:
    """Return cache types and their sizes: the configured type first, then alternatives."""
    own = dtype if config.cache.dtype == config.model.dtype else config.cache.dtype
    found = []
    # No eight-bit cache for models with an index, whose keys have no scales (`check_cache_of_index`).
    bytes_too = () if description.num_chosen_keys else ("float8_e4m3fn" if on_gpu else "int8",)
    for name in dict.fromkeys((own, dtype, *bytes_too)):
        try:
            found.append((name, cache_sizes(config, description.layer_caches, name, on_gpu)))
        except ConfigError:
            if name == own:
                raise
    return found


def _cache(name: str, sizes: CacheSizes) -> dict[str, Any]:
    return {
        "dtype": name,
        "bytes_per_token": sizes.token_bytes,
        "bytes_per_token_beyond_windows": sizes.later_token_bytes,
        "state_bytes_per_request": sizes.state_bytes,
    }


def _formats(description: ModelDescription, placed: _Placed) -> list[dict[str, Any]]:
    """Return the size of the weights in each format."""
    found, options = [], placed.options
    parameters = model_work(description).num_parameters
    for name in FORMATS:
        if name == "fp8" and options.gpu is None:
            continue
        try:
            own = weights_in(name, description)
            num_bytes, _ = packed_weight_bytes(description, own, "bfloat16", on_gpu=options.gpu is not None)
        except (ConfigError, LoadError):  # some matrices of the model cannot have this format
            continue
        found.append(
            {
                "format": name,
                "bytes": num_bytes,
                "bits_per_weight": round(8 * num_bytes / parameters, 2),
                "fits_one_device": num_bytes < placed.usable_bytes(1),
                "fits_all_devices": num_bytes < placed.usable_bytes(options.num_gpus),
            }
        )
    return found


def _lengths(longest: int) -> list[int]:
    return [length for length in (512, 2048, 8192, 32768, 131072) if length < longest] + [longest]


def _gpu_memory(config: EngineConfig, options: PlanOptions, description: ModelDescription) -> int:
    """Return the bytes of one GPU that weights and cache may use."""
    assert options.gpu is not None
    logits_bytes = 3 * 4 * config.scheduler.max_num_seqs * description.vocab_size
    share = config.cache.gpu_memory_utilization
    return int(options.gpu.memory_bytes * share) - _GPU_RESERVE_BYTES - logits_bytes


def _device(options: PlanOptions, memory: int) -> dict[str, Any]:
    if options.gpu is None:
        return {"kind": "cpu", "name": "this machine's processors", "count": 1, "usable_bytes": memory}
    return {"kind": "gpu", "name": options.gpu.name, "count": options.num_gpus, "usable_bytes": memory}


@dataclass(frozen=True, slots=True)
class _Placed:
    """A model's weights and cache in the memory of devices that share them."""

    config: EngineConfig
    options: PlanOptions
    weight_bytes: int
    memory_bytes: int  # of one device
    sizes: CacheSizes

    def cache_bytes(self, num_devices: int) -> int:
        """Return the bytes left for the cache, over all devices together."""
        left = self.usable_bytes(num_devices) - self.weight_bytes
        return left if self.options.gpu else int(left * self.config.cache.cpu_memory_utilization)

    def usable_bytes(self, num_devices: int) -> int:
        """Return the bytes that weights and cache may use of devices that share them."""
        return num_devices * (self.memory_bytes - self.staging_bytes(num_devices))

    def staging_bytes(self, num_devices: int) -> int:
        """Return the bytes of one of the GPUs that moves of blocks to and from host memory take."""
        if self.options.gpu is None:
            return 0
        host_bytes = capacity.host_bytes(replace(self.config, tensor_parallel_size=self.options.num_gpus))
        return sum(staging_bytes(size // num_devices, host_bytes) for size in self.sizes.block_bytes)

    def num_requests(self, length: int, num_devices: int) -> int:
        found = self.sizes.num_requests(length, self.cache_bytes(num_devices))
        return min(found, self.config.scheduler.max_num_seqs)

    def fits(self, num_devices: int) -> bool:
        """Return whether a request of the greatest length fits."""
        return self.sizes.num_requests(self.config.model.max_model_len, self.cache_bytes(num_devices)) > 0


def _layout(placed: _Placed, description: ModelDescription, options: PlanOptions) -> dict[str, Any]:
    """Return the smallest number of devices that hold the model and its longest request, and how many such replicas the
    devices make."""
    count = options.num_gpus if options.gpu else 1
    heads = [spec.num_kv_heads for spec in description.layer_caches if spec.num_kv_heads > 1]
    sizes = [n for n in (1, 2, 4, 8) if n <= count and all(h % n == 0 or n % h == 0 for h in heads)]
    chosen = next((n for n in sizes if placed.fits(n)), None)
    if chosen is None:
        longest = placed.config.model.max_model_len
        over = placed.weight_bytes + placed.sizes.request_bytes(longest)
        # With the tables of positions of the present length: with shorter ones a little more fits.
        fitting = bisect_right(range(1, longest), placed.cache_bytes(sizes[-1]), key=placed.sizes.request_bytes)
        shorter = f"lower --max-model-len to {fitting}, or " if fitting else ""
        reason = (
            f"the weights and one request of {longest} tokens take {over / GIB:.2f} GiB, and there are "
            f"{sizes[-1] * placed.memory_bytes / GIB:.2f} GiB; {shorter}take a smaller --format or more memory."
        )
        return {"fits": False, "reason": reason, "devices_per_replica": 0, "replicas": 0, "cache_bytes": 0}
    return {
        "fits": True,
        "reason": None,
        "devices_per_replica": chosen,
        "replicas": count // chosen,
        "cache_bytes": placed.cache_bytes(chosen),
    }


def _speculation_note(speculative: SpeculativeConfig) -> str:
    """Return the note that predicted rates of decoding are without draft tokens."""
    most = speculative.disable_by_batch_size
    bound = "" if most is None else f" for up to {most} at once"
    return (
        f"Decoding is without draft tokens, which the engine tries{bound}: text that repeats comes faster "
        "(docs/speculation.md)."
    )


def _rates(
    config: EngineConfig,
    description: ModelDescription,
    options: PlanOptions,
    timed: tuple[str, Weights, int, CacheSizes],
    plan: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the predicted rates of one replica: of prompts and of decode steps."""
    dtype, weights, weight_bytes, sizes = timed
    token_bytes = sizes.token_bytes, sizes.later_token_bytes
    limits = StepLimits(model_work(description), description.layer_caches, weight_bytes, token_bytes)
    cost: StepCost
    if options.gpu is not None:
        cost = steps = GpuSteps(options.gpu.machine, limits, plan["layout"]["devices_per_replica"])
        limit_of = steps.limit
        plan["notes"].append("Rates of GPUs are computed from such devices' bandwidth and peak, not measured here.")
    elif not options.measures:
        return [], []
    else:
        from octavo.ops import load
        from octavo.planning.machine_speed import measure_speed
        from octavo.planning.measured_steps import measure_steps

        load(config.cpu_threads, config.cpus)
        speed = measure_speed()
        own = weights_like(weights, description, dtype)
        cost = measure_steps(replace(config, cache=sizes.config.cache), description, own, dtype)
        if config.speculative is not None:
            plan["notes"].append(_speculation_note(config.speculative))
        is_quantized = plan["model"]["held_in"] not in ("bfloat16", "float32")
        rates = Rates(speed.bytes_per_s, speed.operations_per_s(is_quantized), speed.bf16_per_s)
        plan["device"] |= {"bytes_per_s": speed.bytes_per_s, "operations_per_s": rates.products_per_s}

        def limit_of(step: StepWork) -> Limit:
            return limits.of(step, rates)

    def entry(step: StepWork, seconds: float, num_tokens: int) -> dict[str, Any]:
        limit = limit_of(step)
        name = (
            limit.name if limit.seconds > _LEAST_SHARE * seconds else "no single one: small kernels, threads that wait"
        )
        return {"seconds": seconds, "tokens_per_s": num_tokens / seconds, "limit": name, "limit_seconds": limit.seconds}

    longest, chunk = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    prefill, decode = [], []
    for length in dict.fromkeys((min(options.prompt_tokens, longest), min(4 * options.prompt_tokens, longest))):
        seconds = sum(cost.seconds(step) for step in _chunks(length, chunk))
        whole = StepWork.of([(0, 0, length, 1, 1, ())])
        prefill.append({"prompt_tokens": length, **entry(whole, seconds, length)})
    context = min(options.context, longest)
    most = min(sizes.num_requests(context, plan["layout"]["cache_bytes"]), config.scheduler.max_num_seqs)
    for batch in options.batch_sizes:
        if batch > most:
            continue
        step = StepWork.of([(0, context - 1, 1, 1, 1, ())] * batch)
        decode.append({"batch": batch, "context": context, **entry(step, cost.seconds(step), batch)})
    return prefill, decode


def _chunks(length: int, chunk: int) -> Iterable[StepWork]:
    """Yield the steps of a prompt."""
    for begin in range(0, length, chunk):
        end = min(length, begin + chunk)
        yield StepWork.of([(0, begin, end - begin, int(end == length), 1, ())])


def _fit(weights: dict[str, Any]) -> str:
    if weights["fits_one_device"]:
        return ""
    return "more than one device" if weights["fits_all_devices"] else "too large"


def as_text(plan: dict[str, Any]) -> str:
    """Return the plan as tables for people."""
    model, device, layout = plan["model"], plan["device"], plan["layout"]
    lines = [
        f"{model['name']}: {model['architecture']}, {_count(model['num_parameters'])} parameters in "
        f"{model['num_layers']} layers, {model['max_model_len']} tokens",
        f"on {device['count']} x {device['name']}, {_gib(device['usable_bytes'])} usable"
        + (
            f" each; {device['bytes_per_s'] / 1e9:.1f} GB/s and {device['operations_per_s'] / 1e9:.0f} GOP/s measured"
            if "bytes_per_s" in device
            else " each" * (device["kind"] == "gpu")
        ),
        "",
        "Weights in memory",
    ]
    own = (f"{model['format']} ({model['held_in']})", model["weight_bytes"], 8 * model["weight_bytes"])
    rows = [(own[0], _gib(own[1]), f"{own[2] / model['num_parameters']:.1f} bits", "planned for")]
    rows += [(w["format"], _gib(w["bytes"]), f"{w['bits_per_weight']:.1f} bits", _fit(w)) for w in plan["weights"]]
    lines += _table(rows)
    lines += ["", "Cache"]
    rows = []
    for cache in plan["cache"]:
        more = []
        if cache["bytes_per_token_beyond_windows"] != cache["bytes_per_token"]:
            more.append(f"{cache['bytes_per_token_beyond_windows'] / 1024:.1f} KiB beyond the windows")
        if cache["state_bytes_per_request"]:
            more.append(f"{cache['state_bytes_per_request'] / 1024:.0f} KiB of states a request")
        rows.append((cache["dtype"], f"{cache['bytes_per_token'] / 1024:.1f} KiB a token", ", ".join(more), ""))
    lines += _table(rows)
    lines.append("")
    if not layout["fits"]:
        lines.append(f"Does not fit: {layout['reason']}")
    else:
        each = layout["devices_per_replica"]
        where = "on one device" if each == 1 else f"over {each} devices (--tensor-parallel-size {each})"
        copies = "1 copy" if layout["replicas"] == 1 else f"{layout['replicas']} copies, each"
        lines.append(f"Cheapest layout: {copies} {where}, {_gib(layout['cache_bytes'])} of cache a copy")
        lines += ["", "Requests at once, a copy"]
        lines += _table([(f"{r['length']} tokens", _gib(r["bytes"]), str(r["at_once"]), "") for r in plan["requests"]])
        for name, what in (("prefill", "prompt_tokens"), ("decode", "batch")):
            if plan[name]:
                about = "Prompts" if name == "prefill" else f"Decoding at {plan[name][0]['context']} tokens of context"
                lines += ["", f"{about}, a copy (predicted)"]
                unit = "tokens" if name == "prefill" else "at once"
                lines += _table(
                    [
                        (
                            f"{r[what]} {unit}", f"{1e3 * r['seconds']:.1f} ms", f"{r['tokens_per_s']:.0f} tokens/s",
                            f"{r['limit']}: {1e3 * r['limit_seconds']:.1f} ms at least",
                        )
                        for r in plan[name]
                    ]
                )  # fmt: skip
    return "\n".join([*lines, *([""] + plan["notes"] if plan["notes"] else [])])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        ("  " + row[0].ljust(widths[0]) + "".join("  " + c.rjust(w) for c, w in zip(row[1:3], widths[1:3], strict=True))
         + "  " + row[3]).rstrip()
        for row in rows
    ]  # fmt: skip


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
