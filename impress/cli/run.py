"""`impress run`: one question about one long text, on any local model, through the store."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from impress.cli.models import check_length, check_model_dir, engine_module, load, query_ids
from impress.cli.options import (
    DiskGib,
    Json,
    Keep,
    MissingMass,
    PolicyName,
    Store,
    a_prompt,
    directory,
    policy_of,
    print_json,
    store_dir,
    text_of,
    window_of,
)
from impress.config import Config
from impress.errors import BadInput, ImpressError, StoreFailed
from impress.namespace import namespace_of
from impress.policy import Policy
from impress.store import PrefixStore
from impress.terminal import err, out, printable, size
from tiers.errors import MediumError


def run(
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR", parser=directory, help="A local Transformers model with its tokenizer."
        ),
    ],
    prefix: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            parser=a_prompt,
            help="The long text the question is about (UTF-8); - is stdin.",
        ),
    ],
    query: Annotated[str, typer.Option(metavar="TEXT", help="The question about the text.")],
    store: Store = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens to generate.")
    ] = 64,
    policy: PolicyName = "exact",
    keep: Keep = None,
    max_missing_mass: MissingMass = None,
    disk_gib: DiskGib = None,
    as_json: Json = False,
) -> None:
    """Answer a question about a text; the text is computed once and reused from then on.

    The prompt is the text followed by the question, tokenised separately so that the text's tokens
    do not depend on the question. The longest stored prefix of the prompt is read from the store.
    The rest is computed and stored, until the disk or --disk-gib is full; then what is worth least
    is evicted. Decoding is greedy. Model families: OPT, Llama, Qwen2, Qwen3, Mistral. Nothing is
    fetched from a network. It computes on the CPU. Run it twice to see the difference.

    Prints the answer, then how much of the prompt came from the store, the time to the first
    token (TTFT), bytes by tier, and the mode and why it was taken: recompute, exact (a stored
    prefix was reused) or sparse (chosen rows of one were: how many, how much was wanted and moved
    for them, and how much attention they may miss; docs/SELECTION.md says what each policy
    guarantees).

    **Exit status**

    0 answered, even where what was computed could not be stored (a full disk, say: it prints why) ·
    2 it could not answer: no such model, torch is missing, another model's store, none there and
    none can be made

    **Examples**

    impress run --model demo-out/model --prefix demo-out/documents/json.txt
    --query "What is it?" --store demo-out/store
    """
    text = _text(prefix)
    check_model_dir(model)
    chosen = policy_of(policy, keep, max_missing_mass)
    where = store_dir(store)
    config = Config(
        window=window_of(where), disk_bytes=None if disk_gib is None else disk_gib << 30
    )
    found = _answer(model, text, query, where, max_new_tokens, chosen, config)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _text(path: Path) -> str:
    try:
        return text_of(path)
    except UnicodeDecodeError:
        raise BadInput(f"--prefix {path}: not UTF-8 text") from None


def _answer(
    model_dir: Path, text: str, query: str, where: Path, n_new: int, policy: Policy, config: Config
) -> dict[str, Any]:
    hf = engine_module()
    import torch

    model, tokenizer = load(model_dir)
    ids = [*tokenizer(text)["input_ids"], *query_ids(tokenizer, query)]
    check_length(model.config, len(ids), n_new)
    with (
        _attached(hf, model, where, policy, config) as (engine, unwritable),
        err.status("answering"),
    ):
        prompt_ids = torch.tensor([ids], dtype=torch.int64)
        sequences = engine.generate(
            prompt_ids, max_new_tokens=n_new, do_sample=False,
            attention_mask=torch.ones_like(prompt_ids),  # a pad token in the text is deliberate
            policy=policy,  # named, so not guarded
        )  # fmt: skip
        request = _when_stored(engine, unwritable)
    return {
        "device": str(model.device),
        "answer": tokenizer.decode(sequences[0, len(ids) :], skip_special_tokens=True),
        "prompt_tokens": request.n_tokens,
        "hit_tokens": request.hit_tokens,
        "new_tokens": request.n_new,
        "mode": request.mode,
        "why": request.why,
        "policy": request.policy,
        "chosen_rows_share": request.chosen_rows_share,
        "fallback_share": request.fallback_share,
        "bytes_share": request.bytes_share,
        "transferred_share": request.transferred_share,
        "estimated_missing_mass": request.estimated_missing_mass,
        "missing_mass_worst_head": request.missing_mass_worst_head,
        "ttft_ms": request.ttft_ms,
        "bytes_by_tier": request.bytes_by_tier,
        "stored_tokens": request.stored_tokens,
        "refused": request.refused,
        "lost": request.lost,
        "store": str(where),
    }


@contextmanager
def _attached(
    hf: ModuleType, model: Any, where: Path, policy: Policy, config: Config
) -> Iterator[tuple[Any, str]]:
    """An engine over a store, and why that takes no writes: "" where it does. One that cannot be
    opened for writing (on a read-only file system, say) is read; raises why where not even that."""
    with ExitStack() as opened:
        unwritable = ""
        try:
            engine = hf.attach(model, where, policy, config=config)
        except StoreFailed as failed:
            geometry = hf.geometry_of(model.config, model.dtype)
            try:
                store = PrefixStore.open(where, geometry, namespace_of(model), config, mode="r")
            except ImpressError:
                raise failed from None
            opened.enter_context(store)
            engine, unwritable = hf.attach(model, store, policy), str(failed)
        yield opened.enter_context(engine), unwritable


def _when_stored(engine: Any, failed: str) -> Any:
    """What the request did. A failure to store, or one before, is reported as refused: the answer
    is there."""
    try:
        engine.flush()
    except (ImpressError, MediumError) as error:
        failed = str(error)
    request = engine.last_request
    assert request is not None, "a request has just returned"
    return replace(request, stored_tokens=0, refused=failed) if failed else request


def _print(found: dict[str, Any]) -> None:
    sys.stdout.write(found["answer"] + "\n")  # rich would turn its tabs into spaces
    read = ", ".join(f"{size(n)} from {tier}" for tier, n in found["bytes_by_tier"].items())
    out.print(
        f"\n[bold]{found['mode']}[/bold]: {found['hit_tokens']:,} of {found['prompt_tokens']:,} "
        f"prompt tokens from the store ({read or 'nothing read'}) · "
        f"TTFT {found['ttft_ms']:,.0f} ms · {found['stored_tokens']:,} tokens newly stored",
        soft_wrap=True,
    )
    out.print(f"why {found['why']}", markup=False, soft_wrap=True)
    if found["mode"] == "sparse":
        out.print(
            f"{found['policy']}: {found['chosen_rows_share']:.1%} of the rows chosen, "
            f"{found['bytes_share']:.1%} of exact's bytes wanted (rows and the records read to "
            f"choose them), {found['transferred_share']:.1%} moved; "
            f"{found['fallback_share']:.1%} of the layers fell back; estimated missing mass of "
            f"the worst layer {_mass(found['estimated_missing_mass'])}, "
            f"worst head {_mass(found['missing_mass_worst_head'])}",
            soft_wrap=True,
        )
    for what in ("refused", "lost"):
        if found[what] and found["mode"] != "sparse":  # sparse rows are never stored
            out.print(f"{what}: {printable(found[what])}", markup=False, soft_wrap=True)


def _mass(share: float) -> str:
    return "unknown" if math.isnan(share) else f"{share:.3f}"
