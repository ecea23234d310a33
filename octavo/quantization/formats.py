"""The formats of stored weights by name, as data: sizes of blocks, and which axis of a tensor belongs to which axis of
the matrix.

"F32", "F16" and "BF16" are floats; "INT8", "INT4" and "FP8" are floats that the packer quantizes. GGUF's block formats
have GGUF's names. Each other format has several tensors; the module that unpacks the format describes them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of GGUF files: every `block_size` elements of a row take `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


# The types that can be unpacked, by the number that GGUF files use for them.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}
# format of plain floats -> their element type
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PLAIN_OF_DTYPE = {dtype: name for name, dtype in PLAIN.items()}
# --quantization -> the format of floats that the packer quantizes
QUANTIZED_AT_LOAD = {"int8": "INT8", "int4": "INT4", "fp8": "FP8"}
# Types that CPUs keep as superblocks in memory, if the whole packed matrix has the type.
KEPT_ON_CPUS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
BLOCK_TYPES = {t.name: t for t in TENSOR_TYPES.values() if t.block_size > 1}

# How many elements of a row form a unit that cannot be cut; 1 for formats that are not listed.
COLUMN_UNITS = {name: t.block_size for name, t in BLOCK_TYPES.items()} | {"INT8": 32, "INT4": 32}
# For each tensor of a format: its axis over the matrix's rows (outputs), and its axis over the columns (inputs).
_Axes = dict[str, tuple[int | None, int | None]]
_BY_INPUTS: _Axes = {"qweight": (1, 0), "qzeros": (1, 0), "scales": (1, 0), "g_idx": (None, 0)}
_BY_OUTPUTS: _Axes = {
    "qweight": (0, 1), "codes": (0, 1), "qzeros": (0, 1), "zeros": (0, 1), "scales": (0, 1), "minima": (0, 1),
    "g_idx": (None, 0), "order": (None, 0), "table": (None, None), "factor": (None, None), "group": (None, None),
}  # fmt: skip
AXES = dict.fromkeys(("GPTQ", "GPTQ_V2", "AWQ"), _BY_INPUTS) | dict.fromkeys(
    (
        "AWQ_GEMV", "INT_PACKED", "INT8_SCALED", "INT4_SCALED", "FP8_SCALED", "FP4_SCALED", "CODEBOOK4",
        "CODES4", "CODES8",
    ),
    _BY_OUTPUTS,
)  # fmt: skip
AXES["SQUEEZELLM"] = {"qweight": (1, 0), "table": (0, None), "places": (0, None), "added": (0, None)}
DATA_AXES: dict[str, tuple[int | None, int | None]] = {"data": (0, 1)}  # for every other format
