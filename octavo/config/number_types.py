"""Finds the types of a model's weights, activations and KV cache from flags and files."""

import logging
import re

from octavo.config.engine_args import EngineArgs
from octavo.config.wording import listed, on_device
from octavo.errors import ConfigError
from octavo.loading.checkpoint import Checkpoint
from octavo.models.description import ModelDescription

logger = logging.getLogger(__name__)

DTYPES = {"half": "float16", "float": "float32"}  # other names
# Methods of --quantization: first those that quantize float weights while loading, then those of quantized files.
_QUANTIZATIONS = {"cpu": ("int8", "int4"), "cuda": ("int8", "int4", "fp8")}
_FILE_METHODS = (
    "gguf", "gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "mxfp4", "bitsandbytes", "squeezellm",
)  # fmt: skip
_GGUF_TYPE = re.compile(r"(?i)(i|t)?q\d")
# By default one of so many layers is precise, from the first one on. Effects that the first layer turns on or off, such
# as attention sinks, stay on or off in all others (docs/performance.md).
_LAYERS_OF_ONE_PRECISE = 10
# Values of --kv-cache-dtype that differ from the model's type. No CPU multiplies eight-bit floats, so there fp8 is
# int8.
CACHE_BYTES = {"int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def model_dtype(args: EngineArgs, checkpoint: Checkpoint, device: str, is_encoder: bool) -> str:
    """Return the type of weights and activations, by torch's name. Raises `ConfigError` if --kv-cache-dtype asks for
    other floats."""
    dtype = DTYPES.get(args.dtype, str(args.dtype))
    if dtype == "auto":
        stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        if stored is None and is_encoder:  # old encoders, which were always stored as float32
            stored = "float32"
        if stored == "float32" and is_encoder and device == "cuda":  # tensor cores have no float32
            stored = "float16"
        kept = ("float32", "float16") if device == "cuda" else ("float32",)
        dtype = str(stored) if stored in kept else "bfloat16"
    if args.kv_cache_dtype not in ("auto", dtype, *CACHE_BYTES):
        raise ConfigError(
            f"--kv-cache-dtype {args.kv_cache_dtype} with --dtype {dtype}: floats of the cache must be the "
            f"model's; {listed(CACHE_BYTES, 'and')} go with any."
        )
    return dtype


def cache_dtype(args: EngineArgs, dtype: str, device: str) -> str:
    """Return the type of the KV cache, by torch's name. `dtype` is the model's."""
    if args.kv_cache_dtype == "fp8" and device == "cpu":
        logger.info("--kv-cache-dtype fp8 is int8 on CPUs; fp8_e4m3 insists on floats")
        return "int8"
    return CACHE_BYTES.get(args.kv_cache_dtype, dtype)


def check_quantization(name: str, wanted: str | None, device: str) -> None:
    """Raise `ConfigError` for a method that is not built. `name` is the setting's."""
    methods = (*_QUANTIZATIONS[device], *_FILE_METHODS)
    if wanted is not None and wanted not in methods:
        advice = "Leave it out to serve the weights as they are."
        if _GGUF_TYPE.match(wanted):
            advice = f"Leave it out, and name a GGUF file of {wanted.upper()}: FILE.gguf or org/name:{wanted.upper()}."
        raise ConfigError(
            f"{name} {wanted} is not built yet{on_device(device)}; {listed(methods, 'and')} are. {advice}"
        )


def precise_layers(
    args: EngineArgs, checkpoint: Checkpoint, description: ModelDescription, dtype: str, is_pooling: bool
) -> int:
    """Return the number of layers that multiply quantized weights with sixteen-bit inputs. Raises `ConfigError` if the
    model is not quantized."""
    wanted = args.precise_layers
    if wanted is None:
        return 0 if is_pooling else len(description.layers) // _LAYERS_OF_ONE_PRECISE
    if not 0 <= wanted <= len(description.layers):
        raise ConfigError(
            f"--precise-layers must be 0 to {len(description.layers)}, the number of layers, got {wanted}."
        )
    is_quantized = bool(
        args.quantization or checkpoint.format == "gguf" or checkpoint.config.get("quantization_config")
    )
    if wanted and (dtype == "float32" or not is_quantized):
        raise ConfigError(
            f"--precise-layers is for weights of few bits, and {checkpoint.name} has floats throughout; leave it out."
        )
    if wanted and description.impl == "transformers":
        raise ConfigError("--precise-layers is not built yet with --model-impl transformers; leave one of them out.")
    return wanted


def load_quantization(name: str, wanted: str | None, checkpoint: Checkpoint, device: str) -> str | None:
    """Return the method that quantizes float weights while loading, or None. Raises `ConfigError` for a method of files
    that is not the checkpoint's. `name` is the setting's name."""
    if wanted is None:
        return None
    found = checkpoint.format
    if found != "gguf":
        found = (checkpoint.config.get("quantization_config") or {}).get("quant_method") or found
    if wanted == found:
        return None
    if wanted in _FILE_METHODS and wanted not in _QUANTIZATIONS[device]:
        kind = "GGUF files" if wanted == "gguf" else f"checkpoints quantized with {wanted}"
        raise ConfigError(
            f"{name} {wanted} is for {kind}, but {checkpoint.name} has {found} weights; leave it out to "
            "serve them as they are."
        )
    return wanted
