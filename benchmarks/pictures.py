"""What pictures cost others, and what they cost again: one server of a model that sees, over HTTP.

    python benchmarks/pictures.py                     # the tower of LLaVA 1.5, before a decoder of SmolLM2-135M's shape
    python benchmarks/pictures.py --tower base --pictures 20 --size 3000 2000

Weights are random. First come the gaps between the tokens of a stream alone, and of one beside which so many different
pictures are uploaded at once, up to the last one's answer; then the first token of a conversation's turns about one
picture.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.server import running_server

TOWERS = {  # CLIP's
    "base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
             "image_size": 224, "patch_size": 16},
    "large": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
              "image_size": 336, "patch_size": 14},
}  # fmt: skip
DECODER = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }} {% else %}{% for c in m['content'] %}"
    "{{ '<image> ' if c['type'] == 'image' else c['text'] + ' ' }}{% endfor %}{% endif %}{% endfor %}"
)


def save_model(folder: Path, tower: dict[str, int]) -> None:
    """A LLaVA of random weights, whose tokens are words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<image>": 1, **{f"w{i}": i for i in range(2, DECODER["vocab_size"])}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", additional_special_tokens=["<image>"]
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**tower), text_config=transformers.LlamaConfig(**DECODER),
        image_token_id=1,
    )  # fmt: skip
    side = tower["image_size"]
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=tower["patch_size"], vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    processor.save_pretrained(folder)


def picture(seed: int, size: tuple[int, int]) -> dict[str, Any]:
    """A part of a message with a JPEG of noise that is smooth as photographs are."""
    import numpy as np
    from PIL import Image

    noise = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8))
    out = io.BytesIO()
    noise.resize(size).save(out, "JPEG", quality=90)
    url = "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def tokens_of(http: httpx.Client, messages: list[dict[str, Any]], max_tokens: int) -> Iterator[tuple[float, str]]:
    """When each token of an answer came, and its text."""
    body = {"model": "m", "messages": messages, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if content := choice["delta"].get("content"):
                        yield time.perf_counter(), content


def say(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def gaps_beside(http: httpx.Client, messages: list[list[dict[str, Any]]], alone_s: float) -> list[float]:
    """Milliseconds between the tokens of a stream, from when all of `messages` are sent to when they are answered; of
    none of them, for `alone_s`."""
    times: list[float] = []
    begun, ended = threading.Event(), threading.Event()

    def stream() -> None:
        for at, _ in tokens_of(http, say(text("w7 w8 w9")), 8000):
            times.append(at)
            if len(times) == 20:
                begun.set()
            if ended.is_set():
                return

    thread = threading.Thread(target=stream)
    thread.start()
    begun.wait()
    start = time.perf_counter()
    asking = [threading.Thread(target=lambda one=one: list(tokens_of(http, one, 1))) for one in messages]
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    if not asking:
        time.sleep(alone_s)
    end = time.perf_counter()
    ended.set()
    thread.join()
    return [1e3 * (b - a) for a, b in itertools.pairwise(times) if b >= start and a <= end]


def show(name: str, gaps: list[float]) -> None:
    cuts = statistics.quantiles(gaps, n=100)
    print(f"| {name} | {len(gaps)} | {cuts[49]:.1f} | {cuts[94]:.1f} | {cuts[98]:.1f} | {max(gaps):.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=TOWERS, default="large")
    parser.add_argument("--pictures", type=int, default=10, help="Uploaded at once (default: %(default)s).")
    parser.add_argument("--size", type=int, nargs=2, default=[1280, 960], metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--turns", type=int, default=3, help="Conversations of two turns (default: %(default)s).")
    parser.add_argument("--server-flags", nargs=argparse.REMAINDER, default=[], help="The last one: what follows.")
    args = parser.parse_args()
    size = (args.size[0], args.size[1])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        save_model(folder, TOWERS[args.tower])
        flags = ["--model", str(folder), "--served-model-name", "m", "--disable-log-requests", *args.server_flags]
        # One client, whose connections share what it loads: making one takes as long as a token.
        with running_server(Path(temporary), *flags) as server, httpx.Client(base_url=server.url, timeout=600) as http:
            list(tokens_of(http, say(picture(0, size)), 1))  # what is loaded with the first one is there
            print("| a stream's gaps, ms | tokens | median | p95 | p99 | longest |\n|---|---|---|---|---|---|")
            show("alone", gaps_beside(http, [], 8.0))
            asked = [say(picture(1 + i, size), text("w5")) for i in range(args.pictures)]
            show(f"beside {args.pictures} pictures", gaps_beside(http, asked, 0.0))
            show("beside the same again", gaps_beside(http, asked, 0.0))
            firsts = []
            for number in range(args.turns):
                messages = say(picture(1000 + number, size), text("w5 w6"))
                took = []
                for _ in range(2):
                    start = time.perf_counter()
                    answer = list(tokens_of(http, messages, 16))
                    took.append(answer[0][0] - start)
                    said = "".join(content for _, content in answer)
                    messages = [*messages, {"role": "assistant", "content": said}, *say(text("w9 w8"))]
                firsts.append(took)
    first, second = (statistics.median(column) for column in zip(*firsts, strict=True))
    print(f"\nfirst token: {first:.2f} s in the first turn, {second:.2f} s in the second, {second / first:.3f} of it")


if __name__ == "__main__":
    main()
