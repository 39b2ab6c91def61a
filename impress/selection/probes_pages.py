"""Pages of keys as the least and most of each channel: an upper bound on every score in a page.

From Quest (arXiv 2406.10774, section 3): for a channel q of the query, no key of the page adds more
than max(q · least, q · most). A record is [least of the heads][most of the heads], float16 each,
2 · n_kv_heads · head_dim values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from impress.selection.quant import Floats, floats_of, records_tensor
from impress.selection.scores import Scored
from impress.spans.rows import host_words, torch_module
from impress.types import Geometry
from tiers.base import Bytes

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

#: Pages encoded at once: bounds the float32 scratch.
_BLOCK_PAGES: Final = 64


@dataclass(frozen=True, slots=True)
class MinMax:
    """Least and most of each channel over `group` tokens, rounded outwards to float16.

    Keys beyond float16's range become infinite, and so does the bound, which still holds.
    """

    name: str
    group: int
    all_heads: bool = True

    def probe_bytes(self, geometry: Geometry) -> int:
        return 2 * geometry.n_kv_heads * geometry.head_dim * 2

    def encode(self, keys: Any, geometry: Geometry, params: bytes | None = None) -> Bytes:
        words = host_words(keys, geometry)
        n_heads, m, dim = words.shape
        pages = words.reshape(n_heads, m // self.group, self.group, dim)
        records = np.empty((m // self.group, 2, n_heads, dim), dtype=np.float16)
        for at in range(0, len(records), _BLOCK_PAGES):
            block = slice(at, at + _BLOCK_PAGES)
            values = floats_of(pages[:, block], geometry.dtype)
            records[block, 0] = _outwards(values.min(axis=2), -np.inf).transpose(1, 0, 2)
            records[block, 1] = _outwards(values.max(axis=2), np.inf).transpose(1, 0, 2)
        return records.reshape(len(records), -1).view(np.uint8)

    def score(
        self, records: Any, query: torch.Tensor, geometry: Geometry, scaling: float,
        params: bytes | None = None,
    ) -> Iterator[Scored]:  # fmt: skip
        """Upper bounds of the scaled scores, [heads, q, pages], one KV head at a time."""
        module = torch_module()
        halves = records_tensor(records, query.device).view(module.float16)
        shape = (len(halves), 2, geometry.n_kv_heads, geometry.head_dim)
        pages = halves.view(shape).to(module.float32)
        rows = query.to(module.float32) * scaling
        heads_per_kv = geometry.n_heads // geometry.n_kv_heads
        for kv in range(geometry.n_kv_heads):
            group = rows[kv * heads_per_kv : (kv + 1) * heads_per_kv]
            least, most = pages[:, 0, kv], pages[:, 1, kv]
            bounds = group.clamp(min=0) @ most.t() + group.clamp(max=0) @ least.t()
            yield Scored(bounds, None)


def _outwards(values: Floats, towards: float) -> npt.NDArray[np.float16]:
    """float16 values equal to these, or past them in the direction of `towards`."""
    with np.errstate(over="ignore"):
        near = values.astype(np.float16)
        short = near.astype(np.float32) > values if towards < 0 else near < values
        made: npt.NDArray[np.float16] = np.where(
            short, np.nextafter(near, np.float16(towards)), near
        )
    return made
