"""Small random-weight models give the same logits as `transformers` in float32, whatever the architecture's settings:
in the decoder over the reference backend, and in the whole engine on the CPU.

Checkpoints are written as safetensors by `transformers` and read by Octavo; the engine's logits are taken with a logits
processor, the way a user would.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.kv_cache.groups import group_layers
from octavo.layers.experts import ExpertsDescription
from octavo.models.inventory import required_tensors
from octavo.models.registry import build, describe
from octavo.ops import Ops
from octavo.stats import EngineStats
from tests.models.driving import VARIED, ArrayWeights, all_logits
from tests.models.small_experts import ALL_MODELS
from tests.models.small_latent import LATENT_MODELS
from tests.models.small_models import VOCAB
from tests.models.small_recurrent import RECURRENT_MODELS
from tests.seeds import seed_of
from tests.untimed import without_time

MODELS = ALL_MODELS | RECURRENT_MODELS | LATENT_MODELS
PROMPT_LENGTHS = (30, 31, 32, 29)
NUM_TOKENS = 8


@pytest.fixture(scope="module", params=[n if n in VARIED else pytest.param(n, marks=pytest.mark.long) for n in MODELS])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The reference, and the folder with its checkpoint."""
    model, folder = MODELS[request.param], tmp_path_factory.mktemp("model")
    reference = model.reference(seed=seed_of(request.param))
    model.save(reference, folder)
    return reference, folder


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.long  # test_the_engine_on_the_cpu runs the same architectures
def test_the_decoder_over_the_reference_backend(checkpoint: tuple[Any, Path], ops: Ops) -> None:
    """In chunks, one by one, and in mixed batches. What the model takes is what the checkpoint has."""
    reference, folder = checkpoint
    description = describe(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    shapes = {n: tuple(tensor.shape) for n, tensor in tensors.items() if not n.startswith(description.unused)}
    required = required_tensors(description)
    assert {tensor.name: tensor.shape for tensor in required} == shapes

    model = build(description, ArrayWeights({n: t.numpy() for n, t in tensors.items()}), ops, 128, "float32")
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (1, 9, 33, 70)]
    for tokens, found in zip(sequences, all_logits(model, ops, sequences), strict=True):
        with torch.no_grad():
            assert_near(found, reference(torch.tensor([tokens])).logits[0])


def test_the_engine_on_the_cpu(
    checkpoint: tuple[Any, Path], tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, decodes and prompts in one batch, and sequences that start again, as blocks run out. Alone a
    sequence gets the same bits."""
    reference, folder = checkpoint
    description = describe(json.loads((folder / "config.json").read_text()))
    prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in PROMPT_LENGTHS]
    groups = group_layers(description.layer_caches)
    groups_of_pool = Counter(group.pool for group in groups if group.spec.kind != "state")
    num_blocks = 13 * max(groups_of_pool.values(), default=0) or 3
    llm = LLM(
        str(folder), tokenizer=str(tiny_tokenizer), dtype="float32", max_model_len=96, max_num_batched_tokens=24,
        block_size=8, num_gpu_blocks_override=num_blocks, enable_prefix_caching=False, check_invariants=True,
    )  # fmt: skip
    without_time(llm.core)
    num_preemptions = 0
    take_stats = llm.core.scheduler.take_stats

    def count() -> EngineStats:
        nonlocal num_preemptions
        stats = take_stats()
        num_preemptions += stats.num_preemptions
        return stats

    monkeypatch.setattr(llm.core.scheduler, "take_stats", count)
    together = logits_of(llm, prompts)
    keeps_all = any(cache.kind == "full" for cache in description.layer_caches)
    # Of several pools that of windows, which has room for little more than one sequence, lets fewer in.
    assert num_preemptions > 0 or not keeps_all or len(groups_of_pool) > 1
    for prompt, (tokens, found) in zip(prompts, together, strict=True):
        with torch.no_grad():
            assert_near(found, reference(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1])
    [(_, alone)] = logits_of(llm, prompts[-1:])
    assert torch.equal(alone, together[-1][1])


@pytest.mark.long
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_engine_in_16_and_8_bits(
    checkpoint: tuple[Any, Path], tiny_tokenizer: Path, quantization: str | None
) -> None:
    """Every matrix and every table in the types that people serve: what is near is not mixed up."""
    reference, folder = checkpoint
    description = describe(json.loads((folder / "config.json").read_text()))
    has_experts = any(isinstance(layer.feed_forward, ExpertsDescription) for layer in description.layers)
    prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in (5, 40)]
    llm = LLM(
        str(folder), tokenizer=str(tiny_tokenizer), dtype="bfloat16", quantization=quantization, max_model_len=64,
        block_size=8, num_gpu_blocks_override=64,
    )  # fmt: skip
    for prompt, (tokens, found) in zip(prompts, logits_of(llm, prompts), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
        if (
            has_experts
        ):  # a router that is nearly undecided may choose others for some tokens, and more of them in 8 bits
            errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
            assert errors.median() < (0.2 if quantization is None else 0.4)
        else:
            # Random networks enlarge what rounding does, some of them by far; what is mixed up is off by all of it.
            assert (found - expected).norm() < (0.1 if quantization is None else 0.25) * expected.norm()


def logits_of(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """All tokens of each sequence, and the logits [NUM_TOKENS, V] that its output was chosen from."""
    found: dict[tuple[int, ...], torch.Tensor] = {}

    def keep(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        found[(*prompt, *output)] = logits.clone()
        return logits

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logits_processors=[keep])
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    results = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = prompt + list(output.outputs[0].token_ids)
        results.append((tokens, torch.stack([found[tuple(tokens[:n])] for n in range(len(prompt), len(tokens))])))
    return results
