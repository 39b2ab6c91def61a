"""`impress explain`: why a prefix hit or missed, and what a request over it chooses and costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from impress.blockhash import Tokens
from impress.cli.explained import print_match, print_request
from impress.cli.matching import match_prompt
from impress.cli.options import (
    Keep,
    MissingMass,
    PolicyAsked,
    Store,
    a_file,
    a_prompt,
    check_json,
    directory,
    policy_of,
    store_dir,
    text_of,
)
from impress.cli.survey import from_json, open_for_reading, read_token_file, tokens_in
from impress.errors import BadInput
from impress.namespace import namespace_of
from impress.policy import Policy
from impress.report import write_json
from impress.weights import weight_files

#: What a prompt's keys depend on besides the model; no option here asks for these.
_ASSUMED: Final = {"engine": "transformers", "tenant": "", "tenant_secret": False}


def explain(
    prefix: Annotated[
        Path,
        typer.Option(
            metavar="FILE", parser=a_prompt,
            help="The prompt: token ids as a JSON list, integers separated by white space or a "
            ".npy array; with --model any other file is text (UTF-8); - is stdin.",
        ),
    ],
    query: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Run the model on the prompt followed by TEXT, for one token, and show what each "
            "layer chose. Needs --model.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=directory,
            help="A local Transformers model with its tokenizer. Its namespace is looked at, as "
            "the Transformers engine has it in the store's dtype, without tenant or tenant secret.",
        ),
    ] = None,
    store: Store = None,
    policy: PolicyAsked = None,
    keep: Keep = None,
    max_missing_mass: MissingMass = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", parser=a_file,
            help="Write all of it to FILE as one JSON object; - prints it instead of tables.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Say why a prompt's prefix hits or misses, where it lies and what reading it costs.

    Shows how many of its windows are stored in each namespace; the first that is not, and why; the
    spans that hold the others, how hot they are (leases are those of a span's most used part), and
    what reading them takes by the read cost model (bytes and requests planned, milliseconds
    modelled). Reads a snapshot of the index and the matching headers but no rows, and holds up no
    writer. Token ids are never printed.

    With --query, the model then answers with one token over its own snapshot. Shows how many rows
    each layer chose and why, how much it estimates to miss, and the rows' tiers. Nothing is stored.

    **Exit status**

    0 explained, hit or miss · 2 there is no store, it cannot be read, or no such model

    **Examples**

    impress explain --prefix prompt.json

    impress explain --model demo-out/model --prefix demo-out/documents/json.txt
    --query "What is it?" --store demo-out/store
    """
    chosen = policy_of(policy or "quality", keep, max_missing_mass)
    check_json(json_file)
    idle = any(given is not None for given in (policy, keep, max_missing_mass))
    _check(query, model, idle=idle)
    found = _explained(store_dir(store), prefix, query, model, chosen)
    if json_file is not None:
        write_json(json_file, found)
    if json_file is None or str(json_file) != "-":
        print_match(found)
        if "request" in found:
            print_request(found)


def _check(query: str | None, model: Path | None, *, idle: bool) -> None:
    """`idle`: policy settings were given. Raises BadInput where nothing would use an option."""
    if query is not None and model is None:
        raise BadInput("--query needs --model DIR: the model that is to be asked")
    if query is None and idle:
        raise BadInput(
            "--policy, --keep and --max-missing-mass need --query: without it nothing chooses"
        )


def _explained(
    where: Path, file: Path, query: str | None, model: Path | None, policy: Policy
) -> dict[str, Any]:
    """Everything that is shown, ready for JSON."""
    opened, identity = open_for_reading(where)
    namespace, request, mismatch, assumed = None, None, "", None
    with opened:
        if model is None:
            tokens = _token_ids(file)
            prompt: str | Tokens = tokens
        else:
            from impress.cli.models import check_model_dir, geometry_in

            check_model_dir(model)
            prompt = _prompt(file)
            geometry = geometry_in(model, identity.geometry)
            assumed = {**_ASSUMED, "dtype": geometry.dtype}
            if query is None:
                _check_files(model)
                assumed["weights"] = "as in its files"
                tokens = _in_tokens_of(model, file, prompt)
                namespace = namespace_of(model, dtype=geometry.dtype)
                if geometry != identity.geometry:
                    mismatch = f"the store holds {identity.geometry}, the model has {geometry}"
            else:
                from impress.cli.asking import ask

                tokens, namespace, request = ask(
                    model, where, geometry, identity.window, prompt, query, policy
                )
        opened.follow()  # loading a model takes time, and no writer waits for this reader
        found: dict[str, Any] = {
            "store": str(where), "window": identity.window, "mismatch": mismatch,
            "read_as": "text" if isinstance(prompt, str) else "token ids",
            "assumed": assumed,
            **match_prompt(opened, tokens, namespace),
        }  # fmt: skip
    if request is not None:
        found["request"] = request
    return found


def _check_files(model: Path) -> None:
    """Raises BadInput where no file tells what the engine calls this model."""
    if any(file.suffix != ".safetensors" for file in weight_files(model)):
        raise BadInput(
            f"--model {model}: its weights are not in safetensors files, so that it is named by "
            "what it has in memory: --query TEXT loads it, and tells"
        )


def _in_tokens_of(model: Path, file: Path, prompt: str | Tokens) -> Tokens:
    """The prompt in a model's tokens."""
    if not isinstance(prompt, str):
        return prompt
    import numpy as np

    from impress.cli.models import load_tokenizer

    ids = load_tokenizer(model)(prompt)["input_ids"]
    if not ids:
        raise BadInput(f"--prefix {file}: empty")
    return np.asarray(ids, dtype=np.int32)


def _prompt(file: Path) -> str | Tokens:
    """Token ids where `read_token_file` would accept the file as such, else text."""
    if file.suffix == ".npy":
        return read_token_file(file)
    try:
        text = text_of(file)
    except UnicodeDecodeError:
        raise BadInput(f"--prefix {file}: not UTF-8 text") from None
    ids = text.removeprefix("\ufeff")  # some editors put this before a text
    return tokens_in(ids, file) if _is_ids(ids) else text  # a pipe can be read only once


def _is_ids(text: str) -> bool:
    """Whether it is a JSON list of integers, or integers separated by white space. Pure."""
    try:
        if isinstance(found := from_json(text), list):
            return bool(found) and all(type(each) is int for each in found)
    except ValueError:
        pass
    try:
        return bool([int(word) for word in text.split()])
    except ValueError:
        return False


def _token_ids(file: Path) -> Tokens:
    try:
        return read_token_file(file)
    except BadInput as err:
        raise BadInput(
            f"--prefix {err} (text needs --model DIR, whose tokenizer is used)"
        ) from None
