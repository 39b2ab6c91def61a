"""The one configuration of a store: a frozen tree, from keywords or a TOML file.

An unknown key is refused, naming the nearest known one. The environment variables that a store uses
are read here.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from impress.errors import BadInput, ConfigError, ImpressError
from impress.types import LONGEST_S, WINDOWS

MIB = 1 << 20
#: The most a process can address (x86-64, five levels of page tables); no disk holds as much.
MOST_BYTES = 1 << 56


class Config(BaseModel):
    """Settings of a `PrefixStore`. Bytes, seconds and counts say so in their names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    window: int = 64
    """Tokens in a window: a power of two in 16..256; fixed when a directory is first written."""
    dram_bytes: int = Field(default=1024 * MIB, ge=0, le=MOST_BYTES)
    """Budget of the DRAM tier: cached chunks, probe records, tables and history. 0: no copies."""
    hbm_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Budget of the HBM tier, above DRAM. 0: none."""
    hbm_device: Literal["cuda", "cpu"] = "cuda"
    """Where the HBM tier is: on the current CUDA device, or "cpu", which emulates it in host
    memory; every report says so."""
    eviction: Literal["importance", "lru", "lfu", "prefix-lru"] = "importance"
    """Which entry goes first when a tier is full. importance: the one with the least uses × share
    of rows that requests needed. lru: the least recently used. lfu: the least used. prefix-lru: the
    least recently used and, among those of one request, the longest prefix (vLLM's order). In HBM
    and DRAM no copy makes way for a newcomer that is worth less, except under lru. Copies of probe
    records always go by last use."""
    disk_bytes: int | None = Field(default=None, gt=0, le=MOST_BYTES)
    """Most bytes of segments on disk in this process's shard, at least `segment_bytes`. None: as
    much as the file system gives."""
    disk_high: float = Field(default=0.95, gt=0, le=1)
    """Share of disk_bytes above which spans are evicted in the background. What is larger than that
    alone is refused."""
    disk_low: float = Field(default=0.90, gt=0, le=1)
    """Share of disk_bytes they are evicted down to, so that storing seldom has to wait for room."""
    segment_bytes: int = Field(default=256 * MIB, ge=MIB, le=MOST_BYTES)
    """Size of one segment file, allocated whole. A multiple of 1 MiB."""
    write_buffer_bytes: int = Field(default=64 * MIB, ge=MIB, le=MOST_BYTES)
    """Bytes of pooled slots that hold packed rows on their way to the disk."""
    probes: tuple[str, ...] = Field(default=(), strict=False)  # TOML has lists
    """Probe codecs whose records are stored with every span, for policies that choose rows."""
    read_timeout_s: float = Field(default=10.0, gt=0, le=LONGEST_S)
    """A layer's read that takes longer is late: PrefixLost."""
    read_gap_bytes: int = Field(default=16 << 10, ge=0, le=MOST_BYTES)
    """Smaller gaps between chosen rows are read too: one request costs as much as these bytes."""
    prefetch_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Most bytes of the next layer's rows read ahead, on a guess, while a layer that chose its rows
    is computed. 0: none."""
    lease_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """A lease older than this expires: its next read raises."""
    io_threads: int = Field(default=8, ge=1, le=64)
    """Threads that read and write the SSD."""
    tenant_secret_file: str | None = None
    """A file of 16 to 64 secret bytes, readable by its owner alone, mixed into every key as a MAC
    key. Set by the operator, never by a tenant; with another secret nothing stored is found."""
    io_engine: Literal["auto", "aio", "io_uring", "preadv", "kvikio", "aiofiles"] = "auto"
    """How segments are read; `impress doctor` says which engines work here and measures each."""
    shard: int | None = Field(default=None, ge=0, lt=4096)
    """The shard of the directory that this process writes. A shard has one writer; every process
    reads all shards (docs/FORMAT.md). 0 is called main. None: the first that nobody writes to."""
    follow_every_s: float = Field(default=0.05, ge=0, le=LONGEST_S)
    """How often this process looks for what the writers of other shards stored or removed. 0: only
    when `PrefixStore.follow` is called, or a read finds that another process took a span away."""
    durable: bool = True
    """False skips fdatasync. For measurements only: a power cut may lose what was flushed."""
    repack_every_s: float = Field(default=600.0, ge=0, le=LONGEST_S)
    """How often often-chosen rows are packed side by side, in the background. 0: never."""
    repack_bytes_per_s: int = Field(default=64 * MIB, ge=MIB, le=MOST_BYTES)
    """Most bytes a second that repacking reads and writes."""
    repack_space_bytes: int = Field(default=4096 * MIB, ge=0, le=MOST_BYTES)
    """Most disk space for repacking: the copy of the span being repacked (one at a time), spans
    that moved and are still being read, and copies whose commit is late."""
    daily_write_bytes: int | None = Field(default=None, gt=0, le=MOST_BYTES)
    """Bytes that storing and repacking may write in a day, across restarts; a store beyond that is
    refused. What is left over counts for the next day, so a day after a rest may write up to twice
    as many. None: no limit."""
    admit: Literal["first", "second"] = "first"
    """When an engine stores a window: at its first use, or only if it was used before (for servers:
    most prompts never return). Anything given to `store` or `writer` is always admitted."""
    mode: Literal["auto", "sparse", "exact", "recompute"] = "auto"
    """What an engine does on a hit. auto: the cheapest mode its policy allows, by the rates
    measured so far. The others force one; "sparse" is exact under a policy that does not choose
    rows."""
    guard: Literal["auto", "off"] = "auto"
    """auto: where an engine chooses the mode, its policy may choose rows only once it has earned
    trust, and is watched from then on (docs/SELECTION.md, "The guard"). A call that names its
    policy, or a forced `mode`, is not guarded."""
    guard_shadows: int = Field(default=300, ge=1, le=1_000_000)
    """Requests in a row, answered exactly, whose selection must have missed little enough."""
    guard_share: float = Field(default=0.01, ge=0, le=1)
    """Share of the sparse requests after that which are weighed again after their answer."""
    guard_missing_mass: float = Field(default=0.1, ge=0, le=1)
    """Share of a request's attention that a policy without a bound of its own may miss."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Serve Prometheus metrics on 127.0.0.1 at this port; 0 picks a free one."""

    def __init__(self, /, **values: Any) -> None:  # a file may have a key "self"
        unknown = [key for key in values if key not in type(self).model_fields]
        if unknown:
            near = difflib.get_close_matches(unknown[0], type(self).model_fields, 1, 0.0)[0]
            raise ConfigError(f"config: unknown key {unknown[0]!r}; the nearest known is {near!r}")
        try:
            super().__init__(**values)
        except ValidationError as err:
            first = err.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            got = _shown(first["input"])
            said = "want a list of names" if first["type"] == "tuple_type" else first["msg"]
            raise ConfigError(f"config: {key}: {said}, got {got}") from None
        if self.window not in WINDOWS:
            got = _shown(self.window)
            raise ConfigError(f"config: window must be 16, 32, 64, 128 or 256, got {got}")
        if self.disk_low > self.disk_high:
            raise ConfigError(self._marks_said())
        if self.segment_bytes % MIB:
            raise ConfigError("config: segment_bytes must be a multiple of 1 MiB (1048576)")
        if self.disk_bytes is not None and self.disk_bytes < self.segment_bytes:
            raise ConfigError(
                f"config: disk_bytes {self.disk_bytes} cannot hold one segment: raise it, or lower "
                f"segment_bytes {self.segment_bytes}"
            )

    def _marks_said(self) -> str:
        """Says that the marks of the disk are the wrong way round, beginning with one that was set;
        of the other, that it was not."""
        low, high = f"disk_low {self.disk_low}", f"disk_high {self.disk_high}"
        if "disk_low" not in self.model_fields_set:
            return f"config: {high} is below {low} (its default): set both"
        if "disk_high" not in self.model_fields_set:
            return f"config: {low} is above {high} (its default): set both"
        return f"config: {low} is above {high}"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Config:
        """Read a TOML file of these keys. Raises ConfigError with the file's name in the line."""
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"config: want a file, str or os.PathLike, got {type(path).__name__}")
        try:
            values = tomllib.loads(expanded(path, "config:", ConfigError).read_text())
        except OSError as err:
            raise ConfigError(f"config: cannot read {path}: {err.strerror}") from None
        except RecursionError:
            raise ConfigError(f"config: {path} is not TOML: nested too deep") from None
        except ValueError as err:  # bad syntax, bad bytes, a number of 5,000 digits
            raise ConfigError(f"config: {path} is not TOML: {err}") from None
        try:
            return cls(**values)
        except ConfigError as err:
            raise ConfigError(f"{path}: {err}") from None


def _shown(value: object) -> str:
    """A refused value as text. Python does not print a number of 5,000 digits. Pure."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


def tenant_secret(config: Config) -> bytes:
    """The bytes of `tenant_secret_file`; none without one. Raises ConfigError."""
    if config.tenant_secret_file is None:
        return b""
    try:
        path = expanded(config.tenant_secret_file, "config: tenant_secret_file:", ConfigError)
        if not config.tenant_secret_file:
            raise ConfigError("config: tenant_secret_file: it is empty: name a file")
        if path.is_dir():
            raise ConfigError(f"config: tenant_secret_file: {path} is a directory; name a file")
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"config: tenant_secret_file: {path} is open to others: chmod 600")
        secret = path.read_bytes()
    except OSError as err:
        raise ConfigError(f"config: tenant_secret_file: {path}: {err.strerror}") from None
    except ValueError as err:  # a NUL, or bytes that no path has
        raise ConfigError(f"config: tenant_secret_file: {err}") from None
    if not 16 <= len(secret) <= 64:
        raise ConfigError(
            f"config: tenant_secret_file: {path} has {len(secret)} bytes, wanted are 16 to 64 "
            "(head -c 32 /dev/urandom)"
        )
    return secret


def expanded(path: str | os.PathLike[str], what: str, error: type[ImpressError] = BadInput) -> Path:
    """The path with ~ expanded as by a shell, which leaves it alone in --store=~/x, an environment
    file or a Python string: a folder named "~" is not the one meant. Raises `error` where no such
    home is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise error(
            f"{what} {path}: no such home directory is known; write the path in full"
        ) from None


def in_full(path: Path) -> Path:
    """The full path, for use from another directory. Raises BadInput where it cannot be told: the
    system's own error names no file."""
    try:
        return path.absolute()
    except FileNotFoundError:
        raise BadInput(
            f"{path}: the directory this runs in was deleted; go to another, or name it in full"
        ) from None


def default_store_dir() -> Path:
    """Where commands look without --store: $IMPRESS_STORE, else the user's cache directory."""
    chosen = os.environ.get("IMPRESS_STORE")
    return Path(chosen) if chosen else cache_dir() / "store"


def cache_dir() -> Path:
    """This user's place for things that can be made again. Raises ConfigError if there is none."""
    try:
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # A relative path is ignored, as the XDG specification says.
        return (named if named.is_absolute() else Path.home() / ".cache") / "impress"
    except RuntimeError:  # a container's user, say, without HOME and unknown to the system
        raise ConfigError(
            "this user has no home directory: name the store by --store or IMPRESS_STORE, or set "
            "XDG_CACHE_HOME"
        ) from None
