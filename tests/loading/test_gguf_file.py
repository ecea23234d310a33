"""The file format: what the `gguf` package writes is read back, and damage of any kind is a `LoadError`."""

import contextlib
import mmap
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import LoadError
from octavo.loading.gguf_config import gguf_config
from octavo.loading.gguf_file import read_gguf
from octavo.loading.gguf_tensors import named_tensors
from octavo.loading.weight_files import gguf_parts, pick_weights
from octavo.quantization.formats import TENSOR_TYPES

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory, write_gguf: Write) -> Path:
    metadata = {"tokenizer.ggml.tokens": ["a", "ü", ""], "tokenizer.ggml.scores": [0.5, 1.0, -1.0]}
    tensors = {"token_embd.weight": np.ones((4, 8), np.float32), "rope_freqs.weight": np.full(8, 1.0, np.float32)}
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", tensors, metadata)


def test_every_metadata_type_and_tensor_position_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -5, "uint32": 1 << 31, "int32": -7, "float32": 0.5,
        "uint64": 1 << 63, "int64": -(1 << 40), "float64": 0.1, "bool": True, "string": "größe",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.texts", ["", "ab", "ü"])
    writer.add_array("x.words", [f"w{i}" for i in range(101)])
    writer.add_array("x.numbers", [1, -2, 3])
    writer.add_array("x.reals", [0.5, 2.0])
    writer.add_array("x.flags", [True, False])
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(24, dtype=np.float16).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = read_gguf(str(path))
    assert {k.removeprefix("x."): v for k, v in file.metadata.items() if k.removeprefix("x.") in values} == values
    assert [file.metadata[f"x.{k}"] for k in ("texts", "numbers", "reals", "flags")] == [
        ["", "ab", "ü"], [1, -2, 3], [0.5, 2.0], [True, False],
    ]  # fmt: skip
    short = read_gguf(str(path), texts=False)
    assert short.metadata == {key: value for key, value in file.metadata.items() if key != "x.words"}
    assert short.tensors == file.tensors
    for expected in gguf.GGUFReader(path).tensors:
        info = file.tensors[expected.name]
        assert (info.offset, info.num_bytes) == (expected.data_offset, expected.n_bytes)
        assert info.shape == tuple(reversed([int(d) for d in expected.shape]))


def test_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    for number, tensor_type in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == tensor_type.name
        assert gguf.GGML_QUANT_SIZES[kind] == (tensor_type.block_size, tensor_type.block_bytes)


def test_a_file_cut_anywhere_is_refused(small_file: Path, tmp_path: Path) -> None:
    whole = small_file.read_bytes()
    end = max(t.offset + t.num_bytes for t in read_gguf(str(small_file)).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in range(end):
        cut.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"cut\.gguf") as e:
            read_gguf(str(cut))
        assert "\n" not in str(e.value)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused_but_never_crash(
    data: st.DataObject, small_file: Path, tmp_path: Path
) -> None:
    raw = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, len(raw) - 1))] = data.draw(st.integers(0, 255))
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(raw)
    with contextlib.suppress(LoadError):
        file = read_gguf(str(changed))
        gguf_config(file)
        list(named_tensors(file, gguf_config(file)[0]))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"GGML" + bytes(40), "starts with b'GGML'"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), f"{1 << 60} metadata keys and 0 tensors do not fit in 24"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), f"{1 << 62} tensors do not fit"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 50), "truncated"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 17) + bytes(13 << 17), "131072 metadata keys and 0 tensors"),
        (
            b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 0, (1 << 23) + 1) + bytes((1 << 23) + 9),
            "has 8388609 elements",
        ),
        (b"GGUF" + struct.pack("<IQQQ11sIf", 3, 0, 1, 11, b"split.count", 6, 2.0), "split.count and split.no are"),
        (b"GGUF" + struct.pack("<IQQQcII", 3, 0, 1, 1, b"k", 77, 0), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQcII", 3, 0, 1, 1, b"\xff", 4, 0), "not UTF-8"),
        (b"", "0 bytes"),
    ],
)
def test_headers_that_are_wrong_are_named(raw: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(LoadError, match=message):
        read_gguf(str(path))


def _with_tensor(tmp_path: Path, dims: tuple[int, ...], kind: int, offset: int, data_bytes: int = 64) -> str:
    """A file with one tensor, `t`, described as given."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcI", 1, b"t", len(dims))
    head += struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)
    path = tmp_path / "tensor.gguf"
    path.write_bytes(head + bytes(-len(head) % 32 + data_bytes))
    return str(path)


@pytest.mark.parametrize(
    ("dims", "kind", "offset", "message"),
    [
        ((16,), 0, 8, "truncated: tensor t lies at bytes 72 to 136, and the file has 128"),
        ((16,), 0, 1 << 60, "truncated"),
        ((1 << 40, 1 << 40), 0, 0, "truncated"),
        ((8,), 0, 4, "not a multiple of 8"),
        ((33,), 8, 0, r"dimensions \[33\], of which the first must be a multiple of 32 for Q8_0"),
        ((0,), 0, 0, r"dimensions \[0\]"),
        ((2, 2, 2, 2, 2), 0, 0, "5 dimensions"),
        ((256,), 15, 0, "type Q8_K, which is not built; these are: F32"),
        ((256,), 99, 0, "type 99, which is not built"),
    ],
)
def test_tensors_that_cannot_be_are_named(
    dims: tuple[int, ...], kind: int, offset: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=message):
        read_gguf(_with_tensor(tmp_path, dims, kind, offset))


def _write_parts(folder: Path, write_gguf: Write) -> list[Path]:
    parts = []
    for i in range(3):
        metadata = {"split.no": i, "split.count": 3}
        tensors = {f"blk.{i}.{name}.weight": np.full((4, 8), i, np.float32) for name in ("attn_q", "attn_k")}
        parts.append(write_gguf(folder / f"m-{i + 1:05}-of-00003.gguf", tensors, metadata))
    return parts


def test_the_parts_of_a_split_model_are_read_together(tmp_path: Path, write_gguf: Write) -> None:
    parts = _write_parts(tmp_path, write_gguf)
    file = read_gguf(str(parts[0]))
    assert file.path == str(parts[0])
    assert list(file.tensors) == [f"blk.{i}.{name}.weight" for i in range(3) for name in ("attn_q", "attn_k")]
    for name, info in file.tensors.items():
        assert (file.array(info).view(np.float32) == int(name[4])).all()
    names = sorted(part.name for part in parts)
    assert pick_weights(names, "auto") == ("gguf", names[:1])
    assert gguf_parts(names[0], ["other.gguf", *names]) == names


def test_a_split_model_that_is_not_whole_is_refused(tmp_path: Path, write_gguf: Write) -> None:
    parts = _write_parts(tmp_path, write_gguf)
    with pytest.raises(LoadError, match=r"is part 1 of 3 of a split model; pass the first part"):
        read_gguf(str(parts[1]))
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(LoadError, match=r"by the name that ends in -00001-of-00003\.gguf"):
        read_gguf(str(tmp_path / "first.gguf"))
    (tmp_path / "first.gguf").rename(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(LoadError, match=r"00003-of-00003\.gguf is damaged, or a part of another model"):
        read_gguf(str(parts[0]))
    parts[2].unlink()
    with pytest.raises(LoadError, match=r"cannot read .*00003-of-00003\.gguf"):
        read_gguf(str(parts[0]))


def test_tensors_of_one_name_are_named_with_their_files(tmp_path: Path, write_gguf: Write) -> None:
    first, second, _ = _write_parts(tmp_path, write_gguf)
    whole = second.read_bytes()
    for found, other, message in (
        (b"blk.1.attn_q", b"blk.0.attn_q", f"{first} and {second} both have the tensor blk.0.attn_q.weight:"),
        (b"blk.1.attn_q", b"blk.1.attn_k", f"{second} is damaged: it has two tensors with the name blk.1.attn_k."),
    ):
        assert found in whole
        second.write_bytes(whole.replace(found, other))
        with pytest.raises(LoadError) as caught:
            read_gguf(str(first))
        assert str(caught.value).startswith(message)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot read .*none\.gguf: No such file"):
        read_gguf(str(tmp_path / "none.gguf"))


def test_writing_to_the_mapping_does_not_reach_the_file(small_file: Path) -> None:
    before = small_file.read_bytes()
    file = read_gguf(str(small_file))
    assert isinstance(file.parts[0].data, mmap.mmap)
    file.parts[0].data[0:4] = b"xxxx"
    assert small_file.read_bytes() == before
