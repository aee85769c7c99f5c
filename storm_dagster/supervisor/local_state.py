"""Local state of a supervisor across restarts.

It is in ``HOME/supervisor/<id>/localstate/state.json``, written by rename after fsync, with a
checksum. A damaged file is quarantined and not repaired: the state is rebuilt from the cluster, the
running processes and the workers' spec files.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from storm_dagster.host.files import write_atomically

_log = logging.getLogger(__name__)

_MAX_QUARANTINED = 5
"""Damaged files that are kept for analysis, the newest ones."""


class _StateModel(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)


class KnownWorker(_StateModel):
    """A worker process that this supervisor started or found."""

    port: int
    worker_id: str
    topology_id: str
    code_dir: str
    restarts: int = 0
    """These three are its :class:`~storm_dagster.core.slots.model.Work`."""
    pid: int
    start_ticks: int
    boot_id: str
    """These three identify the process (:mod:`storm_dagster.host.processes`)."""


class WantedSlot(_StateModel):
    """Desired work of a slot at the last read of the cluster."""

    port: int
    topology_id: str
    code_dir: str
    restarts: int = 0
    ran: bool
    """True if a worker of that topology ran here."""
    crashes: int = 0
    """Crashes in a row, so that a restart of the supervisor continues the back-off."""


class LocalState(_StateModel):
    """Content of the state file."""

    supervisor_id: str
    workers: tuple[KnownWorker, ...] = ()
    wanted: tuple[WantedSlot, ...] = ()


class LocalStateFile:
    """One supervisor's state file. Used from one thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "state.json"
        self._written: LocalState | None = None
        """State on the disk, as it was last read or written; ``None`` if unknown."""

    def read(self) -> LocalState | None:
        """Read the state.

        ``None`` if the file does not exist, or is damaged and was quarantined.
        """
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            document = json.loads(raw)
            body = document["state"]
            if document["v"] != 1 or document["sha256"] != _checksum(body):
                raise ValueError("its checksum does not match")
            # Tuples are arrays in JSON: validated from JSON, so that strict types hold.
            state = LocalState.model_validate_json(json.dumps(body))
        except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
            quarantined = self._quarantine()
            _log.error(
                "%s is damaged (%s): it was moved to %s, the state is rebuilt from the cluster and "
                "the running processes",
                self._path,
                str(error).splitlines()[0],
                quarantined.name,
            )
            return None
        self._written = state
        return state

    def write(self, state: LocalState) -> bool:
        """Replace the file if the state has changed; true if it has."""
        if state == self._written:
            return False
        body = state.model_dump(mode="json")
        document = {"v": 1, "sha256": _checksum(body), "state": body}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(document), sync=True)
        self._written = state
        return True

    def read_cluster_id(self) -> str | None:
        """Id of this supervisor's cluster, if it is known.

        It has its own file, so that a damaged state does not make the supervisor join another
        cluster.
        """
        try:
            return self._path.with_name("cluster_id").read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    def write_cluster_id(self, cluster_id: str) -> None:
        """Store the id of this supervisor's cluster."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path.with_name("cluster_id"), cluster_id + "\n", sync=True)

    def _quarantine(self) -> Path:
        """Move the damaged file away, delete the oldest ones, and return its new path."""
        paths = self._path.parent.glob("state.json.broken.*")
        suffixes = [path.suffix.removeprefix(".") for path in paths]
        numbers = sorted(int(suffix) for suffix in suffixes if suffix.isdigit())
        newest = numbers[-1] if numbers else 0
        quarantined = self._path.with_name(f"state.json.broken.{newest + 1}")
        os.replace(self._path, quarantined)
        # One less than the maximum, which includes the new one.
        for number in numbers[: -(_MAX_QUARANTINED - 1)]:
            self._path.with_name(f"state.json.broken.{number}").unlink(missing_ok=True)
        return quarantined


def _checksum(body: object) -> str:
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
