"""An engine's tensors as memory to read into."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from impress.spans.rows import dense_bytes


def token_major(heads: int, n: int, dim: int) -> torch.Tensor:
    """[heads, n, dim], a token's heads side by side."""
    return torch.arange(n * heads * dim, dtype=torch.float32).view(n, heads, dim).transpose(0, 1)


@pytest.mark.parametrize(("heads", "n", "dim"), [(3, 5, 4), (1, 5, 4), (3, 1, 4), (3, 5, 1)])
def test_a_token_major_tensor_is_seen_as_its_own_bytes(heads: int, n: int, dim: int) -> None:
    out = token_major(heads, n, dim)
    data = dense_bytes(out)
    assert data is not None
    rows = out.transpose(0, 1).contiguous()
    assert data.tobytes() == rows.numpy().tobytes()
    data[:4] = 0xFF
    assert out[0, 0, 0].isnan()


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(3, 5, 4),  # head-major
        token_major(3, 5, 4)[:2],  # some heads of each token
        token_major(3, 5, 4)[:, ::2],  # every other token
        token_major(3, 5, 8)[:, :, :4],  # a part of each row
        token_major(3, 0, 4),
    ],
    ids=["head-major", "heads", "tokens", "parts", "nothing"],
)
def test_what_lies_otherwise_is_not(out: torch.Tensor) -> None:
    assert dense_bytes(out) is None


def test_a_view_of_some_tokens_is() -> None:
    out = token_major(3, 5, 4)[:, 1:3]
    data = dense_bytes(out)
    assert data is not None
    assert data.tobytes() == out.transpose(0, 1).contiguous().numpy().tobytes()


def test_the_bytes_keep_the_tensor_alive() -> None:
    """A read under way may outlast the caller's last look at its tensor."""
    out = token_major(2, 4, 4)
    gone = weakref.ref(out)
    data = dense_bytes(out)
    assert data is not None
    data = data[:16]  # what a read holds is a part of it
    del out
    gc.collect()
    assert gone() is not None
    del data
    gc.collect()
    assert gone() is None
