"""Positions of a source that has no store of its own: a log of the component, as the state of a bolt has."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from storm_dagster.core.keyed_state import Checkpoint, Partitioning, encode_value
from storm_dagster.model.groupings import reader_of
from storm_dagster.worker.tasks.drivers import PUBLISH_SECS, stamp_of
from storm_dagster.worker.tasks.state_log import StateLog, state_folder

if TYPE_CHECKING:
    from storm_dagster.api.context import TopologyContext
    from storm_dagster.worker.tasks.state_storage import StateStorage


class _ByReader(Partitioning):
    """Each partition's position is where its reader is."""

    def owner(self, key: Any) -> int:
        return reader_of(key, self.tasks)


class Positions:
    """Partition -> position, of the partitions that a task reads. Opening reads all of them: do it in a thread."""

    def __init__(self, storage: "StateStorage", context: "TopologyContext") -> None:
        assert context._state_dir is not None
        component = context.component
        self._log = log = StateLog(
            state_folder(context._state_dir, context.topology_name, component),
            _ByReader(len(context.component_tasks(component)), by_key=True),
            context.task_index,
            stamp_of(context),
            lambda partition, found: found[0],
            context.may_write,
            storage.known_openings(component),
            bool(context.conf.get("topology.state.local")),
        )
        try:
            storage.publish(f"{component}/{log.index}", log.position, context).result(PUBLISH_SECS)
        except BaseException:
            log.close()
            raise
        self.found: dict[str, Any] = dict(log.contents.values)

    def save(self, positions: Mapping[str, Any], forget: Collection[str] = ()) -> None:
        """Store these and drop those in ``forget``; durable when it returns. Raises :class:`Unavailable` when the task
        runs elsewhere by now: then open the positions again."""
        values = [(partition, encode_value(position, partition)) for partition, position in positions.items()]
        self._log.append(Checkpoint(values=values, removed=list(forget)))
        self.found.update(positions)
        for partition in forget:
            self.found.pop(partition, None)
        self._log.compact()

    def close(self) -> None:
        """Close the file."""
        self._log.close()
