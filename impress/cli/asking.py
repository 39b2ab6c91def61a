"""One model request over a snapshot of a store, for `impress explain --query`.

Nothing is written: the store is opened for reading, so another process may have it in use.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from impress.blockhash import Tokens
from impress.cli.models import check_length, engine_module, load, query_ids
from impress.config import Config
from impress.namespace import namespace_of
from impress.policy import Policy
from impress.store import PrefixStore
from impress.terminal import err
from impress.types import Geometry


def ask(
    model_dir: Path, where: Path, geometry: Geometry, window: int, prompt: str | Tokens, query: str,
    policy: Policy,
) -> tuple[Tokens, bytes, dict[str, Any]]:  # fmt: skip
    """The request's tokens, the model's namespace, and what generating one new token took.

    `geometry`: the model's, in the dtype it is to be loaded in; `window`: the store's. Raises
    StoreMismatch where the store has another geometry, BadInput, Unsupported.
    """
    hf = engine_module()
    import numpy as np
    import torch

    model, tokenizer = load(model_dir, geometry.dtype)
    before = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt.tolist()
    ids = [*before, *query_ids(tokenizer, query)]
    check_length(model.config, len(ids), 1)
    namespace = namespace_of(model)
    probes = () if policy.probe is None else (policy.probe,)
    config = Config(window=window, probes=probes)
    with (
        PrefixStore.open(where, geometry, namespace, config, mode="r") as store,
        hf.attach(model, store, policy, store_new=False) as engine,
        err.status("asking"),
    ):
        prompt_ids = torch.tensor([ids], dtype=torch.int64)
        # The policy is named, so it is not guarded: what the user asks to see is its choice.
        engine.generate(
            prompt_ids, max_new_tokens=1, do_sample=False, policy=policy,
            attention_mask=torch.ones_like(prompt_ids),  # a pad token in the text is deliberate
        )  # fmt: skip
        request = engine.last_request
    assert request is not None, "a request has just returned"
    found = asdict(request)
    del found["n_new"], found["stored_tokens"], found["refused"]  # nothing is stored from here
    found["probe"] = policy.probe
    return np.asarray(ids, dtype=np.int32), namespace, found
