"""Checked values of a GGUF file's metadata: numbers of its architecture, biases, the rotary embedding.

Keys come without the architecture's name. An error about a missing or wrong value is one line.
"""

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, overload

from octavo.errors import LoadError
from octavo.loading.gguf_file import GGUFFile, TensorInfo

# Tensors that are read as a part of the configuration, not as weights.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_REQUIRED: Any = object()
_LARGEST = (1 << 31) - 1  # of sizes and counts


@dataclass(frozen=True, slots=True)
class Metadata:
    file: GGUFFile
    architecture: str

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.file.tensors

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    @overload
    def number(self, key: str) -> int: ...
    @overload
    def number(self, key: str, default: int) -> int: ...
    @overload
    def number(self, key: str, default: None) -> int | None: ...
    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a size or count. A list with a number for each layer is accepted if all numbers but zeros are equal.
        Raises `LoadError` otherwise."""
        value = self.get(key, default)
        if isinstance(value, list) and len(different := {*value} - {0}) < 2:
            value = different.pop() if different else 0 if value else value
        if value is default and default is not _REQUIRED:
            return default
        if type(value) is not int or not 0 <= value <= _LARGEST:
            self._refuse(key, value, "one whole number")
        return value

    def divisor(self, key: str) -> int:
        """Return a size or count that is not 0. Raises `LoadError` otherwise."""
        value = self.number(key)
        if value == 0:
            self._refuse(key, value, "a size or count above 0")
        return value

    @overload
    def real(self, key: str) -> float: ...
    @overload
    def real(self, key: str, default: float) -> float: ...
    @overload
    def real(self, key: str, default: None) -> float | None: ...
    def real(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a finite number. Raises `LoadError` otherwise."""
        value = self.get(key, default)
        if value is default and default is not _REQUIRED:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value):
            self._refuse(key, value, "one number")
        # Files hold float32: 1e-05 arrives as 9.999999747378752e-06. Rounding to seven digits restores the number.
        return float(f"{value:.7g}")

    def _refuse(self, key: str, value: Any, wanted: str) -> None:
        found = "is absent" if value is _REQUIRED else f"is {str(value)[:60]}, which is not {wanted}"
        raise LoadError(f"{self.file.path}: metadata key {self.architecture}.{key} {found}.")

    @property
    def head_dim(self) -> int:
        if self.get("attention.key_length") is not None:
            return self.divisor("attention.key_length")
        size = self.number("embedding_length") // self.divisor("attention.head_count")
        if size == 0:
            self._refuse("embedding_length", self.number("embedding_length"), "an element for each head")
        return size

    def has(self, name: str, layer: int | None = None) -> bool:
        """Return True if the layer, or any layer for None, has a tensor of this name."""
        if layer is not None:
            return f"blk.{layer}.{name}" in self.tensors
        return any(key.startswith("blk.") and key.split(".", 2)[2:] == [name] for key in self.tensors)

    def has_biases(self, modules: Collection[str]) -> bool:
        """Return True if these modules have biases. Raises `LoadError` if only some of the present modules have one:
        config.json has one switch for the group."""
        found = [module for module in modules if self.has(f"{module}.bias")]
        without = [m for m in modules if self.has(f"{m}.weight") and m not in found]
        if found and without:
            raise LoadError(
                f"{self.file.path}: biases on {', '.join(found)} but not on all of {', '.join(modules)} are not built."
            )
        return bool(found)

    def rope(self) -> dict[str, Any]:
        """Return config.json's rope_parameters."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.real("rope.freq_base", 10000.0)}
        rotary_dim = self.number("rope.dimension_count", self.head_dim)
        if rotary_dim != self.head_dim:
            rope["partial_rotary_factor"] = rotary_dim / self.head_dim
        kind = self.get("rope.scaling.type", "none")
        # Older files lack rope.scaling.type: their factor means linear scaling.
        old_factor = self.real("rope.scale_linear", 1.0)
        factor = self.real("rope.scaling.factor", old_factor)
        if kind == "linear" or (kind == "none" and old_factor != 1.0):
            rope |= {"rope_type": "linear", "factor": factor}
        elif kind == "yarn":
            original = self.number("rope.scaling.original_context_length")
            rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            for name in ("beta_fast", "beta_slow"):
                if (beta := self.real(f"rope.scaling.yarn_{name}", None)) is not None:
                    rope[name] = beta
        elif kind not in ("none", "longrope"):
            raise LoadError(
                f"{self.file.path}: rope scaling {kind!r} is not built; none, linear, yarn and longrope are."
            )
        if ROPE_LONG in self.tensors:
            return rope | self._longrope()
        freqs = self.tensors.get(ROPE_FREQS)
        if freqs is None:
            return rope
        if freqs.type.name != "F32" or rope["rope_type"] != "default":
            raise LoadError(
                f"{self.file.path}: {ROPE_FREQS} of type {freqs.type.name} with rope {rope['rope_type']} is not built."
            )
        return rope | self._llama3_rope(self._numbers(freqs), rope["rope_theta"])

    def rotary_share(self) -> float:
        """Return which share of a head rotates, for rotary embeddings of the proportional kind. The frequencies of the
        rest are divided by 1e30. Raises `LoadError` if the file does not say."""
        info = self.tensors.get(ROPE_FREQS)
        divisors = () if info is None or info.type.name != "F32" else self._numbers(info)
        num_rotated = sum(divisor == 1.0 for divisor in divisors)
        if not num_rotated or not all(divisor == 1.0 or divisor >= 1e29 for divisor in divisors):
            raise LoadError(f"{self.file.path}: {ROPE_FREQS} does not say which part of a head rotates.")
        return num_rotated / len(divisors)

    def _numbers(self, info: TensorInfo) -> tuple[float, ...]:
        """Return the elements of a float32 tensor, read without numpy: the configuration needs no more of the weights
        than these tensors."""
        return struct.unpack_from(f"<{info.num_bytes // 4}f", self.file.parts[info.part].data, info.offset)

    def _longrope(self) -> dict[str, Any]:
        factors = {}
        for name, key in ((ROPE_LONG, "long_factor"), (ROPE_SHORT, "short_factor")):
            info = self.tensors.get(name)
            if info is None or info.type.name != "F32":
                raise LoadError(f"{self.file.path} is damaged: {name} is not there as F32.")
            factors[key] = list(self._numbers(info))
        original = self.number("rope.scaling.original_context_length")
        found = {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
        attention = self.real("rope.scaling.attn_factor", None)
        return found if attention is None else found | {"attention_factor": attention}

    def _llama3_rope(self, divisors: tuple[float, ...], theta: float) -> dict[str, Any]:
        """Return the parameters of the llama3 scaling from which the frequencies' `divisors` were computed.

        The converter writes the divisors in place of the four parameters. Three parameters are the same in every
        released model (low 1, high 4, original context 8192), and the largest divisor is the fourth. The divisors are
        recomputed from these and compared. Raises `LoadError` if they differ.
        """
        factor = max(divisors)
        if all(d == 1.0 for d in divisors):
            return {}
        if not (0 < factor < math.inf and theta > 0):
            raise LoadError(
                f"{self.file.path} is damaged: {ROPE_FREQS} goes up to {factor} with rope.freq_base {theta}."
            )
        low, high = 1.0, 4.0
        original = self.number("rope.scaling.original_context_length", 8192)
        for i, divisor in enumerate(divisors):
            wavelength = 2 * math.pi * theta ** (i / len(divisors))
            smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
            expected = 1 / ((1 - smooth) / factor + smooth)
            if not math.isclose(expected, divisor, rel_tol=1e-3):
                raise LoadError(
                    f"{self.file.path}: {ROPE_FREQS} is not Llama 3's rope scaling (frequency {i} is divided by "
                    f"{divisor:.4g}, expected {expected:.4g}); other scalings by frequency are not built yet."
                )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
