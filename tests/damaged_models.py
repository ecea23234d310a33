"""Damages small model folders in ways that a seed determines, loads them, and says which loads went wrong:
`python -m tests.damaged_models --first 0 --number 1000`.

A load goes wrong unless it succeeds or raises an error of one printable line. The loads of one call happen in a process
of its own, because some faults end a process. Fields of JSON, of headers and of metadata are changed as fields, so that
the rest of the file still fits; other changes are of bytes.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.quantization.checkpoints import FORMATS, HEAD_SIZE, KV_HEADS, LAYERS, tensors_of, write

_MEMORY_BYTES = 12 << 30  # of the process; what a load takes beyond is a fault
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXTS = (
    "", "x", "auto", "0", "../x", "\n\x1b[31m", "a" * 5000, "{{", "{{ 'a' * 10 ** 10 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "\ud800", "full_attention", "</s>", "re:(.+)+!", "\0",
)  # fmt: skip
_NUMBERS = (
    -1, 0, 1, 2, 3, 7, 33, 1 << 20, 1 << 31, (1 << 63) - 1, -(1 << 63), 10**30, 0.5, -0.5, 1e308, 1e-308, float("nan"),
    float("inf"),
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, "__deep__", [], {}, [None], [[]], [0], ["x"], [-1, 1.5], {"a": 1}, {"__float__": "Infinity"},
    *_TEXTS, *_NUMBERS,
)  # fmt: skip
_DEEP = "[" * 300 + "]" * 300
# Metadata types of GGUF files: format of a number, by the type's number; 8 is a text, 9 a list.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Keys = list[tuple[str, int, Any]]
Tensors = list[tuple[str, tuple[int, ...], int, bytes]]


def changed(rng: random.Random, value: Any) -> Any:
    """A JSON value with another in one place."""
    places = [*_places(value)]
    if not places:
        return rng.choice(_VALUES)
    holder, key = rng.choice(places)
    match rng.randrange(8), holder[key]:
        case 0, _ if isinstance(holder, dict):
            del holder[key]
        case 1, _:
            other, from_key = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[from_key]))
        case 2 | 3, int() | float() as number:
            holder[key] = rng.choice((number * 2, number + 1, number - 1, -number, float(number), number // 2))
        case 2 | 3, list() as items if items:
            holder[key] = rng.choice((items[:-1], items * 2, items[::-1], items[0]))
        case _:
            holder[key] = rng.choice(_VALUES)
    return value


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    for key, item in list(value.items()) if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list) and depth < 20:
            yield from _places(item, depth + 1)


def changed_bytes(rng: random.Random, data: bytes, limit: int = 1 << 62) -> bytes:
    """Bytes with a few others, or cut, or with a part that is there twice. `limit` is the end of what matters most."""
    raw, end = bytearray(data), max(min(limit, len(data)), 1)
    if not raw:
        return b"x"
    match rng.randrange(6):
        case 0:
            return bytes(raw[: rng.randrange(len(raw))])
        case 1:
            at = rng.randrange(end)
            return bytes(raw[:at] + raw[at : at + rng.randrange(1, 64)] + raw[at:])
        case 2:
            at = rng.randrange(end)
            raw[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f", bytes(3) + b"\x80" + bytes(4)))
        case _:
            for _ in range(rng.randrange(1, 4)):
                raw[rng.randrange(end)] = rng.randrange(256)
    return bytes(raw)


def _as_json(value: Any) -> str:
    return json.dumps(value).replace('"__deep__"', _DEEP)


def change_json(rng: random.Random, path: Path) -> None:
    value = json.loads(path.read_text())
    for _ in range(rng.randrange(1, 3)):
        value = changed(rng, value)
    path.write_text(_as_json(value))


def change_safetensors(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    if rng.random() < 0.4:
        path.write_bytes(changed_bytes(rng, data, 8 + length))
        return
    header = _as_json(changed(rng, json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def change_any(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    # Of archives and old files of tensors: the pickle is in front.
    path.write_bytes(changed_bytes(rng, data, rng.choice((1 << 62, 3000, 9000))))


_CHANGES: dict[str, Callable[[random.Random, Path], None]] = {
    ".json": change_json, ".safetensors": change_safetensors,
}  # fmt: skip


def damage_folder(rng: random.Random, folder: Path) -> str:
    """Change one or two files of a folder. Returns their names."""
    names = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
        with contextlib.suppress(ValueError, struct.error):  # it was changed before, and is JSON no more
            change = change_any if rng.random() < 0.15 else _CHANGES.get(path.suffix, change_any)
            change(rng, path)
        names.append(path.name)
    return ", ".join(names)


def gguf_bytes(keys: Keys, tensors: Tensors, alignment: int = 32) -> bytes:
    """A GGUF file."""

    def text(value: str) -> bytes:
        raw = value.encode(errors="replace")
        return struct.pack("<Q", len(raw)) + raw

    def stored(kind: int, value: Any) -> bytes:
        if kind == 8:
            return text(value)
        if kind == 9:
            item, values = value
            return struct.pack("<IQ", item, len(values)) + b"".join(stored(item, one) for one in values)
        return struct.pack("<" + _SCALARS[kind], value)

    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    head += [text(key) + struct.pack("<I", kind) + stored(kind, value) for key, kind, value in keys]
    offset = 0
    for name, dims, kind, data in tensors:
        head.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
        offset += -(-len(data) // alignment) * alignment
    raw = b"".join(head)
    raw += bytes(-len(raw) % alignment)
    return raw + b"".join(data + bytes(-len(data) % alignment) for *_, data in tensors)


def changed_gguf(rng: random.Random, keys: Keys, tensors: Tensors) -> bytes:
    keys, tensors = list(keys), list(tensors)
    at = rng.randrange(len(keys))
    key, kind, value = keys[at]
    match rng.randrange(10):
        case 0:
            del keys[at]
        case 1:
            keys[at] = key, 8, rng.choice(_TEXTS)
        case 2 | 3:
            numbers = [number for number in _NUMBERS if isinstance(number, int) and abs(number) < 1 << 63]
            keys[at] = key, 11, rng.choice(numbers)
        case 4:
            keys[at] = key, 12, rng.choice([float(number) for number in _NUMBERS])
        case 5:
            keys[at] = key, 9, (rng.choice((4, 6, 7)), rng.choice(([], [0], [1, 2], [3] * 100)))
        case 6 if kind == 9:
            item, values = value
            keys[at] = key, 9, (item, rng.choice((values[:-1], values * 2, values[:1], values[::-1])))
        case 6 | 7:
            number = rng.randrange(len(tensors))
            name, dims, code, data = tensors[number]
            tensors[number] = rng.choice((
                (name, (*dims, 1), code, data), (name, dims[::-1], code, data), (name + "x", dims, code, data),
                (name, (dims[0], 1 << rng.randrange(63)), code, data), (name, dims, rng.randrange(45), data),
                (name, (dims[0] * 2, *dims[1:]), code, data), (rng.choice(tensors)[0], dims, code, data),
                (name, (dims[0],), code, data),
            ))  # fmt: skip
        case 8:
            del tensors[rng.randrange(len(tensors))]
        case _:
            raw = gguf_bytes(keys, tensors)
            return changed_bytes(rng, raw, len(raw) - sum(len(data) for *_, data in tensors))
    return gguf_bytes(keys, tensors)


@cache
def gguf_model(kind: str, block: str) -> tuple[Keys, Tensors]:
    """A small Llama, with a tokenizer of `kind` and matrices of `block`."""
    import gguf

    hidden, inner, vocab = 256, 256, 259
    rng, code = np.random.default_rng(0), gguf.GGMLQuantizationType[block]

    def tensor(name: str, *shape: int) -> tuple[str, tuple[int, ...], int, bytes]:
        data = (rng.standard_normal(shape) * 0.02).astype(np.float32)
        if len(shape) == 1 or block == "F32":
            return name, shape[::-1], 0, (data if len(shape) == 2 else data + 1).tobytes()
        try:
            return name, shape[::-1], int(code), gguf.quants.quantize(data, code).tobytes()
        except NotImplementedError:  # blocks of zeros
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[code]
            return name, shape[::-1], int(code), bytes(data.size // block_size * block_bytes)

    tensors = [tensor("token_embd.weight", vocab, hidden), tensor("output_norm.weight", hidden)]
    for layer in range(LAYERS):
        prefix, kv = f"blk.{layer}.", KV_HEADS * HEAD_SIZE
        tensors += [tensor(f"{prefix}{name}.weight", hidden) for name in ("attn_norm", "ffn_norm")]
        tensors += [tensor(f"{prefix}attn_{name}.weight", kv, hidden) for name in "kv"]
        tensors += [tensor(f"{prefix}attn_{name}.weight", hidden, hidden) for name in ("q", "output")]
        tensors += [tensor(f"{prefix}ffn_{name}.weight", inner, hidden) for name in ("gate", "up", "down")]
    numbers = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": hidden, "feed_forward_length": inner,
        "attention.head_count": hidden // HEAD_SIZE, "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_SIZE, "attention.key_length": HEAD_SIZE, "attention.value_length": HEAD_SIZE,
    }  # fmt: skip
    letters = [chr(33 + i) if i < 94 else chr(0x100 + i) for i in range(vocab - 4)]
    tokens = ["<unk>", "<s>", "</s>", *letters, '!"']
    keys: Keys = [("general.architecture", 8, "llama"), ("general.alignment", 4, 32)]
    keys += [(f"llama.{name}", 4, number) for name, number in numbers.items()]
    keys += [
        (f"llama.{name}", 6, x) for name, x in (("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 1e4))
    ]
    keys += [("llama.rope.scaling.type", 8, "linear"), ("llama.rope.scaling.factor", 6, 2.0)]
    keys += [
        ("tokenizer.ggml.model", 8, kind), ("tokenizer.ggml.tokens", 9, (8, tokens)),
        ("tokenizer.ggml.token_type", 9, (5, [2, 3, 3] + [1] * (vocab - 3))), ("tokenizer.ggml.pre", 8, "default"),
        ("tokenizer.ggml.scores", 9, (6, [float(-i) for i in range(vocab)])),
        ("tokenizer.ggml.merges", 9, (8, ["! \""])),
        ("tokenizer.ggml.unknown_token_id", 4, 0), ("tokenizer.ggml.bos_token_id", 4, 1),
        ("tokenizer.ggml.eos_token_id", 4, 2), ("tokenizer.ggml.add_bos_token", 7, True),
        ("tokenizer.chat_template", 8, _TEMPLATE),
    ]  # fmt: skip
    return keys, tensors


def _add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {
        symbol: i for i, symbol in enumerate(["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>",
        "chat_template": _TEMPLATE, "added_tokens_decoder": {"2": {"content": "</s>", "special": True}},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    given = {"eos_token_id": [2], "bos_token_id": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(given))


def write_plain(folder: Path, form: str) -> None:
    """A folder with weights of floats: in one file, in shards, or in PyTorch's files of two kinds."""
    import torch

    _, plain = tensors_of(FORMATS["gptq 4"])
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    write(folder, plain, None, rope_parameters=rope, sliding_window=64, layer_types=["full_attention"] * LAYERS,
          architectures=["MistralForCausalLM"], model_type="mistral")  # fmt: skip
    if form == "safetensors":
        return
    path, tensors = folder / "model.safetensors", {name: torch.from_numpy(x) for name, x in plain.items()}
    if form != "shards":
        path.unlink()
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
        return
    path.rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(plain, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_quantized(folder: Path, form: str) -> None:
    stored, _ = tensors_of(FORMATS[form])
    write(folder, stored, FORMATS[form].settings)


_FOLDERS: dict[str, Callable[[Path], None]] = {
    form: partial(write_plain, form=form) for form in ("safetensors", "shards", "bin", "old bin")
} | {
    form: partial(write_quantized, form=form)
    for form in (
        "gptq 4 desc_act", "gptq 3 zeros", "awq", "awq gemv", "w4a16 zeros", "w8a8", "fp8 blocks", "nvfp4",
        "nf4 nested", "squeezellm 3 sparse", "bnb int8",
    )
}  # fmt: skip
_FILES = [("gpt2", "Q4_0"), ("llama", "Q8_0"), ("t5", "F32"), ("bert", "Q6_K"), ("gpt2", "Q4_K")]


@cache
def undamaged(form: str) -> Path:
    """The folder that is damaged, kept until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="undamaged-", dir=_scratch()))
    _FOLDERS[form](folder)
    _add_tokenizer(folder)
    return folder


@cache
def _scratch() -> str:
    folder = tempfile.mkdtemp(prefix="damaged-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_damaged(seed: int, folder: Path) -> tuple[Path, str]:
    """Write the damaged model of a seed. Returns its path and what is damaged."""
    rng = random.Random(seed)
    forms = [*_FOLDERS, *_FILES]
    form = forms[rng.randrange(len(forms))]
    if isinstance(form, str):
        shutil.copytree(undamaged(form), folder)
        return folder, f"{form}: {damage_folder(rng, folder)}"
    folder.mkdir()
    path = folder / "model.gguf"
    path.write_bytes(changed_gguf(rng, *gguf_model(*form)))
    return path, f"gguf {' '.join(form)}"


def fault_of(path: Path) -> str | None:
    """What is wrong with the load of a damaged model: a traceback, or a message that is not one line; None: nothing."""
    from octavo import LLM, SamplingParams
    from octavo.entrypoints.chat.template_traits import template_traits
    from octavo.errors import OctavoError

    llm = None
    try:
        llm = LLM(
            str(path), kv_cache_memory_bytes=1 << 24, max_num_seqs=2, max_num_batched_tokens=64, cpu_threads=1,
            disable_log_stats=True, check_invariants=False,
        )  # fmt: skip
        with contextlib.suppress(ValueError, OctavoError):
            template_traits(llm.tokenizer, llm.tokenizer.get_chat_template())
        if "generate" in llm.supported_tasks:
            params = SamplingParams(max_tokens=2, temperature=0)
            llm.generate([{"prompt_token_ids": [1, 5, 6]}], params, use_tqdm=False)
    except OctavoError as error:
        message = str(error)
        is_line = message.isprintable() and 0 < len(message) < 5000
        return None if is_line else f"no line: {message[:300]!r}"
    except BaseException:
        return traceback.format_exc(limit=-3)
    finally:
        if llm is not None:
            llm.close()
    return None


def _child(first: int, number: int, seconds: float) -> None:
    """Load damaged models, and write a line of JSON before and after each. A load of more than `seconds`, unless they
    are 0, ends the process."""
    with contextlib.suppress(ImportError, ValueError):  # not every system has such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["TQDM_DISABLE"] = "1"
    folder = Path(_scratch()) / "now"
    for seed in range(first, first + number):
        shutil.rmtree(folder, ignore_errors=True)
        path, what = make_damaged(seed, folder)
        print(json.dumps({"seed": seed, "what": what}), file=out, flush=True)
        if seconds:
            faulthandler.dump_traceback_later(seconds, exit=True)
        print(json.dumps({"fault": fault_of(path)}), file=out, flush=True)
        faulthandler.cancel_dump_traceback_later()


def faults(first: int, number: int, seconds: float = 0) -> Iterator[str]:
    """Yield what goes wrong with the damaged models of some seeds, in new processes. A load that takes longer than
    `seconds` goes wrong, unless they are 0."""
    end = first + number
    while first < end:
        options = f"--first={first}", f"--number={end - first}", f"--seconds={seconds}"
        command = [sys.executable, "-m", "tests.damaged_models", "--child", *options]
        about: dict[str, Any] = {}
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
        ):
            assert child.stdout is not None
            for line in child.stdout:
                about |= json.loads(line)
                if fault := about.pop("fault", None):
                    yield f"seed {about['seed']} ({about['what']}): {fault}"
            code = child.wait()
            errors.seek(0)
            log = errors.read()[-3000:]
        if code == 0:
            return
        yield f"seed {about.get('seed')} ({about.get('what')}) ended its process with {code}:\n{log}"
        first = about.get("seed", end) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--number", type=int, default=1000, help="of seeds")
    parser.add_argument("--seconds", type=float, default=60, help="of a load that goes wrong if it takes longer")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _child(args.first, args.number, args.seconds)
        return
    count = 0
    for fault in faults(args.first, args.number, args.seconds):
        count += 1
        print(fault, flush=True)
    print(f"{count} of {args.number} loads went wrong")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
