"""Identities of one start of a local cluster, derived from a key of its HOME.

A token that was valid during an earlier start is worthless at the next one, also for a process that
has seen it. All processes of a HOME derive the same identity, and need no message for it.
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from storm_dagster.host.files import read_private_file, write_atomically
from storm_dagster.model.errors import Corrupt

_KEY_FILE = "home.key"
"""File of HOME with its key, which only the owner may read."""
_NUMBER_FILE = "start.number"
"""File of HOME with the number of its last start."""


def begin_start(home: Path) -> int:
    """Count a start of the cluster in ``home``, and return its number.

    The first one makes the key of ``home``. The caller holds the lock of ``home``: two starts at
    once could get the same number. A number that was returned is on the disk, and does not come
    again. Raises :class:`Corrupt` and :class:`InvalidRequest` as :func:`identity_of_start`.
    """
    number = start_number(home) + 1
    key_path = home / _KEY_FILE
    if key_path.exists():
        _key_of(home)
    else:
        write_atomically(key_path, f"{secrets.token_hex(32)}\n", mode=0o600, sync=True)
    write_atomically(home / _NUMBER_FILE, f"{number}\n", mode=0o600, sync=True)
    return number


def start_number(home: Path) -> int:
    """Number of the last start of the cluster in ``home``; 0 if there was none.

    Raises :class:`Corrupt` if its file holds no number.
    """
    path = home / _NUMBER_FILE
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return 0
    except (OSError, UnicodeDecodeError) as error:
        raise Corrupt(f"{path} cannot be read ({error}): {_remedy(path)}") from None
    if not text.isdigit():
        raise Corrupt(f"{path} holds no number ({text!r:.60}): {_remedy(path)}")
    return int(text)


def identity_of_start(home: Path, purpose: str, number: int | None = None) -> str:
    """Identity of the last start of the cluster in ``home``: 64 hexadecimal digits.

    It is a secret. Those of other purposes and of other starts do not follow from it, nor does the
    key. ``number`` names an earlier start. Raises :class:`Corrupt` for a number that is damaged,
    and :class:`InvalidRequest` for a key that is missing or that others may read.
    """
    if number is None:
        number = start_number(home)
    text = f"storm-dagster start {number} {purpose}"
    return hmac.new(_key_of(home).encode(), text.encode(), hashlib.sha256).hexdigest()


def _key_of(home: Path) -> str:
    """Key of ``home``. :class:`Corrupt` if its file is empty."""
    path = home / _KEY_FILE
    key = read_private_file(path, "the key of HOME")
    if not key:
        raise Corrupt(f"{path} is empty: stop the cluster, and remove the file; a start makes one")
    return key


def _remedy(path: Path) -> str:
    return (
        "stop the cluster, and write into it a number above that of all starts "
        f"(echo 1000 > {path})"
    )
