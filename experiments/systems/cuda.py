"""Compute that is there: the kernels that `clock.py` only waits for, on a CUDA device.

Weights are drawn, for so few layers that a device has room for them beside anything; what a request
asks is what `generate.py` makes of its number. Rows come as an engine gets them: to host memory,
then up to the device in one copy per layer and plane, and from there into attention. A policy that
looks at all keys to choose gets them on the device first, and the chosen ones are taken there.
Kernels are torch's own, unfused: nothing is compiled or captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional

from experiments.systems.device import Question, Rows, in_order
from experiments.systems.generate import N_NEW, Knobs, Prefix
from experiments.systems.planned import Around, given_importance
from experiments.systems.quantised import GROUP
from experiments.systems.shapes import Shape
from impress.policy import Policy, SnapWindow
from impress.selection.choices import Selection
from impress.selection.identify import Asked, select
from impress.selection.quant import n_scales, packed_bytes, unpack_codes

#: Layers that have weights; more layers take turns at these. None fits a cache of the device's.
_N_WEIGHTS: Final = 4


@dataclass(frozen=True, slots=True)
class OnDevice(Around):
    """`inner`, which is given all keys on the device where it looks at them; `spend` is told the
    seconds that choosing took, without reads and copies. `importance`: that of rows, by layer, as
    if it had been stored with them."""

    importance: Mapping[int, Any]
    up: Callable[[torch.Tensor], torch.Tensor]
    spend: Callable[[float], None]

    @property
    def needs_suffix_lse(self) -> bool:
        return self.inner.needs_suffix_lse


@select.register
def _(policy: OnDevice, asked: Asked) -> Selection:
    begin, read_s, read = time.perf_counter(), 0.0, asked.all_keys

    def all_keys() -> torch.Tensor:
        nonlocal read_s
        assert read is not None, "a session gives the layer's keys"
        since = time.perf_counter()
        keys = policy.up(read())
        read_s += time.perf_counter() - since
        return keys

    mine = replace(
        asked, all_keys=all_keys, key_rows=None,  # `up` puts them in order
        importance=lambda: policy.importance[asked.layer],
    )  # fmt: skip
    selection = select(policy.inner, mine)
    policy.spend(time.perf_counter() - begin - read_s)
    return selection


class Cuda:
    """One request at a time, kernels queued on the device's stream; see Device."""

    dilation = 1.0

    def __init__(
        self, shape: Shape, n_layers: int, prefixes: Sequence[Prefix], knobs: Knobs,
        device: str = "cuda",
    ) -> None:  # fmt: skip
        """`device`: tests give another one of torch's."""
        self.shape = shape
        self.key_rows: Callable[[], Any] = in_order
        self.spent_s = self.stated_s = 0.0
        self._n_layers = n_layers
        self._prefixes = prefixes
        self._knobs = knobs
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._kind = getattr(torch, shape.dtype)
        made = torch.Generator(self._device).manual_seed(7)
        self._draw = partial(torch.randn, device=self._device, dtype=self._kind, generator=made)
        self._weights = [self._layer() for _ in range(min(n_layers, _N_WEIGHTS))]
        longest = max(prefix.n_tokens for prefix in prefixes) + N_NEW
        self._embedded = self._draw(longest, shape.hidden)
        future = torch.ones(N_NEW, N_NEW, dtype=torch.bool, device=self._device).triu(1)
        self._future = future.repeat(shape.n_heads // shape.n_kv_heads, 1)
        self._given: dict[int, Mapping[int, Any]] = {}  # by the seeds of prefixes
        self._scored: Any = None  # all keys of the layer in which rows were last chosen by them
        self._h: Any = None  # [n, hidden]: of the tokens computed
        self._new: Any = None  # queries, keys, values of a layer's new tokens
        self.forward_s(longest - N_NEW)  # libraries set themselves up at first use

    def pace(self, dilation: float) -> None:
        """Nothing: it takes what it takes."""

    def start(self) -> float:
        self._wait()
        self.spent_s = self.stated_s = 0.0
        self._h = self._scored = None
        return time.perf_counter()

    def beside(self) -> None:
        """Nothing goes on beside the reads."""

    def forward(self, layer: int, n_tokens: int) -> None:
        if self._h is None:
            self._h = self._embedded[-n_tokens:]
        q, k, v = (rows.transpose(0, 1)[None] for rows in self._projected(layer))
        seen = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.shape.n_kv_heads != self.shape.n_heads
        )
        self._rest(layer, seen[0])

    def project(self, layer: int) -> None:
        if self._h is None:
            self._h = self._embedded[-N_NEW:]
        self._new = self._projected(layer)

    def question(self, inner: Policy, prefix: int, request: int, n_tokens: int) -> Question:
        asked, own = {}, self._prefixes[prefix]
        for layer in range(self._n_layers):
            query = own.query(request, layer, self._knobs)
            lse = own.suffix_lse(request, layer, query)
            asked[layer] = (query.to(self._device), None, lse.to(self._device))
        importance = self._importance(own) if isinstance(inner, SnapWindow) else {}
        policy = OnDevice(inner, importance, self._to_score, self._spend)
        return Question(policy, asked.__getitem__)

    def attend(self, layer: int, rows: Rows) -> float:
        begin = time.perf_counter()
        k = self._up(rows.k) if self._scored is None else self._scored
        v, at, chosen = self._up(rows.v), self._index(rows.positions), self._index(rows.chosen)
        copied_s, self._scored = time.perf_counter() - begin, None
        if chosen is not None:
            k = k[:, chosen]
        if rows.bits < 16:
            k, v = (self._dequantised(plane[0], rows.bits) for plane in (k, v))
        if at is not None:
            k, v = (_placed(plane, at) for plane in (k, v))
        q, new_k, new_v = self._new
        self._rest(layer, self._seen(q, k, v, new_k.transpose(0, 1), new_v.transpose(0, 1)))
        return copied_s

    def finish(self) -> None:
        begin = time.perf_counter()
        self._h[-1].argmax().item()
        self._spend(time.perf_counter() - begin)

    def forward_s(self, n_tokens: int) -> float:
        took = []
        for _ in range(3):
            begin = self.start()
            for layer in range(self._n_layers):
                self.forward(layer, n_tokens)
            self.finish()
            took.append(time.perf_counter() - begin)
        return min(took) * self.shape.n_layers / self._n_layers

    def _importance(self, prefix: Prefix) -> Mapping[int, Any]:
        """What a prompt's last rows gave, by layer; made once."""
        if prefix.seed not in self._given:
            self._given[prefix.seed] = {
                layer: given_importance(prefix, layer, prefix.keys(layer), self._knobs)
                for layer in range(self._n_layers)
            }
            prefix.forget()
        return self._given[prefix.seed]

    # ---- what a layer does -------------------------------------------------------------------

    def _layer(self) -> tuple[Any, ...]:
        """Weights: to queries, keys and values; out of attention; of the MLP, one or two up."""
        s, kv = self.shape, self.shape.n_kv_heads * self.shape.head_dim
        wide = (2 if s.gated else 1) * s.ffn
        shapes = ((s.hidden, s.hidden + 2 * kv), (s.hidden, s.hidden), (s.hidden, wide),
                  (s.ffn, s.hidden))  # fmt: skip
        return tuple(self._draw(*shape).mul_(shape[0] ** -0.5) for shape in shapes)

    def _projected(self, layer: int) -> tuple[Any, Any, Any]:
        """Query, key and value [n, heads, head_dim] of every token computed."""
        s = self.shape
        normed = functional.layer_norm(self._h, (s.hidden,))
        made = normed @ self._weights[layer % len(self._weights)][0]
        heads = made.view(len(made), -1, s.head_dim)
        q, k, v = heads.split((s.n_heads, s.n_kv_heads, s.n_kv_heads), dim=1)
        return q, k, v

    def _rest(self, layer: int, seen: Any) -> None:
        """The layer after attention: `seen` [n_heads, n, head_dim]."""
        _, out, up, down = self._weights[layer % len(self._weights)]
        h = self._h + seen.transpose(0, 1).reshape(len(self._h), -1) @ out
        wide = functional.layer_norm(h, (self.shape.hidden,)) @ up
        if self.shape.gated:
            gate, wide = wide.chunk(2, dim=1)
            wide = functional.silu(gate) * wide
        else:
            wide = functional.relu(wide)
        self._h = h + wide @ down

    def _seen(self, q: Any, k: Any, v: Any, new_k: Any, new_v: Any) -> Any:
        """Attention of the new tokens to rows and to themselves: [n_heads, N_NEW, head_dim].

        Written out: a query of a few tokens on all rows is bound by memory, in any order.
        """
        s = self.shape
        k, v = torch.cat((k, new_k), 1), torch.cat((v, new_v), 1)
        rows = q.transpose(0, 1).reshape(s.n_kv_heads, -1, s.head_dim)
        scores = (rows @ k.transpose(1, 2)).mul_(s.head_dim**-0.5)
        scores[:, :, -N_NEW:].masked_fill_(self._future, float("-inf"))
        seen = scores.softmax(-1, dtype=torch.float32).to(self._kind) @ v
        return seen.view(s.n_heads, N_NEW, s.head_dim)

    def _dequantised(self, words: Any, bits: int) -> Any:
        """Rows [n_kv_heads, m, head_dim] of `quantised_rows` [m, words]."""
        s = self.shape
        raw, m = words.contiguous().view(torch.uint8), len(words)
        of_scales, of_codes = n_scales(s.head_dim, GROUP), packed_bytes(s.head_dim, bits)
        first = 2 * s.n_kv_heads * of_scales
        scales = raw[:, :first].contiguous().view(torch.float16)
        packed = raw[:, first : first + s.n_kv_heads * of_codes].reshape(-1, of_codes)
        codes = torch.empty(len(packed), s.head_dim, dtype=torch.uint8, device=self._device)
        unpack_codes(packed, s.head_dim, bits, codes)
        values = codes.to(self._kind).sub_((1 << (bits - 1)) - 0.5)
        values.view(m, s.n_kv_heads, of_scales, -1).mul_(
            scales.to(self._kind).view(m, s.n_kv_heads, of_scales, 1)
        )
        return values.view(m, s.n_kv_heads, s.head_dim).transpose(0, 1)

    # ---- between host and device -------------------------------------------------------------

    def _up(self, rows: torch.Tensor) -> torch.Tensor:
        """[heads, m, dim] on the device. Token-major rows are copied as they lie."""
        if rows.device == self._device:
            return rows
        lying: torch.Tensor = rows.transpose(0, 1).to(self._device, non_blocking=True)
        return lying.transpose(0, 1)

    def _to_score(self, keys: torch.Tensor) -> torch.Tensor:
        """All keys of a layer on the device, from which the chosen ones are taken later."""
        keys, rows = self._up(keys), self.key_rows()
        if rows is not None:
            keys = _placed(keys, torch.from_numpy(rows).to(self._device, non_blocking=True))
        self._scored = keys
        return keys

    def _index(self, positions: torch.Tensor | None) -> torch.Tensor | None:
        if positions is None:
            return None
        return positions.to(self._device, non_blocking=True)

    def _spend(self, seconds: float) -> None:
        self.spent_s += seconds
        self.stated_s += seconds

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


def _placed(rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rows [heads, m, dim], each at its position."""
    lying = rows.transpose(0, 1)
    return torch.empty_like(lying).index_copy_(0, at, lying).transpose(0, 1)
