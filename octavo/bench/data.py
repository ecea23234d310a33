"""The prompts of benchmarks: random tokens, conversations from a file in ShareGPT's form, or texts from a file
(`texts`).

All prompts depend only on the seed, so that two runs, or two servers, get the same requests.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench.texts import as_chat, custom_texts, sonnet_texts
from octavo.errors import ConfigError
from octavo.flags import positive_int

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "sonnet")
_WITHOUT_FILE = ("random", "prefix_repetition")
# Like vLLM, leave out ShareGPT's very short conversations, and very long prompts and totals.
_SHORTEST_TOKENS, _LONGEST_PROMPT_TOKENS, _LONGEST_TOTAL_TOKENS = 4, 1024, 2048
_OUTPUT_LEN = 128
_ATTEMPTS = 10  # to make a text with the wanted number of tokens


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One request to come. `num_tokens` counts the prompt as text, without a chat template."""

    text: str
    num_tokens: int
    num_output_tokens: int


def add_dataset_args(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags of data sets. `sample_prompts` reads them, and `seed`."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=DATASETS, help="Default: sharegpt with a file, else random.")
    group.add_argument(
        "--dataset-path",
        "--dataset",
        metavar="FILE",
        help="ShareGPT JSON: a list of conversations; JSON Lines with a prompt each (custom); a text (sonnet).",
    )
    group.add_argument("--num-prompts", type=positive_int, default=1000, help="Requests (default: %(default)s).")
    group.add_argument(
        "--random-input-len", "--input-len", type=positive_int, default=1024, help="Default: %(default)s tokens."
    )
    group.add_argument(
        "--random-output-len", "--output-len", type=positive_int, help="Default: 128 tokens, or the file's answers."
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="Lengths are uniform between (1 - ratio) and (1 + ratio) times the given ones (default: %(default)s).",
    )
    group.add_argument(
        "--random-prefix-len", "--prefix-len", type=int, default=0, help="Tokens that all prompts begin with, in "
        "addition to --random-input-len (default: 0).",
    )  # fmt: skip
    group.add_argument("--sharegpt-output-len", type=positive_int, help="Default: the length of the file's answers.")
    group.add_argument(
        "--custom-output-len",
        type=int,
        default=256,
        help="Tokens of an answer; -1: each line's output_tokens (default: 256).",
    )
    group.add_argument(
        "--skip-chat-template", "--custom-skip-chat-template", action="store_true", help="Send texts of custom and "
        "sonnet as they are; chats are templated by the server.",
    )  # fmt: skip
    for name, default, what in (
        ("sonnet-input-len", 550, "The most tokens of a prompt"), ("sonnet-output-len", 150, "Tokens of an answer"),
        ("sonnet-prefix-len", 200, "Tokens that all prompts begin with"),
        ("prefix-repetition-prefix-len", 256, "Tokens of a prefix"),
        ("prefix-repetition-suffix-len", 256, "Tokens after the prefix"),
        ("prefix-repetition-num-prefixes", 10, "Number of prefixes; each prompt has one"),
        ("prefix-repetition-output-len", 128, "Tokens of an answer"),
    ):  # fmt: skip
        group.add_argument(f"--{name}", type=positive_int, default=default, help=f"{what} (default: %(default)s).")
    group.add_argument("--no-oversample", action="store_true", help="Use no prompt of a file twice.")


def sample_prompts(args: argparse.Namespace, tokenizer: ModelTokenizer) -> list[BenchPrompt]:
    """Return the prompts that the flags of `add_dataset_args` ask for. Raises `ConfigError`."""
    name, seed = args.dataset_name or ("sharegpt" if args.dataset_path else "random"), args.seed or 0
    if name in _WITHOUT_FILE:
        if args.dataset_path:
            raise ConfigError(f"--dataset-path is for data sets with a file; {name} prompts need none.")
        if name == "prefix_repetition":
            return repeated_prefixes(
                tokenizer,
                args.num_prompts,
                args.prefix_repetition_num_prefixes,
                args.prefix_repetition_prefix_len,
                args.prefix_repetition_suffix_len,
                args.prefix_repetition_output_len,
                seed=seed,
            )
        return random_prompts(
            tokenizer,
            args.num_prompts,
            args.random_input_len,
            args.random_output_len or _OUTPUT_LEN,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
            seed=seed,
        )
    if not args.dataset_path:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path FILE.")
    if name == "sharegpt":
        output_len = args.sharegpt_output_len or args.random_output_len
        found = sharegpt_prompts(tokenizer, args.dataset_path, args.num_prompts, output_len=output_len, seed=seed)
    else:
        found = _from_texts(name, args, tokenizer)
    # The prompts of a file with too few are repeated.
    return found if args.no_oversample else [found[i % len(found)] for i in range(args.num_prompts)]


def _from_texts(name: str, args: argparse.Namespace, tokenizer: ModelTokenizer) -> list[BenchPrompt]:
    templates = not args.skip_chat_template and getattr(args, "backend", None) != "openai-chat"
    if name == "sonnet":
        pairs = [
            (text, args.sonnet_output_len)
            for text in sonnet_texts(
                tokenizer, args.dataset_path, args.num_prompts, args.sonnet_input_len, args.sonnet_prefix_len,
                templates=templates, seed=args.seed or 0,
            )
        ]  # fmt: skip
    else:
        pairs = custom_texts(args.dataset_path, args.custom_output_len)[: args.num_prompts]
    texts = [(as_chat(tokenizer, text) if templates else text, num_output) for text, num_output in pairs]
    return [BenchPrompt(text, len(encode(tokenizer, text)), num_output) for text, num_output in texts]


def repeated_prefixes(
    tokenizer: ModelTokenizer,
    num_prompts: int,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    *,
    seed: int = 0,
) -> list[BenchPrompt]:
    """Return prompts that begin with one of `num_prefixes` random prefixes, equally many for each, in an order drawn
    from the seed."""
    if num_prompts < num_prefixes:
        raise ConfigError(
            f"--prefix-repetition-num-prefixes {num_prefixes} needs as many --num-prompts, got {num_prompts}."
        )
    found = []
    for number in range(num_prefixes):
        share = num_prompts // num_prefixes + (number < num_prompts % num_prefixes)
        its_seed = seed * num_prefixes + number
        found += random_prompts(tokenizer, share, suffix_len, output_len, prefix_len=prefix_len, seed=its_seed)
    return [found[i] for i in np.random.default_rng(seed).permutation(num_prompts)]


def random_prompts(
    tokenizer: ModelTokenizer,
    num_prompts: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[BenchPrompt]:
    """Return prompts of random tokens. Their texts have the drawn numbers of tokens, or nearly so if decoding and
    encoding do not agree."""
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {range_ratio}.")
    if prefix_len < 0:
        raise ConfigError(f"--random-prefix-len must be 0 or more, got {prefix_len}.")
    rng = np.random.default_rng(seed)
    special = set(tokenizer.all_special_ids)
    tokens = np.array([token for token in range(tokenizer.vocab_size) if token not in special])

    def draw(length: int) -> Any:
        low, high = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
        return rng.integers(max(low, 1), max(high, 1), num_prompts, endpoint=True)

    prefix = rng.choice(tokens, prefix_len).tolist()
    prompts = []
    for num_input, num_output in zip(draw(input_len), draw(output_len), strict=True):
        wanted = prefix_len + int(num_input)
        ids = prefix + rng.choice(tokens, num_input).tolist()
        # Decoded tokens do not always encode to the same tokens: cut or fill until the number is right.
        for _ in range(_ATTEMPTS):
            text = tokenizer.decode(ids)
            ids = encode(tokenizer, text)
            if len(ids) == wanted:
                break
            ids = ids[:wanted] + rng.choice(tokens, max(wanted - len(ids), 0)).tolist()
        prompts.append(BenchPrompt(text, len(encode(tokenizer, text)), int(num_output)))
    return prompts


def sharegpt_prompts(
    tokenizer: ModelTokenizer, path: str, num_prompts: int, *, output_len: int | None = None, seed: int = 0
) -> list[BenchPrompt]:
    """Return the first question of up to `num_prompts` conversations, in an order drawn from the seed. The length of
    the answer in the file is the number of output tokens, unless `output_len` is given."""
    try:
        conversations = json.loads(Path(path).read_text(encoding="utf-8"))
        turns = [entry.get("conversations") or entry.get("conversation") or [] for entry in conversations]
        pairs = [(str(turn[0]["value"]), str(turn[1]["value"])) for turn in turns if len(turn) >= 2]
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ConfigError(
            f'--dataset-path {path} is not ShareGPT JSON: a list of {{"conversations": [{{"from": "human", "value": '
            '"…"}, …]}.'
        ) from None
    prompts: list[BenchPrompt] = []
    for index in np.random.default_rng(seed).permutation(len(pairs)):
        question, answer = pairs[index]
        num_tokens = len(encode(tokenizer, question))
        num_output = output_len or len(encode(tokenizer, answer))
        fits = num_tokens <= _LONGEST_PROMPT_TOKENS and num_tokens + num_output <= _LONGEST_TOTAL_TOKENS
        if fits and num_tokens >= _SHORTEST_TOKENS and num_output >= _SHORTEST_TOKENS:
            prompts.append(BenchPrompt(question, num_tokens, num_output))
        if len(prompts) == num_prompts:
            break
    if not prompts:
        raise ConfigError(f"--dataset-path {path} has no conversation of two turns and a usual length.")
    return prompts


def encode(tokenizer: ModelTokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids
