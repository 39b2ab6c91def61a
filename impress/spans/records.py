"""Whether a span's record can be true: checks that need no medium. Pure."""

from __future__ import annotations

from impress.blockhash import key_after
from impress.spans.format import SpanRecord
from impress.spans.layout import SpanLayout
from impress.types import Geometry


def wrong_record(record: SpanRecord, geometry: Geometry, window: int) -> str:
    """Why a record that decodes cannot be true in a store of this shape; "" when it can."""
    if record.window != window:
        return f"window {record.window}, the store's is {window}"
    if not record.n_windows or len(record.labels) != record.n_windows * 4 * window:
        return f"{len(record.labels)} bytes of tokens for {record.n_windows} windows"
    layout = SpanLayout.of(geometry, window, record.n_windows)
    if record.data_bytes < layout.data_bytes:
        return f"{record.data_bytes} bytes of space for {layout.data_bytes}"
    if not record.first_window and record.key_before != record.root:
        return "it begins a prompt, but not at its root"
    if key_after(record.key_before, record.labels, window) != record.key_after:
        return "its key does not follow from its tokens"
    return ""
