"""In whose name a command works: root, at somebody's store, in that user's.

What lies in a store is its owner's to change. Through a link that he put there root would write to
any file.
"""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path
from typing import Final

from rich.cells import cell_len

from impress.errors import StoreFailed
from impress.write.directory import IDENTITY

#: The kernel's number of a group that is nobody's.
_NO_GROUP: Final = 65534

_name = ""


def become_owner(store: Path) -> None:
    """For good, and with no more rights than he has. Nothing where this is not root, or the store,
    an absolute path, is root's.

    Raises StoreFailed where the system does not let it.
    """
    global _name
    if os.geteuid() != 0 or not (uid := _owner_of(store)):
        return
    name, group, groups = f"user {uid}", _NO_GROUP, list[int]()
    try:  # not the folder's group: of one that root made and gave away that is root's still
        known = pwd.getpwuid(uid)
        name, group = known.pw_name, known.pw_gid
        groups = os.getgrouplist(name, group)
    except KeyError:  # a container's user
        pass
    cell_len("–")  # rich reads its table for this when it first draws one: he may not read it
    try:
        os.setgroups(groups)
        os.setgid(group)
        os.setuid(uid)
    except OSError as err:
        raise StoreFailed(
            f"{store}: it is {name}'s, and root cannot act as that user here ({err.strerror}): run "
            "this as that user"
        ) from None
    _name = name


def whose() -> str:
    """Behind a line that says what failed: in whose name, where that is not the caller's, and
    whether this Python is one that he may not read, so that more of it may be missing."""
    if not _name:
        return ""
    lacks = "" if os.access(sys.executable, os.X_OK) else f" and who may not read {sys.prefix}"
    return f" (run as {_name}, whose the store is{lacks})"


def _owner_of(store: Path) -> int:
    """Who has the folder, or the nearest one above it where it is not there yet; where root has it
    and others write there, who has made the store in it. 0: all is root's."""
    for folder in (store, *store.parents):
        try:
            uid = folder.stat().st_uid
            break
        except OSError:  # not there, or not to be reached
            continue
    else:
        return 0
    if uid or folder != store:
        return uid
    return max(_uid_of(store / name) for name in ("shards", IDENTITY))


def _uid_of(path: Path) -> int:
    """Of a link its own; 0 where there is nothing."""
    try:
        return path.lstat().st_uid
    except OSError:
        return 0
