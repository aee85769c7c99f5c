"""The scheduling plug-in of ``nimbus.inimbus.class`` (Storm's INimbus).

It is made and prepared once in each process that publishes assignments: a nimbus, or Dagster's code
location.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from storm_dagster.host.endpoints import home_dir
from storm_dagster.host.resolve import load_plugin
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.records import Assignment
from storm_dagster.model.slot import Slot
from storm_dagster.model.strategies import STRATEGIES

_log = logging.getLogger(__name__)
_KEY = "nimbus.inimbus.class"
_METHODS = ("prepare", "assign_slots", "forced_scheduler")
_lock = threading.Lock()
_made: dict[tuple[str, str], INimbus] = {}


class INimbus(Protocol):
    """Interface of the named class; it is called without arguments to make the object."""

    def prepare(self, conf: Mapping[str, Any], directory: Path) -> None:
        """Called once, before anything else; ``directory`` exists and is the plug-in's own."""

    def assign_slots(self, topology_id: str, slots: Sequence[Slot]) -> None:
        """Called after an assignment was published, with its slots (supervisor id, port) that
        the former had not.
        """

    def forced_scheduler(self) -> str | None:
        """The strategy of every placement, instead of ``topology.scheduler.strategy``; ``None``:
        theirs.
        """
        ...


def load_inimbus(conf: Mapping[str, Any] | Any, directory: Path | None = None) -> INimbus | None:
    """The prepared plug-in of the conf, the same object at each call; ``None`` without one.

    Raises :class:`InvalidRequest` when it cannot be loaded, lacks a method, or its ``prepare``
    fails.
    """
    name = conf.get(_KEY)
    if not name:
        return None
    folder = directory or home_dir() / "nimbus" / "ininumbus"
    with _lock:
        made = _made.get((name, str(folder)))
        if made is None:
            made = load_plugin(_KEY, name)()
            lacking = [method for method in _METHODS if not callable(getattr(made, method, None))]
            if lacking:
                raise InvalidRequest(f"{_KEY} {name!r} has no method {', '.join(lacking)}: add it")
            folder.mkdir(parents=True, exist_ok=True)
            try:
                made.prepare(dict(getattr(conf, "values", None) or conf), folder)
            except Exception as error:
                raise InvalidRequest(f"{_KEY} {name!r} cannot be prepared: {error}") from error
            _made[name, str(folder)] = made
    return made


def forced_scheduler(plugin: INimbus | None) -> str | None:
    """The strategy that the plug-in demands; :class:`InvalidRequest` for one that does not
    exist.
    """
    strategy = plugin.forced_scheduler() if plugin is not None else None
    if strategy is not None and strategy not in STRATEGIES:
        raise InvalidRequest(
            f"{_KEY} forces the scheduler {strategy!r:.80}: it may be {', '.join(STRATEGIES)}"
        )
    return strategy


def notify_new_slots(plugin: INimbus, before: Assignment | None, after: Assignment) -> None:
    """Call ``assign_slots`` with the new slots. The assignment is stored, so that an error is only
    logged.
    """
    had = {worker.slot for worker in before.workers} if before is not None else set()
    new = [worker.slot for worker in after.workers if worker.slot not in had]
    if not new:
        return
    try:
        plugin.assign_slots(after.topology_id, new)
    except Exception:
        _log.exception("%s failed at the new slots of %s", _KEY, after.topology_id)
