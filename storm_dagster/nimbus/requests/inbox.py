"""The folder of transfers in progress, ``HOME/nimbus/<id>/inbox``, and its cleaner, as in JStorm."""

from __future__ import annotations

import logging
import secrets
import shutil
from pathlib import Path

_log = logging.getLogger(__name__)


def new_inbox_file(inbox: Path) -> Path:
    """A fresh file name; nothing of it comes from a caller."""
    return inbox / f"part-{secrets.token_hex(16)}"


def clean_inbox(inbox: Path, *, expiration_secs: float, now: float) -> list[str]:
    """Remove entries whose modification time + ``expiration_secs`` is not after ``now`` (epoch seconds).

    Links are removed, never followed. Returns the names of what was removed.
    """
    removed: list[str] = []
    for path in sorted(inbox.iterdir()):
        try:
            if path.lstat().st_mtime + expiration_secs > now:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path.name)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, error)
    return removed
