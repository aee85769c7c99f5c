"""Storage of a topology's state, as a worker sees it.

It knows the last openings, and if all hosts share the storage. Positions of a source without a
store are there, too: a log of the component, as the state of a bolt has.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.state import TaskState
from storm_dagster.core.dataplane.keyed_state import (
    Checkpoint,
    Contents,
    Partitioning,
    encode_value,
)
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.groupings import reader_of
from storm_dagster.model.records import StateHome
from storm_dagster.worker.state.former import (
    IMPORTED_SUFFIX,
    damaged_database,
    is_damaged_since_import,
    note_imported_opening,
    quarantined_paths,
    read_database,
    read_imported_opening,
    set_aside,
)
from storm_dagster.worker.state.letters import DeadLetterLog, letters_folder
from storm_dagster.worker.state.log import Stamp, StateLog, state_folder
from storm_dagster.worker.state.log_files import newest_opening
from storm_dagster.worker.state.task_store import WHOLE, TaskStore, task_folder

_log = logging.getLogger(__name__)

_PUBLISH_SECS = 10.0
"""Longest wait until an opening is published."""
_IDENTITY = "\0identity"
"""End of the key of a partition's identity, in the log of positions.

Earlier releases take it for a partition that is gone (docs/decisions.md#positions).
"""
Publish = Callable[[str, tuple[int, int], str, bool], "Future[None]"]
"""(key in ``StateHome.openings``, opening, host, is_local).

``is_local``: True if state stays on that host while there are others.
"""


def marker_path(state_dir: Path, topology: str, marker: str) -> Path:
    """Empty file that is seen on every host, if the storage is shared."""
    return state_dir / topology / f".shared-{marker}"


class StateStorage:
    """The cluster's knowledge of the state.

    ``home`` and ``hosts`` are replaced with each placement.
    """

    def __init__(self, report: Callable[[int, str, BaseException, str], None]) -> None:
        """``report``: see ``Shared``."""
        self._report = report
        self.home = StateHome(marker="")
        """The cluster's record of the topology's state: the last openings, and the marker."""
        self.hosts: frozenset[str] = frozenset()
        """Hosts that run workers of the topology."""
        self.publisher: Publish | None = None
        """Publishes an opening; any thread. ``None`` without a cluster, as in the test harness."""

    def check_shared(self, context: TopologyContext) -> None:
        """Refuse state on a host's own storage, which other hosts do not see.

        Permitted if the conf allows it, or if no other host has workers.
        """
        if len(self.hosts) < 2 or context.conf.get("topology.state.local"):
            return
        assert context._state_dir is not None
        marker = self.home.marker
        if marker and marker_path(context._state_dir, context.topology_name, marker).exists():
            return
        raise InvalidRequest(
            f"the state of task {context.task_id} ({context.component}) would stay behind on its "
            f"host, and workers run on {', '.join(sorted(self.hosts))}: {context._state_dir} here "
            "is not the folder that they see. Make topology.state.dir a folder that all of them "
            "share, or set topology.state.local: true to lose state when tasks move"
        )

    def known_openings(self, component: str) -> dict[int, tuple[int, int]]:
        """Return index of a task of the component -> (division, opening)."""
        openings: dict[int, tuple[int, int]] = {}
        for key, opening in self.home.openings.items():
            # Keys of `context.state` have no slash.
            name, slash, index = key.rpartition("/")
            if slash and name == component:
                division, number = opening
                openings[int(index)] = (division, number)
        return openings

    def publish(self, key: str, opening: tuple[int, int], context: TopologyContext) -> Future[None]:
        """Publish an opening to later workers.

        The result comes when it is stored; at once without a cluster. ``key``: as in
        ``StateHome.openings``.
        """
        if self.publisher is not None:
            local = len(self.hosts) > 1 and bool(context.conf.get("topology.state.local"))
            return self.publisher(key, opening, context.host, local)
        published: Future[None] = Future()
        published.set_result(None)
        return published

    def open_log(
        self,
        context: TopologyContext,
        division: Partitioning,
        merge: Callable[[Any, list[Any]], Any],
        owns: Callable[[], bool],
        read: Callable[[Contents], Any] = lambda contents: None,
    ) -> StateLog:
        """Open the log of the task in its component's state.

        The arguments are those of :class:`StateLog`; ``read`` gets its contents. Refuses as
        :meth:`check_shared`. Waits until every later worker can know of the opening.
        """
        assert context._state_dir is not None
        self.check_shared(context)
        component = context.component
        log = StateLog(
            state_folder(context._state_dir, context.topology_name, component),
            division,
            context.task_index,
            _stamp(context),
            merge,
            owns,
            self.known_openings(component),
            bool(context.conf.get("topology.state.local")),
        )
        try:
            read(log.contents)
            # No tuple is acked before that.
            self.publish(f"{component}/{log.index}", log.position, context).result(_PUBLISH_SECS)
        except BaseException:
            log.close()
            raise
        return log

    def open_positions(self, context: TopologyContext) -> "Positions":
        """Open the positions of a source, of the partitions that the task reads.

        ``InvalidRequest`` without a folder for state; refuses as :meth:`check_shared`, and raises
        as :class:`StateLog`.
        """
        if context._state_dir is None:
            raise InvalidRequest(
                "this source needs a folder for its positions: set topology.state.dir"
            )
        division = _ByReader(len(context.component_tasks(context.component)), by_key=True)
        log = self.open_log(
            context, division, lambda partition, positions: positions[0], context.may_write
        )
        return Positions(log)

    def open_task_state(self, context: TopologyContext) -> TaskState:
        """Open the store behind ``context.state``.

        Refuses as :meth:`check_shared`, and a store that is older than one that was open before.
        """
        if context._state_dir is None:
            raise InvalidRequest("this task has no state folder: set topology.state.dir")
        self.check_shared(context)
        key = str(context.task_id)
        _, last_opening = self.home.openings.get(key, (0, 0))
        log = open_task_log(
            task_folder(
                context._state_dir, context.topology_name, context.component, context.task_id
            ),
            context.may_write,
            opening=last_opening,
            take_older=bool(context.conf.get("topology.state.local")),
            subject=f"task {context.task_id} ({context.component})",
        )
        if log.older:
            older = Unavailable(
                f"it continues with older state, since topology.state.local is set: {log.older}"
            )
            self._report(context.task_id, context.component, older, "state")
        # The state is not divided: its division is 0.
        _, opening = log.position
        self.publish(key, (0, opening), context)
        return TaskState(TaskStore(log))


def dead_letter_log(
    context: TopologyContext,
    max_bytes: int,
    report: Callable[[Exception], None],
    drops_unreplayed: bool = True,
) -> DeadLetterLog | None:
    """Create the dead letter log of a spout's task, not yet open.

    ``None`` without a folder for state.
    """
    if context._state_dir is None:
        return None
    return DeadLetterLog(
        letters_folder(context._state_dir, context.topology_name, context.component),
        Partitioning(len(context.component_tasks(context.component)), by_key=False),
        context.task_index,
        _stamp(context),
        context.may_write,
        max_bytes,
        report,
        drops_unreplayed,
    )


def _stamp(context: TopologyContext) -> Stamp:
    """Return the stamp of the assignment that the worker has read."""
    number = context.topology_id.rpartition("-")[2]
    submission = int(number) if number.isdigit() else 0
    return submission, context.assignment_version


def open_task_log(
    folder: Path,
    owns: Callable[[], bool],
    *,
    opening: int = 0,
    take_older: bool = False,
    subject: str = "",
) -> StateLog:
    """Open the log of ``context.state`` of one task.

    It begins with the database of an earlier release, if that was opened later than the log; then
    the database is renamed. ``opening``: the last known one. :class:`Corrupt` if the database is
    damaged.
    """
    path = folder.with_suffix(".sqlite3")
    initial = read_database(path)
    if initial is None and is_damaged_since_import(path):
        raise damaged_database(path, quarantined_paths(path)[-1], "was damaged")
    former_opening = 0
    if initial is not None:
        former_opening = initial.opening
        if former_opening > read_imported_opening(path):
            # An earlier release has opened it since: its contents must be newer than the log, whose
            # opening compactions have raised.
            newest = max(former_opening, newest_opening(folder, 0) + 1)
            initial = initial._replace(opening=newest)
    log = StateLog(
        folder,
        WHOLE,
        0,
        (0, 0),
        lambda key, values: values[0],
        owns,
        {0: (0, opening)},
        take_older,
        initial=initial,
        encoded=True,
        durable=True,
        subject=subject or f"{folder.parent.name}/{folder.stem}",
    )
    if initial is not None:
        note_imported_opening(path, former_opening)
        target = set_aside(path, IMPORTED_SUFFIX)
        _log.info(
            "the state of %s is in %s; the former file is kept as %s", path, folder, target.name
        )
    return log


class _ByReader(Partitioning):
    """Division in which each partition's position is at its reader."""

    def owner(self, key: Any) -> int:
        return reader_of(key.removesuffix(_IDENTITY), self.tasks)


class Positions:
    """Partition -> position, of the partitions that a task reads.

    Opening reads all of them: do it in a thread.
    """

    def __init__(self, log: StateLog) -> None:
        self._log = log
        self.current: dict[str, Any] = {}
        """The saved positions."""
        self.identities: dict[str, Any] = {}
        """Partition -> identity that was saved beside its position."""
        stored_identities: dict[str, Any] = {}
        for key, value in log.contents.values.items():
            if key.endswith(_IDENTITY):
                stored_identities[key.removesuffix(_IDENTITY)] = value
            else:
                self.current[key] = value
        for partition, entry in stored_identities.items():
            # An earlier release stores positions without their identities.
            position, identity = entry
            if partition in self.current and self.current[partition] == position:
                self.identities[partition] = identity

    def save(
        self,
        positions: Mapping[str, Any],
        forget: Collection[str] = (),
        identities: Mapping[str, Any] | None = None,
    ) -> None:
        """Store these positions and identities, and drop those in ``forget``.

        A position that is stored without an identity has none from then on.

        Durable when it returns. Raises as :meth:`StateLog.append`, for instance since the task runs
        elsewhere by now, or as :meth:`StateLog.compact`: then reopen the positions.
        """
        values = [
            (partition, encode_value(position, partition))
            for partition, position in positions.items()
        ]
        for partition, identity in (identities or {}).items():
            position = positions[partition] if partition in positions else self.current[partition]
            key = f"{partition}{_IDENTITY}"
            values.append((key, encode_value([position, identity], key)))
        removed = [*forget, *(f"{partition}{_IDENTITY}" for partition in forget)]
        self._log.append(Checkpoint(values=values, removed=removed))
        self.current.update(positions)
        for partition in positions:
            self.identities.pop(partition, None)
        self.identities.update(identities or {})
        for partition in forget:
            self.current.pop(partition, None)
            self.identities.pop(partition, None)
        self._log.compact()

    def close(self) -> None:
        """Close the file."""
        self._log.close()
