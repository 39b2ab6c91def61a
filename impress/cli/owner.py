"""The user a command works as: root, at another user's store, works as that user.

A store's owner may change whatever is in it. Through a link that the owner put there, root would
write to any file.
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

#: The kernel's number for a group that is nobody's.
_NO_GROUP: Final = 65534

_name = ""


def become_owner(store: Path) -> None:
    """Become the store's owner for good, with no further rights. Does nothing where this is not
    root, or where the store, an absolute path, is root's.

    Raises StoreFailed where the system does not allow it.
    """
    global _name
    if os.geteuid() != 0 or not (uid := _owner_of(store)):
        return
    name, group, groups = f"user {uid}", _NO_GROUP, list[int]()
    try:  # not the folder's group: if root made it and gave it away, that is still root's
        known = pwd.getpwuid(uid)
        name, group = known.pw_name, known.pw_gid
        groups = os.getgrouplist(name, group)
    except KeyError:  # a container's user
        pass
    cell_len("–")  # rich reads a table for this at first use: the owner may not read it
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
    """Ends a line that says what failed: as which user, where that is not the caller, and whether
    that user may not read this Python, so that more of it may be missing."""
    if not _name:
        return ""
    lacks = "" if os.access(sys.executable, os.X_OK) else f" and who may not read {sys.prefix}"
    return f" (run as {_name}, whose the store is{lacks})"


def _owner_of(store: Path) -> int:
    """The owner of the folder, or of the nearest one above it that exists; where root owns it and
    others write there, whoever made the store in it. 0: all is root's."""
    for folder in (store, *store.parents):
        try:
            uid = folder.stat().st_uid
            break
        except OSError:  # not there, or not reachable
            continue
    else:
        return 0
    if uid or folder != store:
        return uid
    return max(_uid_of(store / name) for name in ("shards", IDENTITY))


def _uid_of(path: Path) -> int:
    """The path's owner, of a link its own; 0 where there is nothing."""
    try:
        return path.lstat().st_uid
    except OSError:
        return 0
