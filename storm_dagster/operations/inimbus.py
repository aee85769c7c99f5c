"""The scheduling plug-in of ``nimbus.inimbus.class`` (Storm's INimbus).

Each process that publishes assignments (a nimbus, or Dagster's code location) creates and prepares
it once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from storm_dagster.host.endpoints import home_dir
from storm_dagster.host.resolve import load_plugin
from storm_dagster.model.errors import InvalidRequest, error_text
from storm_dagster.model.records import Assignment
from storm_dagster.model.slot import Slot
from storm_dagster.model.strategies import STRATEGIES

_log = logging.getLogger(__name__)
_KEY = "nimbus.inimbus.class"
PLUGIN_FOLDER = "ininumbus"
"""Name of the plug-in's folder in nimbus's data folder: that of JStorm, in JStorm's spelling."""
_METHODS = ("prepare", "assign_slots", "forced_scheduler")
"""Methods that a plug-in must have."""
_lock = threading.Lock()
"""Held while a plug-in is created and prepared, so that this happens once."""
_plugins: dict[tuple[str, str], INimbus] = {}
"""Name of the class and folder -> its prepared plug-in."""


class INimbus(Protocol):
    """Interface of the named class, which is instantiated without arguments."""

    def prepare(self, conf: Mapping[str, Any], directory: Path) -> None:
        """Prepare the plug-in; called once, before the other methods.

        ``directory`` exists and belongs to the plug-in.
        """

    def assign_slots(self, topology_id: str, slots: Sequence[Slot]) -> None:
        """Handle the new slots of an assignment; called after it was published.

        ``slots`` (supervisor id, port) are those that the former assignment did not have.
        """

    def forced_scheduler(self) -> str | None:
        """The strategy of every placement, instead of ``topology.scheduler.strategy``.

        ``None``: each topology's own.
        """
        ...


def load_inimbus(conf: Mapping[str, Any] | Any, directory: Path | None = None) -> INimbus | None:
    """The prepared plug-in of the conf; ``None`` if the conf names none.

    ``directory`` is the folder of the plug-in, by default one in HOME; it is created. Each call
    with the same class and folder returns the same object. Raises :class:`InvalidRequest` if it
    cannot be loaded, lacks a method, or its ``prepare`` fails.
    """
    name = conf.get(_KEY)
    if not name:
        return None
    folder = directory or home_dir() / "nimbus" / PLUGIN_FOLDER
    with _lock:
        plugin = _plugins.get((name, str(folder)))
        if plugin is None:
            plugin = load_plugin(_KEY, name)()
            missing = [method for method in _METHODS if not callable(getattr(plugin, method, None))]
            if missing:
                raise InvalidRequest(f"{_KEY} {name!r} has no method {', '.join(missing)}: add it")
            folder.mkdir(parents=True, exist_ok=True)
            try:
                plugin.prepare(dict(getattr(conf, "values", None) or conf), folder)
            except Exception as error:
                raise InvalidRequest(
                    f"{_KEY} {name!r} cannot be prepared: {error_text(error)}"
                ) from error
            _plugins[name, str(folder)] = plugin
    return plugin


def forced_scheduler(plugin: INimbus | None) -> str | None:
    """The strategy that the plug-in demands.

    ``None`` without a plug-in, or if it demands none; :class:`InvalidRequest` if that strategy does
    not exist.
    """
    strategy = plugin.forced_scheduler() if plugin is not None else None
    if strategy is not None and strategy not in STRATEGIES:
        raise InvalidRequest(
            f"{_KEY} forces the scheduler {strategy!r:.80}: it may be {', '.join(STRATEGIES)}"
        )
    return strategy


def notify_new_slots(plugin: INimbus, before: Assignment | None, after: Assignment) -> None:
    """Call ``assign_slots`` with the slots that only ``after`` has.

    No call if there are none. An error is only logged, because the assignment is stored already.
    """
    former_slots = {worker.slot for worker in before.workers} if before is not None else set()
    new_slots = [worker.slot for worker in after.workers if worker.slot not in former_slots]
    if not new_slots:
        return
    try:
        plugin.assign_slots(after.topology_id, new_slots)
    except Exception:
        _log.exception("%s failed at the new slots of %s", _KEY, after.topology_id)
