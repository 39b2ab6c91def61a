"""`impress purge`: erase what a store holds for a namespace or a tenant."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from impress.blockhash import namespace_digest, root_key
from impress.cli.options import Json, Store, a_file, print_json, store_dir
from impress.cli.survey import called
from impress.config import Config, tenant_secret
from impress.errors import BadInput, StoreFailed
from impress.spans.format import SpanRecord
from impress.spans.params import Params
from impress.store import PrefixStore
from impress.terminal import count, out, size
from impress.write.directory import Shard, read_identity, shards_of, writing
from impress.write.env import compact
from impress.write.strays import said_of_strays

_LEAST_HEX = 8


def purge(
    store: Store = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A namespace as inspect shows it: its name, or its digits if none is known.",
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="One tenant (vLLM: salt:CACHE_SALT); without --namespace, in all namespaces.",
        ),
    ] = None,
    tenant_secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=a_file, help="The secret its keys were made with."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Erase everything stored for a namespace, or for one tenant.

    Its blocks are punched out of the segments (overwritten where the file system has no holes),
    with all that is free there, whether evicted or cut off by a crash. The index is rewritten
    without what it has freed, so that token ids do not linger there. Both happen even where nothing
    is found any more, so the same command finishes a purge that was cut off. Every shard is done,
    so none may be open for writing elsewhere: stop every process that serves from the directory;
    one that only reads keeps what it has in memory.

    **Exit status**

    0 erased · 2 nothing of that name is stored here, or it could not run

    **Examples**

    impress purge --namespace "model 3f9a52c1d07b"

    impress purge --tenant acme --tenant-secret-file /etc/impress/tenant.key

    impress purge --tenant salt:acme
    """
    if namespace is None and tenant is None:
        raise BadInput("purge: say what: --namespace NAME, --tenant NAME, or both")
    if tenant == "" and namespace is None:  # from an unset variable, say
        raise BadInput(
            "purge: --tenant is empty: that is all that has no tenant; say of which --namespace"
        )
    if tenant_secret_file is not None and tenant is None:
        raise BadInput(
            "purge: --tenant-secret-file goes with --tenant: without one, everything of the "
            "namespace is erased, whatever its secret"
        )
    where = store_dir(store)
    secret = None if tenant_secret_file is None else str(tenant_secret_file)
    spans, freed = _erased(where, namespace, tenant, secret)
    if tenant is not None and not spans:  # keys do not tell whose they are: a wrong name finds none
        raise BadInput(_nothing(tenant, secret))
    if as_json:
        print_json({"store": str(where), "spans": spans, "freed_bytes": freed})
    else:
        erased = f"{where}: {count(spans, 'span')} erased, {size(freed)}"
        out.print(erased, markup=False, soft_wrap=True)


def _erased(
    where: Path, namespace: str | None, tenant: str | None, secret: str | None
) -> tuple[int, int]:
    """Erase, then return (spans erased, bytes freed).

    The index of every shard is rewritten even where nothing is in that namespace; BadInput is
    raised after that. Raises StoreLocked.
    """
    identity = read_identity(where)
    config = Config(
        window=identity.window, dram_bytes=0, io_threads=2, tenant_secret_file=secret,
        follow_every_s=0, repack_every_s=0,
    )  # fmt: skip
    shards = shards_of(where)
    if said := said_of_strays(where):  # all or nothing
        raise StoreFailed(f"{where}: nothing is purged: {said[0]}")
    for shard in shards:
        try:
            with writing(shard):
                shard.lock()
        except StoreFailed as err:
            raise StoreFailed(f"{where}: nothing is purged: {err}") from None
        shard.unlock()
        if n := shard.n_misnamed():
            raise StoreFailed(
                f"{where}: nothing is purged, {n} segments of shard {shard.name} are numbered as "
                f"another folder's and would stay: {Shard.RENAMED}"
            )
    stored, digests = set[bytes](), set[bytes]()
    there, unerased = list[SpanRecord](), 0
    if shards:
        with PrefixStore.open(where, identity.geometry, b"purge", config, "r") as reader:
            for name, why in reader.left_out().items():  # before anything is erased
                raise StoreFailed(f"{where}: nothing is purged, shard {name} cannot be read: {why}")
            stored = _stored(reader, shards)
            digests = _digests(reader, stored, namespace)
            # Now: opening a shard deletes what hangs from spans that were purged in another one.
            there = _wanted(reader, shards, tenant, digests)
    failed: StoreFailed | None = None
    for shard in shards:
        of_shard = config.model_copy(update={"shard": shard.number})
        with writing(shard):
            with PrefixStore.open(where, identity.geometry, b"purge", of_shard) as opened:
                opened.purge(tenant, namespaces=digests)
            unerased += opened.counters["unerased_spans"]
            shard.lock()
        try:
            compact(shard.index)
        except StoreFailed as err:  # no room, say: the other shards' rows must still go
            failed = failed or err
        shard.unlock()
    if failed is not None:
        raise failed
    if unerased:
        raise StoreFailed(f"{where}: purged, but not all could be overwritten; see the log")
    if namespace is not None and not digests:
        raise BadInput(_unknown(namespace, stored))
    return len(there), sum(record.owned_bytes for record in there)


def _wanted(
    store: PrefixStore, shards: list[Shard], tenant: str | None, digests: set[bytes]
) -> list[SpanRecord]:
    """What all shards hold of a tenant (None: of every one) in namespaces, in the tree or not."""
    ids = (span for shard in shards for span in store.catalog.known(shard.spans))
    records = store.catalog.retired_records(list(ids))
    if tenant is None:
        return [record for record in records if record.namespace in digests]
    secret = tenant_secret(store.config)
    roots = {root_key(d, store.geometry, store.window, tenant, secret) for d in digests}
    return [record for record in records if record.root in roots]


def _unknown(namespace: str, there: set[bytes]) -> str:
    """Says that no namespace has that name, or that the digits given are too few. Pure."""
    digits = _digits(namespace)
    if digits and any(digest.hex().startswith(digits) for digest in there):
        return (
            f"purge: --namespace {namespace} is no name here; to go by digits, give at least "
            f"{_LEAST_HEX} of its digits"
        )
    return f"purge: --namespace {namespace} is not stored here (impress inspect lists them)"


def _digits(namespace: str) -> str:
    """The digits of a namespace's digest, as `inspect` shows one without a name. Pure."""
    return namespace.lower().removeprefix("model ")


def _nothing(tenant: str, secret: str | None) -> str:
    """Says that a tenant has nothing here, and what may be wrong. Pure."""
    key = "another secret" if secret else "a secret (--tenant-secret-file)"
    salt = "" if tenant.startswith("salt:") else f", or is it vLLM's (--tenant salt:{tenant})"
    return (
        f"purge: nothing of tenant {tenant!r} is stored here: is it in another store or namespace, "
        f"are its keys made with {key}{salt}?"
    )


def _stored(store: PrefixStore, shards: list[Shard]) -> set[bytes]:
    """Digests of all namespaces: from names and parameters even where all spans are gone. Where
    they are not, a span says whose its root is, and a name may be damaged."""
    known = {record.root: record.namespace for record in store.catalog.records()}
    there, names = {*known.values()}, store.names()
    there |= {namespace_digest(name) for root, name in names.items() if name and root not in known}
    for shard in shards:
        there |= Params(shard.params, write=False).namespaces()
    return there


def _digests(store: PrefixStore, there: set[bytes], namespace: str | None) -> set[bytes]:
    """Digests of the namespaces meant, if any. Raises BadInput where the name fits several."""
    if namespace is None:
        return there
    if not namespace:
        raise BadInput("purge: --namespace is empty")
    named = namespace_digest(namespace)
    if named in there:
        return {named}
    digits = _digits(namespace)
    if len(digits) < _LEAST_HEX:
        return set()
    found = {d for d in there if d.hex().startswith(digits)}
    if len(found) > 1:
        raise BadInput(
            f"purge: --namespace {namespace} names several namespaces (impress inspect lists them)"
        )
    names = store.names()
    for record in store.catalog.records() if not found else ():
        if record.root.hex().startswith(digits):  # one tenant's part; which tenant's is not said
            name = called(record.namespace, names.get(record.root, ""))
            raise BadInput(
                f"purge: {namespace} is a root, of the namespace {name!r}; that and all its "
                f"tenants go with --namespace {shlex.quote(name)}"
            )
    return found
