"""Checkpoints that other tools have quantized: which tensors make up a matrix, for each method that a configuration may
name. `octavo.quantization` knows what the tensors mean.

A module's matrix gets the same name as in a checkpoint that is not quantized, so that models need not know about
quantization. Shapes and scales are checked here and in `quantized_module`; an error is one line.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError
from octavo.loading.bounded_patterns import bounded_patterns
from octavo.loading.file_tensor import FileTensor
from octavo.loading.quantized_module import FLOATS, INT8, QuantizedFiles, QuantizedModule, Settings, Tensors
from octavo.quantization import Layout, StoredWeight, layout_of, squeezellm
from octavo.quantization.four_bits import integers_near

# Tensors of quantized checkpoints that Octavo does not use: it quantizes activations with scales that it computes in
# each step, and it does not quantize the KV cache by a checkpoint's scales.
_UNUSED = re.compile(
    r".*\.(input_scale|input_scale_ub|input_zero_point|input_global_scale|output_scale|k_scale|v_scale|kv_scale|q_scale"
    r"|prob_scale|weight_shape|weight_format)"
)
MXFP4, NVFP4 = layout_of("MXFP4"), layout_of("NVFP4")  # of GGUF and of other checkpoints


def method_of(settings: Settings) -> str:
    """Return the name of the quantization method in lower case, as --quantization writes it."""
    return str(settings.get("quant_method")).lower()


def quantized_tensors(tensors: Tensors, settings: Settings, source: str) -> Tensors:
    """Return the tensors of a checkpoint, with the parts of each quantized matrix replaced by the matrix. Raises
    `LoadError` for methods that are not built, and for parts that do not fit each other."""
    method = method_of(settings)
    if method not in METHODS:
        raise LoadError(
            f"{source} is quantized with {method!r}, which is not built; {', '.join(sorted(METHODS))} are, and GGUF "
            "files."
        )
    files = QuantizedFiles(tensors, settings, source)
    try:
        METHODS[method](files)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, re.error) as e:
        raise LoadError(f"{source}: its quantization configuration is damaged ({type(e).__name__}: {e}).") from None
    return {name: tensor for name, tensor in files.left.items() if not _UNUSED.fullmatch(name)} | files.made


def _gptq(files: QuantizedFiles) -> None:
    settings = files.settings
    checkpoint_format = settings.get("checkpoint_format") or "gptq"
    if checkpoint_format not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise files.fail(
            f"GPTQ in the format {checkpoint_format!r} (Marlin's or another) is not built; gptq and gptq_v2 are"
        )
    dynamic = settings.get("dynamic") or {}
    expressions = [pattern.removeprefix("+:").removeprefix("-:") for pattern in dynamic]
    compiled = bounded_patterns(f"{files.source}: quantization_config.dynamic", expressions)
    for module in files.modules("qweight"):
        own = dict(settings)
        for found, (pattern, changes) in zip(compiled, dynamic.items(), strict=True):
            if found.match(module.name):
                if pattern.startswith("-:"):
                    raise module.fail(f"the configuration's {pattern!r} leaves it out, but it is quantized")
                own |= changes
                break
        bits = own["bits"]
        if type(bits) is not int or bits not in (2, 3, 4, 8):
            raise module.fail(f"GPTQ with {bits} bits is not built; 2, 3, 4 and 8 are")
        qweight, qzeros = module.tensor("qweight", ("int32",)), module.tensor("qzeros", ("int32",))
        scales = module.tensor("scales", FLOATS)
        if len(qweight.shape) != 2 or qweight.shape[0] * 32 % bits:
            raise module.fail(f"qweight has the shape {list(qweight.shape)}, which is no matrix of {bits} bits")
        num_out, num_in = qweight.shape[1], qweight.shape[0] * 32 // bits
        if bits == 3 and num_out % 32:
            raise module.fail(f"{num_out} outputs of 3 bits are not built; multiples of 32 are")
        groups = num_in // module.group(own["group_size"], num_in)
        module.expect("scales", scales.shape, (groups, num_out))
        module.expect("qzeros", qzeros.shape, (groups, -(-num_out * bits // 32)))
        g_idx = module.tensor("g_idx", ("int32", "int64")) if "g_idx" in module else None
        if g_idx is not None:
            module.expect("g_idx", g_idx.shape, (num_in,))
        is_symmetric = own.get("sym", True) or bits < 4
        format = "GPTQ_V2" if checkpoint_format == "gptq_v2" else "GPTQ"
        layout = Layout(8 if bits == 8 else 4, 32, not is_symmetric)
        read = partial(_read_words, module, qweight, qzeros, scales, g_idx, groups)
        module.make(format, (num_out, num_in), layout, read)


def _read_words(
    module: QuantizedModule, qweight: FileTensor, qzeros: FileTensor, scales: FileTensor, g_idx: FileTensor | None,
    groups: int,
) -> dict[str, Any]:  # fmt: skip
    tensors = {"qweight": qweight.elements(), "qzeros": qzeros.elements(), "scales": module.scales(scales)}
    if g_idx is not None:
        tensors["g_idx"] = _groups_of_columns(module, g_idx, groups)
    return tensors


def _groups_of_columns(module: QuantizedModule, g_idx: FileTensor, groups: int) -> NDArray[Any]:
    """Return the group number of each input [K]. Raises `LoadError` if the groups do not all have the same size."""
    found = g_idx.elements()
    is_group = ((found >= 0) & (found < groups)).all()  # checked first: bincount allocates up to the largest number
    if not is_group or (np.bincount(found, minlength=groups) != len(found) // groups).any():
        raise module.fail(f"g_idx does not divide {len(found)} inputs into {groups} groups of one size")
    return found


def _awq(files: QuantizedFiles) -> None:
    settings = files.settings
    bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size"))
    version = str(settings.get("version") or "gemm").lower()
    if type(bits) is not int or bits != 4:
        raise files.fail(f"AWQ with {bits} bits is not built; 4 are")
    if version not in ("gemm", "exllama", "gemv"):
        raise files.fail(f"AWQ in the layout {version!r} is not built; gemm and gemv are")
    layout = Layout(4, 32, bool(settings.get("zero_point", True)))
    for module in files.modules("qweight"):
        qweight, qzeros = module.matrix("qweight", "int32"), module.tensor("qzeros", ("int32",))
        scales = module.tensor("scales", FLOATS)
        if version == "gemv":
            num_out, num_in = qweight.shape[0], qweight.shape[1] * 8
            size = module.group(group, num_in)
            wide = qzeros.shape[-1] * 8 if qzeros.shape else 0
            if wide < num_in // size:
                raise module.fail(f"qzeros has the shape {list(qzeros.shape)}, too narrow for {num_in // size} groups")
            module.expect("qzeros", qzeros.shape, (num_out, wide // 8))
            module.expect("scales", scales.shape, (num_out, wide))
        else:
            num_out, num_in = qweight.shape[1] * 8, qweight.shape[0]
            size = module.group(group, num_in)
            module.expect("scales", scales.shape, (num_in // size, num_out))
            module.expect("qzeros", qzeros.shape, (num_in // size, num_out // 8))
        read = partial(_read_awq, module, qweight, qzeros, scales, size if version == "gemv" else None)
        module.make("AWQ_GEMV" if version == "gemv" else "AWQ", (num_out, num_in), layout, read)


def _read_awq(
    module: QuantizedModule, qweight: FileTensor, qzeros: FileTensor, scales: FileTensor, group: int | None
) -> dict[str, Any]:
    tensors = _read_words(module, qweight, qzeros, scales, None, 0)
    return tensors if group is None else tensors | {"group": np.array([group])}


def _compressed_tensors(files: QuantizedFiles) -> None:
    settings = files.settings
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise files.fail("sparse matrices of compressed-tensors are not built")
    if settings.get("transform_config"):
        raise files.fail("compressed-tensors with transforms (Hadamard's, SpinQuant's) are not built")
    for module in files.modules("weight_packed", "uint8"):
        _fp4(module, _group_of(module)["weights"], "weight_packed", "weight_global_scale", is_divisor=True)
    groups = (files.settings.get("config_groups") or {}).values()
    named = [*(files.settings.get("ignore") or ()), *(target for group in groups for target in group["targets"])]
    bounded_patterns(f"{files.source}: quantization_config", [n[3:] for n in named if n.startswith("re:")])
    for module in files.modules("weight_packed"):
        _packed_integers(module, _group_of(module)["weights"])
    for module in files.modules("weight", "int8"):
        weights = _group_of(module)["weights"]
        _scaled_integers(module, weights["num_bits"], weights.get("strategy"), weights.get("group_size"))
    for module in files.modules("weight", "float8_e4m3fn"):
        weights = _group_of(module)["weights"]
        _fp8_matrix(module, "weight_scale", weights.get("block_structure"))


def _group_of(module: QuantizedModule) -> Settings:
    """Return the group of the configuration's config_groups that the module belongs to. Raises `LoadError` if there is
    none."""
    settings = module.files.settings
    for name in settings.get("ignore") or ():
        if _is_target(name, module.name):
            raise module.fail(f"the configuration's {name!r} leaves it out, but it is quantized")
    groups: Iterable[Mapping[str, Any]] = (settings.get("config_groups") or {}).values()
    for by_class in (False, True):  # a target that names the module goes before one that names its class
        for group in groups:
            if any(_is_target(t, module.name) or (by_class and t in ("Linear", "FusedMoE")) for t in group["targets"]):
                if not group.get("weights"):
                    raise module.fail("the configuration says nothing of its weights")
                return group
    raise module.fail("no group of the configuration's config_groups targets it")


def _is_target(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None  # `_compressed_tensors` has checked all patterns
    return name == target or name.endswith(f".{target}")


def _packed_integers(module: QuantizedModule, weights: Settings) -> None:
    bits = weights["num_bits"]
    if type(bits) is not int or bits not in (4, 8) or weights.get("type", "int") != "int":
        raise module.fail(f"packed {weights.get('type')} of {bits} bits are not built; int of 4 and 8 are")
    qweight, scales = module.matrix("weight_packed", "int32"), module.tensor("weight_scale", FLOATS)
    module.files.left.pop(f"{module.name}.weight_shape", None)
    num_out, num_in = qweight.shape[0], qweight.shape[1] * 32 // bits
    groups = _num_groups(module, scales, (num_out, num_in), weights.get("strategy"), weights.get("group_size"))
    zeros = g_idx = None
    if not weights.get("symmetric", True):
        zeros = module.tensor("weight_zero_point", ("int32",))
        module.expect("weight_zero_point", zeros.shape, (-(-num_out * bits // 32), groups))
    if "weight_g_idx" in module:
        g_idx = module.tensor("weight_g_idx", ("int32", "int64"))
        module.expect("weight_g_idx", g_idx.shape, (num_in,))

    def read() -> dict[str, Any]:
        tensors = {"qweight": qweight.elements(), "scales": _by_output(module.scales(scales), num_out)}
        if zeros is not None:
            tensors["qzeros"] = zeros.elements()
        if g_idx is not None and (g_idx.elements() != -1).any():  # all -1: columns are in the order of their groups
            tensors["g_idx"] = _groups_of_columns(module, g_idx, groups)
        return tensors

    module.make("INT_PACKED", (num_out, num_in), Layout(bits, 32, zeros is not None), read)


def _num_groups(
    module: QuantizedModule, scales: FileTensor, shape: tuple[int, int], strategy: str | None, group: int | None
) -> int:
    """Return the number of scales in a row: 1 with a scale for each output or one scale for the whole matrix."""
    if strategy == "group" or (strategy is None and group not in (None, -1)):
        groups = shape[1] // module.group(group, shape[1])
        module.expect("weight_scale", scales.shape, (shape[0], groups))
        return groups
    if strategy not in (None, "channel", "tensor"):
        raise module.fail(f"scales by {strategy!r} are not built for integers; by group, channel and tensor are")
    module.expect("weight_scale", scales.shape, (shape[0], 1), (shape[0],), (1,), (1, 1), ())
    return 1


def _by_output(scales: NDArray[Any], num_out: int) -> NDArray[Any]:
    """Return the scales as [N, groups]. `scales` may also hold one scale for each row, or one for the matrix."""
    if scales.ndim < 2:
        scales = scales.reshape(-1, 1)
    return np.broadcast_to(scales, (num_out, scales.shape[1]))


def _scaled_integers(module: QuantizedModule, bits: int, strategy: str | None, group: int | None) -> None:
    if type(bits) is not int or bits not in (4, 8):
        raise module.fail(f"integers of {bits} bits are not built; 4 and 8 are")
    codes, scales = module.matrix("weight", "int8"), module.tensor("weight_scale", FLOATS)
    num_out, num_in = codes.shape
    groups = _num_groups(module, scales, (num_out, num_in), strategy, group)
    zeros = module.tensor("weight_zero_point", ("int8",)) if "weight_zero_point" in module else None
    if zeros is not None:
        module.expect("weight_zero_point", zeros.shape, scales.shape)

    def read() -> dict[str, Any]:
        found = codes.elements()
        if bits == 4 and (found.min(initial=0) < -8 or found.max(initial=0) > 7):
            raise module.fail("some of its codes are out of the range of 4 bits, -8 to 7")
        tensors = {"codes": found, "scales": _by_output(module.scales(scales), num_out)}
        if zeros is not None and zeros.elements().any():
            tensors["zeros"] = _by_output(zeros.elements(), num_out)
        return tensors

    module.make(f"INT{bits}_SCALED", (num_out, num_in), Layout(bits, 32, zeros is not None), read)
    assert groups


def _fp8_matrix(module: QuantizedModule, scale_name: str, block: Sequence[int] | None, part: str = "weight") -> None:
    """Make a matrix [outputs, inputs], or the matrices of all experts [experts, outputs, inputs], each with its own
    scales."""
    codes = module.tensor(part, ("float8_e4m3fn",))
    scales = module.tensor(scale_name, (*FLOATS, "float8_e8m0fnu"))
    if len(codes.shape) not in (2, 3):
        raise module.fail(f"{part} has the shape {list(codes.shape)}, which is no matrix and none for each expert")
    *several, num_out, num_in = codes.shape
    experts = tuple(several)
    if block is None:
        of_one: list[tuple[int, ...]] = [(num_out, 1), (num_out,), (1,), (1, 1), ()]
        module.expect(scale_name, scales.shape, *((*experts, *shape) for shape in of_one))
    else:
        rows, columns = block
        if type(rows) is not int or type(columns) is not int or rows <= 0 or columns <= 0:
            raise module.fail(f"blocks cannot have the size {list(block)}")
        module.expect(scale_name, scales.shape, (*experts, -(-num_out // rows), -(-num_in // columns)))

    def read() -> dict[str, Any]:
        found, factors = codes.elements().reshape(-1, num_in), module.scales(scales).astype(np.float32)
        if ((found.view(np.uint8) & 127) == 127).any():
            raise module.fail("some of its elements are not finite")
        if block is None:
            of_experts = factors.reshape(*experts, -1) if experts else [factors]
            return {"codes": found, "scales": np.concatenate([_by_output(one, num_out) for one in of_experts])}
        wide = factors[..., np.arange(num_out) // min(block[0], num_out), :].reshape(len(found), -1)
        return {"codes": found, "scales": wide, "group": np.array([min(block[1], num_in)])}

    module.make("FP8_SCALED", codes.shape, INT8, read, part)


def _fp4(module: QuantizedModule, weights: Settings, part: str, factor_name: str, *, is_divisor: bool) -> None:
    """Make a matrix of MXFP4 or NVFP4. MXFP4 has a power of two as the scale of each 32 elements. NVFP4 has an
    eight-bit float as the scale of each 16 elements, and one factor for the whole matrix."""
    codes, scales = module.matrix(part, "uint8"), module.tensor("weight_scale", ("uint8", "float8_e4m3fn"))
    num_out, num_in = codes.shape[0], codes.shape[1] * 2
    group = 32 if scales.format == "uint8" else 16
    if num_in % group or weights.get("group_size", group) != group:
        raise module.fail(f"groups of {weights.get('group_size', group)} do not fit its {num_in} inputs")
    module.expect("weight_scale", scales.shape, (num_out, num_in // group))
    factor = module.tensor(factor_name, ("float32",)) if group == 16 else None

    def read() -> dict[str, Any]:
        found = scales.elements()
        if scales.format == "uint8" and (found == 255).any():
            raise module.fail("some of its scales are not finite")
        tensors = {"codes": codes.elements(), "scales": found if group == 32 else module.scales(scales)}
        if factor is not None:
            whole = module.scales(factor).reshape(-1)
            if whole.size != 1 or whole[0] == 0:
                raise module.fail(f"{factor_name} is {whole[:4].tolist()}, not one number")
            tensors["factor"] = 1 / whole if is_divisor else whole
        return tensors

    module.make("FP4_SCALED", (num_out, num_in), MXFP4 if group == 32 else NVFP4, read)


def _fp8(files: QuantizedFiles) -> None:
    block = files.settings.get("weight_block_size")
    for module in files.modules("weight", "float8_e4m3fn"):
        name = "weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"
        _fp8_matrix(module, name, block)
    for name, tensor in list(files.left.items()):  # transformers 5 has the matrices of all experts in one parameter
        if tensor.format == "float8_e4m3fn" and f"{name}_scale_inv" in files.left:
            experts, _, part = name.rpartition(".")
            _fp8_matrix(QuantizedModule(experts, files), f"{part}_scale_inv", block, part)


def _modelopt(files: QuantizedFiles) -> None:
    settings = files.settings.get("quantization", files.settings)
    algorithm = settings.get("quant_algo")
    if algorithm == "FP8":
        _fp8(files)
    elif algorithm == "NVFP4":
        for module in files.modules("weight", "uint8"):
            _fp4(module, {}, "weight", "weight_scale_2", is_divisor=False)
    else:
        raise files.fail(f"ModelOpt's {algorithm!r} is not built; FP8 and NVFP4 are")


def _mxfp4(files: QuantizedFiles) -> None:
    """Make the matrices of gpt-oss, which has all experts of a layer in one tensor [experts, outputs, groups, 16]."""
    for name in [name for name in files.left if name.endswith("_blocks")]:
        module = QuantizedModule(name.removesuffix("_blocks"), files)
        codes, scales = files.left.pop(name), files.left.pop(f"{module.name}_scales", None)
        if scales is None or codes.format != "uint8" or scales.format != "uint8":
            raise module.fail("its _blocks and _scales are not both there as uint8")
        if len(codes.shape) != 4 or codes.shape[3] != 16:
            raise module.fail(
                f"its _blocks have the shape {list(codes.shape)}, expected [experts, outputs, groups, 16]"
            )
        module.expect("_scales", scales.shape, codes.shape[:3])
        num_experts, num_out, groups, _ = codes.shape
        num_in = groups * 32

        def read(
            codes: FileTensor = codes, scales: FileTensor = scales, rows: int = num_experts * num_out,
        ) -> dict[str, Any]:  # fmt: skip
            return {"codes": codes.elements().reshape(rows, -1), "scales": scales.elements().reshape(rows, -1)}

        stored = (num_experts * num_out, num_in)
        files.made[module.name] = FileTensor(
            "FP4_SCALED", (num_experts, num_out, num_in),
            lambda read=read, stored=stored: StoredWeight("FP4_SCALED", read(), stored),  # type: ignore[misc]
            is_untransposed=True, layout=MXFP4,
        )  # fmt: skip


def _bitsandbytes(files: QuantizedFiles) -> None:
    for module in files.modules("weight", "int8"):
        codes, scales = module.matrix("weight", "int8"), module.tensor("SCB", ("float32",))
        module.expect("SCB", scales.shape, codes.shape[:1])

        def read(
            module: QuantizedModule = module, codes: FileTensor = codes, scales: FileTensor = scales
        ) -> dict[str, Any]:
            return {"codes": codes.elements(), "scales": module.scales(scales).reshape(-1, 1) / np.float32(127)}

        module.make("INT8_SCALED", (codes.shape[0], codes.shape[1]), INT8, read)
    for module in files.modules("weight", "uint8"):
        _codebook(module)


def _codebook(module: QuantizedModule) -> None:
    """Make a matrix of NF4 or FP4, which is stored as one long row of blocks."""
    kinds = [kind for kind in ("nf4", "fp4") if f"weight.quant_state.bitsandbytes__{kind}" in module]
    if not kinds:
        raise module.fail("it has no weight.quant_state of nf4 or fp4")
    codes = module.tensor("weight", ("uint8",))
    state_tensor = module.tensor(f"weight.quant_state.bitsandbytes__{kinds[0]}", ("uint8",))
    try:
        state = json.loads(state_tensor.elements().tobytes())
        num_out, num_in = state["shape"]
        size, nested_size = state["blocksize"], state.get("nested_blocksize")
        offset = float(state.get("nested_offset", 0))
        is_sound = all(type(n) is int and n > 0 for n in (num_out, num_in, size)) and math.isfinite(offset)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise module.fail("its weight.quant_state is damaged") from None
    if not is_sound:
        raise module.fail("its weight.quant_state is damaged")
    size = module.group(size, num_in)
    table, absmax = (
        module.tensor("weight.quant_map", ("float32",)),
        module.tensor("weight.absmax", ("uint8", "float32")),
    )
    num_blocks = num_out * num_in // size
    module.expect("weight", codes.shape, (num_out * num_in // 2, 1), (1, num_out * num_in // 2))
    module.expect("weight.quant_map", table.shape, (16,))
    module.expect("weight.absmax", absmax.shape, (num_blocks,))
    nested = None
    if absmax.format == "uint8":
        nested = tuple(module.tensor(f"weight.nested_{name}", ("float32",)) for name in ("absmax", "quant_map"))
        if type(nested_size) is not int or nested_size <= 0:
            raise module.fail(f"nested blocks cannot have the size {nested_size}")
        module.expect("weight.nested_absmax", nested[0].shape, (-(-num_blocks // nested_size),))
        module.expect("weight.nested_quant_map", nested[1].shape, (256,))

    def read() -> dict[str, Any]:
        if nested is None:
            scales = module.scales(absmax)
        else:
            units = module.scales(nested[0])[np.arange(num_blocks) // min(nested_size, num_blocks)]
            scales = module.scales(nested[1])[absmax.elements()] * units + np.float32(offset)
        return {
            "codes": codes.elements().reshape(num_out, -1), "scales": scales.reshape(num_out, -1),
            "table": module.scales(table),
        }  # fmt: skip

    integers, _ = integers_near(module.scales(table).astype(np.float64))
    module.make("CODEBOOK4", (num_out, num_in), Layout(4, 32, False, integers), read)


def _squeezellm(files: QuantizedFiles) -> None:
    settings = files.settings
    bits = settings.get("wbits", settings.get("bits"))
    if type(bits) is not int or bits not in (3, 4):
        raise files.fail(f"SqueezeLLM with {bits} bits is not built; 3 and 4 are")
    for module in files.modules("qweight"):
        qweight, table = module.tensor("qweight", ("int32",)), module.tensor("lookup_table", FLOATS)
        if len(qweight.shape) != 2 or qweight.shape[0] * 32 % bits:
            raise module.fail(f"qweight has the shape {list(qweight.shape)}, which is no matrix of {bits} bits")
        if "full_rows" in module:
            raise module.fail(
                "whole outputs as floats (full_rows) are not built; tables with and without a sparse part are"
            )
        num_out, num_in = qweight.shape[1], qweight.shape[0] * 32 // bits
        module.expect("lookup_table", table.shape, (num_out, 1 << bits))
        module.files.left.pop(f"{module.name}.startrows", None)  # how threads of a kernel share the sparse part
        sparse = None
        if "rows" in module:
            sparse = (
                module.tensor("rows", ("int32",)),
                module.tensor("cols", ("int32",)),
                module.tensor("vals", FLOATS),
            )
            module.expect("rows", sparse[0].shape, (num_out + 1,))
            module.expect("vals", sparse[2].shape, sparse[1].shape)
        read = partial(_read_squeezellm, module, qweight, table, sparse, num_in)
        module.make("SQUEEZELLM", (num_out, num_in), INT8, read)


def _read_squeezellm(
    module: QuantizedModule,
    qweight: FileTensor,
    table: FileTensor,
    sparse: tuple[FileTensor, FileTensor, FileTensor] | None,
    num_in: int,
) -> dict[str, Any]:
    tensors = {"qweight": qweight.elements(), "table": module.scales(table)}
    if sparse is not None:
        starts, columns, numbers = (
            sparse[0].elements(),
            sparse[1].elements(),
            module.scales(sparse[2]).astype(np.float32),
        )
        counts = np.diff(starts.astype(np.int64))
        if starts[0] != 0 or starts[-1] != len(columns) or (counts < 0).any() or (counts > num_in).any():
            raise module.fail(f"rows does not divide {len(columns)} numbers of its sparse part among its outputs")
        if ((columns < 0) | (columns >= num_in)).any():
            raise module.fail(f"some cols of its sparse part are not among its {num_in} inputs")
        tensors["places"], tensors["added"] = squeezellm.by_output(starts, columns, numbers)
    return tensors


METHODS: dict[str, Callable[[QuantizedFiles], None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "squeezellm": _squeezellm,
}
