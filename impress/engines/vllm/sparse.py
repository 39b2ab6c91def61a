"""Sparse requests inside vLLM (stub until the backend is there)."""

from __future__ import annotations

from typing import Any


def serve(worker: Any) -> None:
    pass
