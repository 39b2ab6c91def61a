"""Policies for tests, and what a sparse request must equal: a masked full cache.

The reference is the model itself in eager attention on its own full cache, with an additive mask
per layer put in by hooks.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from test_engine_hf import attach, prompts, tiny

from impress.engines.hf_modules import CACHE
from impress.policy import Exact
from impress.selection.choices import Selection, whole
from impress.selection.identify import Asked, select

HIT = 128
LOGITS = {"output_logits": True, "return_dict_in_generate": True}
STD = 0.15  # of the weights: makes attention uneven, so that a wrong row shows


@dataclass(frozen=True)
class Given:
    """Chooses these rows in each layer; None means all of them, and an exception is raised."""

    rows: tuple[Any, ...]
    name: str = "given"
    needs_suffix_lse: bool = False
    probe: str | None = None


@select.register
def _(policy: Given, asked: Asked) -> Selection:
    rows = policy.rows[asked.layer]
    if isinstance(rows, BaseException):
        raise rows
    if rows is None:
        return whole("given", fell_back=True)
    return Selection(np.array(rows, dtype=np.int64), math.nan, math.nan, False, "given")


@dataclass(frozen=True)
class Watched:
    """Another policy, with a record of what it was asked and chose."""

    inner: Any
    seen: list[tuple[Asked, Selection]] = field(default_factory=list)
    name: str = "watched"

    @property
    def needs_suffix_lse(self) -> bool:
        return self.inner.needs_suffix_lse

    @property
    def probe(self) -> str | None:
        return self.inner.probe

    @property
    def rows(self) -> list[Any]:
        return [chosen.positions for _, chosen in self.seen]


@select.register
def _(policy: Watched, asked: Asked) -> Selection:
    chosen = select(policy.inner, asked)
    policy.seen.append((asked, chosen))
    return chosen


def pick(seed, n):
    return tuple(sorted(np.random.default_rng(seed).choice(HIT, n, replace=False).tolist()))


def model_of(family, dtype=torch.float32, **changes):
    std = {"init_std" if family == "opt" else "initializer_range": STD}
    return tiny(family, dtype, **{"num_hidden_layers": 3, **std, **changes})


def request_ids(n_new=80):
    """A prompt that shares two windows with prompts(200), then n_new tokens of its own."""
    return torch.cat([prompts(200)[:, :HIT], prompts(n_new, seed=2)], 1)


def filled(model, path, **options):
    engine = attach(model, path, **options)
    ids = prompts(200).to(model.device)
    engine.generate(ids, max_new_tokens=1, policy=Exact())
    engine.flush()
    return engine


def full_cache(model):
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(prompts(200).to(model.device), **{CACHE: cache})
    cache.crop(HIT - 200)
    return cache


@contextmanager
def masked(model, cache, chosen):
    """Hides all rows of the prefix but `chosen`, layer by layer, in eager attention."""

    def hide(module, args, kwargs):
        q = kwargs["hidden_states"].shape[1]
        n = cache.get_seq_length(module.layer_idx) + q
        seen = torch.ones(q, n, dtype=torch.bool).tril(n - q)
        rows = chosen[module.layer_idx]
        if rows is not None:
            kept = torch.zeros(n, dtype=torch.bool)
            kept[list(rows)] = True
            kept[HIT:] = True
            seen &= kept
        mask = torch.zeros(q, n, dtype=model.dtype).masked_fill(~seen, -math.inf)
        return args, {**kwargs, "attention_mask": mask[None, None].to(model.device)}

    layers = [module for module in model.modules() if hasattr(module, "k_proj")]
    hooks = [layer.register_forward_pre_hook(hide, with_kwargs=True) for layer in layers]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def reference(model, ids, chosen, n_new=16):
    cache = full_cache(model)
    with masked(model, cache, chosen):
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{CACHE: cache},
            max_new_tokens=n_new,
            do_sample=False,
            **LOGITS,
        )


def difference(mine, theirs):
    pairs = zip(mine.logits, theirs.logits, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def assert_matches(mine, theirs, most=1e-5):
    assert torch.equal(mine.sequences, theirs.sequences)
    assert difference(mine, theirs) <= most
