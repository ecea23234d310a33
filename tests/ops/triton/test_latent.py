"""Latent attention in Triton: against the reference, and a row's bits alone and among others."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import LayerKVCache
from octavo.ops.triton.expert_kernels import stack_experts
from octavo.ops.triton.mla_attention import latent_attention, linear_by_head
from octavo.ops.triton.pack import pack_linear
from octavo.ops.triton.products import linear
from tests.ops.tensors import stored, torch_ref
from tests.ops.triton.conftest import DEVICE

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("heads", "size", "rotated"), [(5, 64, 16), (20, 48, 32)])
def test_mixed_batches_match_the_reference_and_rows_are_their_own(heads: int, size: int, rotated: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    cache = LayerKVCache(random(9, 8, 1, rotated), random(9, 8, 1, size))
    tables = torch.randperm(9, generator=generator).int().view(3, 3).to(DEVICE)
    starts, lengths = torch.tensor([0, 1, 6, 6]).int().to(DEVICE), torch.tensor([23, 9, 5]).int().to(DEVICE)
    query, both = random(6, heads, size), random(6, heads, rotated + 8)
    found = latent_attention(query, both[:, :, :rotated], cache, tables, starts, lengths, 0.2)
    expected = torch_ref.latent_attention(query, both[:, :, :rotated], cache, tables, starts, lengths, 0.2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    alone = latent_attention(query[5:], both[5:, :, :rotated], cache, tables[1:2], starts[:2], lengths[1:2], 0.2)
    assert torch.equal(alone, found[5:])
    padded = latent_attention(
        torch.cat([query, query]), torch.cat([both, both])[:, :, :rotated], cache, tables, starts, lengths, 0.2
    )
    assert torch.equal(padded[:6], found) and not padded[6:].any()


def test_products_by_head_are_those_of_each_matrix() -> None:
    x, matrices = torch.randn(20, 3, 40).to(DEVICE)[:, :, 8:], torch.randn(3, 48, 32)
    packed = [pack_linear([stored(matrix)]) for matrix in matrices]
    expected = torch.stack([linear(x[:, head].contiguous(), packed[head]) for head in range(3)], 1)
    stack = stack_experts(packed, 3)
    found = linear_by_head(x, stack)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(linear_by_head(x[7:8], stack), found[7:8])
