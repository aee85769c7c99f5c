"""Store behind ``context.state``: a view of the state log of one task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from storm_dagster.api.state import StateChanges
from storm_dagster.core.dataplane.keyed_state import ID_FORM, Checkpoint, Contents, Partitioning
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.worker.state.log import StateLog

WHOLE = Partitioning(1, by_key=False)
"""Division of state that stays with its task id, for any number of tasks of its component."""
_NO_KEY = 0
"""Instead of the hash of a grouping key, in the ids: this state is not divided by key."""


def task_folder(root: Path, topology: str, component: str, task: int) -> Path:
    """Folder of ``context.state`` of one task."""
    safe = quote(component, safe="").replace(".", "%2E") or "%00"
    return root / topology / safe / f"{task}.state"


class TaskView:
    """Values and applied ids of a task.

    A :class:`StateStore` that refuses changes.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        self.path = path
        self._contents = contents

    @property
    def values(self) -> Mapping[str, Any]:
        """Key -> encoded value."""
        return self._contents.values

    @property
    def applied(self) -> Iterable[str]:
        """The applied ids."""
        return self._contents.ids

    @property
    def has_former_ids(self) -> bool:
        """True if ids may have the form of an earlier release."""
        return self._contents.id_form != ID_FORM

    def is_applied(self, id: str) -> bool:
        """True if the id is applied."""
        return id in self._contents.ids

    def write(self, changes: StateChanges, *, sync: bool) -> None:
        """Refuse the changes."""
        raise InvalidRequest(
            f"the state in {self.path} was opened to be read: open it with open_task_state to "
            "change it"
        )

    def close(self) -> None:
        """Return at once: no file is open."""


class TaskStore(TaskView):
    """Values and applied ids of a task in its open log."""

    def __init__(self, log: StateLog) -> None:
        super().__init__(log.folder, log.contents)
        self._log = log

    def write(self, changes: StateChanges, *, sync: bool) -> None:
        """Append the changes as one checkpoint.

        When this returns, they survive the end of the process; with ``sync`` also a power cut.
        Raises as :meth:`StateLog.append` and :meth:`StateLog.compact`.
        """
        is_empty = changes.clears or not self._contents.ids
        record = Checkpoint(
            id_form=ID_FORM if is_empty else 0,
            values=[(key, msgspec.Raw(raw)) for key, raw in changes.values.items()],
            removed=list(changes.removed),
            ids=[(_NO_KEY, id) for id in changes.applied],
            forgotten=list(changes.forgotten),
            full=changes.clears,
        )
        # It raises the error of an earlier compaction. So it comes before the checkpoint: if
        # `write` raises, the state must not have changed.
        self._log.compact()
        self._log.append(record)
        self._contents.apply(record)
        if sync:
            self._log.sync()

    def close(self) -> None:
        """Close the log."""
        self._log.close()
