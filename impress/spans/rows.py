"""Between an engine's tensors and a plane's bytes: views, packing, finiteness. No I/O.

torch is imported only where a tensor is at hand or asked for; NumPy arrays work without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from impress.errors import BadInput, Unsupported
from impress.spans.layout import PlaneLayout
from impress.types import DTYPES, Geometry
from tiers.base import Bytes

if TYPE_CHECKING:
    import torch

Words = npt.NDArray[np.unsignedinteger[Any]]  # rows as raw words: uint16 or uint32

_WORD = {2: np.uint16, 4: np.uint32}
#: Per dtype: the first positive word that is not finite, and the first negative one.
_NOT_FINITE = {
    "float16": (0x7C00, 0xFC00),
    "bfloat16": (0x7F80, 0xFF80),
    "float32": (0x7F800000, 0xFF800000),
}

#: Bytes of rows moved from one place to another at once.
_BLOCK = 256 << 10


def check_rows(rows: Any, geometry: Geometry, head_dim: int, what: str) -> int:
    """The m of [n_kv_heads, m, head_dim]; touches no data. Raises BadInput on anything else.

    Wants a torch tensor or a NumPy array of the geometry's dtype.
    """
    shape = tuple(getattr(rows, "shape", ()))
    if len(shape) != 3 or shape[0] != geometry.n_kv_heads or shape[2] != head_dim:
        want = f"[{geometry.n_kv_heads}, rows, {head_dim}]"
        raise BadInput(f"{what}: want shape {want}, got {list(shape)}")
    name = str(rows.dtype).removeprefix("torch.")
    if name != geometry.dtype:
        raise BadInput(f"{what}: the store holds {geometry.dtype}, got {name}")
    loaded = _loaded_torch()
    if not isinstance(rows, np.ndarray) and (loaded is None or not isinstance(rows, loaded.Tensor)):
        raise BadInput(f"{what}: want a torch tensor or NumPy array, got {type(rows).__name__}")
    if not isinstance(rows, np.ndarray) and (rows.is_meta or rows.layout is not loaded.strided):
        raise BadInput(f"{what}: want a dense tensor, got {rows.layout} on {rows.device}")
    return int(shape[1])


def check_layers(
    keys: Sequence[Any], values: Sequence[Any], n_rows: int, geometry: Geometry
) -> None:
    """Check lists, by layer, of n_rows keys and values. Touches no data. Raises BadInput."""
    wanted = (("keys", keys, geometry.head_dim), ("values", values, geometry.v_dim))
    for what, rows, dim in wanted:
        if not hasattr(rows, "__len__"):
            raise BadInput(f"store: want a list of {what} by layer, got {type(rows).__name__}")
        if len(rows) != geometry.n_layers:
            raise BadInput(f"store: want {geometry.n_layers} layers of {what}, got {len(rows)}")
        for layer, tensor in enumerate(rows):
            n = check_rows(tensor, geometry, dim, f"store: layer {layer} {what}")
            if n != n_rows:
                raise BadInput(f"store: layer {layer} {what}: want {n_rows} rows, got {n}")


def host_words(rows: Any, geometry: Geometry) -> Words:
    """Checked rows [n_kv_heads, m, head_dim] as raw words on the host; no copy of host memory."""
    size = DTYPES[geometry.dtype]
    loaded = _loaded_torch()
    if loaded is not None and isinstance(rows, loaded.Tensor):
        if rows.device.type != "cpu":
            rows = rows.transpose(0, 1).contiguous().cpu().transpose(0, 1)
        rows = rows.detach().view(loaded.int16 if size == 2 else loaded.int32).numpy()
    words: Words = rows.view(_WORD[size])
    return words


def pack(words: Words, dest: Bytes, plane: PlaneLayout) -> None:
    """Write words [heads, m, dim] as whole pieces, token-major, padding zeroed. m: whole pieces."""
    heads, m, dim = words.shape
    pieces = dest.reshape(m // plane.piece_rows, plane.piece_bytes)
    used = plane.piece_rows * plane.row_bytes
    pieces[:, used:] = 0
    rows = pieces[:, :used].view(words.dtype).reshape(-1, plane.piece_rows, heads, dim)
    source = words.transpose(1, 0, 2).reshape(-1, plane.piece_rows, heads, dim)
    np.copyto(rows, source)


def plane_words(pieces: Bytes, plane: PlaneLayout, dtype: str, heads: int, dim: int) -> Words:
    """Packed whole pieces as [heads, m, dim] raw words: a view where rows have no padding."""
    used = plane.piece_rows * plane.row_bytes
    rows = pieces.reshape(-1, plane.piece_bytes)[:, :used].view(_WORD[DTYPES[dtype]])
    words: Words = rows.reshape(-1, heads, dim).transpose(1, 0, 2)
    return words


def unpack(pieces: Bytes, dest: Bytes, plane: PlaneLayout) -> None:
    """Strip the padding of whole pieces into dense rows."""
    used = plane.piece_rows * plane.row_bytes
    np.copyto(dest.reshape(-1, used), pieces.reshape(-1, plane.piece_bytes)[:, :used])


def take_rows(
    pieces: Bytes, rows: npt.NDArray[np.int64], plane: PlaneLayout, dest: Bytes | None = None
) -> Bytes:
    """Dense copies of some rows of whole pieces, in the order given; in `dest` if it is given."""
    used = plane.piece_rows * plane.row_bytes
    if dest is None:
        dest = np.empty(len(rows) * plane.row_bytes, dtype=np.uint8)
    to = dest.reshape(-1, plane.row_bytes)
    by_piece = pieces.reshape(-1, plane.piece_bytes)[:, :used]
    if plane.dense:
        # "clip": under "raise" NumPy fills a copy of its own first. The rows are known to be there.
        by_piece.reshape(-1, plane.row_bytes).take(rows, axis=0, out=to, mode="clip")
    else:
        by_row = by_piece.reshape(-1, plane.piece_rows, plane.row_bytes)
        to[:] = by_row[rows // plane.piece_rows, rows % plane.piece_rows]
    return dest


def scatter_rows(
    data: Bytes, some: npt.NDArray[np.int64] | None, row_bytes: int, dest: Bytes,
    to: npt.NDArray[np.int64],
) -> None:  # fmt: skip
    """Copy dense rows to rows `to` of dest, -1 being its last; `some`: only these."""
    rows, out = (memory.reshape(-1, row_bytes) for memory in (data, dest))
    if some is None:
        out[to] = rows
        return
    step = max(1, _BLOCK // row_bytes)
    for at in range(0, len(some), step):  # in blocks that never leave the core's cache
        mine = some[at : at + step]
        out[to.take(mine)] = rows.take(mine, axis=0, mode="clip")


def move_rows(pieces: Bytes, rows: npt.NDArray[np.int64], plane: PlaneLayout, dest: Bytes) -> None:
    """Some rows of whole pieces as whole pieces again, in the order given, padding zeroed."""
    if plane.dense:
        take_rows(pieces, rows, plane, dest)
        return
    used = plane.piece_rows * plane.row_bytes
    to = dest.reshape(-1, plane.piece_bytes)
    to[:, :used] = take_rows(pieces, rows, plane).reshape(-1, used)
    to[:, used:] = 0


def all_finite(data: Bytes, dtype: str) -> bool:
    """Whether no element is NaN or infinite: two maxima over the raw words, no copy.

    Measured: isfinite().all() reads .9 GB/s, a maximum over words 5.7.
    """
    positive, negative = _NOT_FINITE[dtype]
    words = data.view(_WORD[DTYPES[dtype]])
    signed = words.view(np.int16 if words.itemsize == 2 else np.int32)
    return bool(int(words.max()) < negative and int(signed.max()) < positive)


def _loaded_torch() -> Any:
    """torch if it is there, else None; also None while another thread is still importing it."""
    loaded = sys.modules.get("torch")
    return loaded if hasattr(loaded, "Tensor") else None


def torch_module() -> Any:
    """torch; where it is missing, Unsupported with one line on how to get it."""
    try:
        import torch
    except ImportError:
        raise Unsupported("reading needs torch: pip install torch") from None
    return torch


def as_tensor(data: Bytes, geometry: Geometry, n_rows: int, head_dim: int) -> torch.Tensor:
    """Dense token-major bytes as a strided view [n_kv_heads, n_rows, head_dim]; no copy."""
    module = torch_module()
    if not n_rows:  # a selection may be empty; frombuffer refuses zero bytes
        shape = (geometry.n_kv_heads, 0, head_dim)
        dtype = getattr(module, geometry.dtype)
        nothing: torch.Tensor = module.empty(shape, dtype=dtype, device="cpu")
        return nothing
    heads = geometry.n_kv_heads
    flat = module.frombuffer(data, dtype=getattr(module, geometry.dtype))
    # One call, not two: after each, the interpreter must be got back (see dense_bytes).
    rows: torch.Tensor = flat.as_strided((heads, n_rows, head_dim), (head_dim, heads * head_dim, 1))
    return rows


class _Memory:
    """A tensor's bytes as NumPy asks for them; what NumPy makes of it keeps the tensor alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        n_bytes = tensor.numel() * tensor.element_size()
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (n_bytes,), "data": (tensor.data_ptr(), False),
        }  # fmt: skip


def dense_bytes(out: torch.Tensor) -> Bytes | None:
    """The memory of a host tensor [heads, n, dim] that lies token-major; None if it does not.

    Calls nothing in torch: each call lets go of the interpreter, and among I/O threads gets it back
    some 20 us later (measured: four calls a tensor were a third of starting a layer's reads).
    """
    if out.device.type != "cpu" or not out.numel():
        return None
    heads, _, dim = out.shape
    wanted = zip(out.shape, out.stride(), (dim, heads * dim, 1), strict=True)
    if any(size > 1 and stride != dense for size, stride, dense in wanted):
        return None
    return np.asarray(_Memory(out))


def address_of(memory: Bytes) -> int:
    """The address of its first byte."""
    address: int = memory.__array_interface__["data"][0]
    return address
