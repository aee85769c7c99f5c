"""One-shot callbacks by path, and their dispatch, as in Storm."""

import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from storm_dagster.model import paths
from storm_dagster.model.errors import UnknownSubtree

_log = logging.getLogger(__name__)

Wake = Callable[[], object]
"""Called without arguments from ZooKeeper's thread; it may only set an event."""

_SUBTREES = frozenset(
    path[1:] for path in (*paths.FIRST_LEVEL, paths.CLUSTER_ID, paths.HEALER, paths.NIMBUS_MASTER)
)
"""First elements of all paths that have callbacks."""
_MAX_WAKES = 64
"""A reader that passes a new function each time must not grow a slot without bound."""


def _takes_argument(callback: Callable[..., object]) -> bool:
    """True if the callback requires, or collects, positional arguments.

    False if its signature is unknown, as of some functions in C.
    """
    try:
        parameters = inspect.signature(callback).parameters.values()
    except (TypeError, ValueError):
        return False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return True
        positional = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if positional and parameter.default is parameter.empty:
            return True
    return False


@dataclass
class _PathWatch:
    """Slot of one path."""

    callback: Callable[..., object] | None = None
    """Set by :meth:`WatchSlots.set_callback`."""
    wakes: list[Wake] = field(default_factory=list)
    """Added by :meth:`WatchSlots.add_wake`, at most ``_MAX_WAKES``; the oldest are dropped."""


class WatchSlots:
    """The callbacks that wait for an event, one slot for each path.

    A callback is removed before it is called, so that it runs once; the next read must register it
    once more. The *callback* of a slot is replaced by a later one (Storm's rule); *wakes*
    accumulate, so that several loops of one process can wait for the same node. All methods are
    thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, _PathWatch] = {}

    def set_callback(self, path: str, callback: Callable[..., object]) -> None:
        """Call ``callback`` at the next event of ``path``.

        It replaces the former callback. Its argument is the last element of the path, if it
        requires one.
        """
        with self._lock:
            self._slots.setdefault(path, _PathWatch()).callback = callback

    def add_wake(self, path: str, wake: Wake) -> None:
        """Call ``wake`` at the next event of ``path``.

        Other wakes of the path stay. The same function is called once.
        """
        with self._lock:
            wakes = self._slots.setdefault(path, _PathWatch()).wakes
            if wake not in wakes:
                wakes.append(wake)
                del wakes[:-_MAX_WAKES]

    def dispatch(self, kind: str, path: str) -> None:
        """Issue the callbacks that wait for an event of ``path``.

        An event of a supervisor also issues the callbacks of ``/supervisors``, whose list and
        records share one callback. Raises :class:`UnknownSubtree` if no kind of callback belongs to
        the first element.
        """
        parts = [part for part in path.split("/") if part]
        subtree = parts[0] if parts else ""
        if subtree not in _SUBTREES:
            raise UnknownSubtree(
                f"event {kind} of {path}: no callback belongs to the subtree {subtree!r}: "
                "read all nodes again, and find the code that set that watch"
            )
        slot_paths = [path]
        if len(parts) > 1 and f"/{subtree}" == paths.SUPERVISORS:
            slot_paths.append(paths.SUPERVISORS)
        slots: list[tuple[str, _PathWatch]] = []
        with self._lock:
            for slot_path in slot_paths:
                slot = self._slots.pop(slot_path, None)
                if slot is not None:
                    slots.append((slot_path, slot))
        self._issue(slots)

    def wake_all(self) -> None:
        """Issue all callbacks, because events may have been lost.

        Their readers must then reread everything.
        """
        with self._lock:
            slots = list(self._slots.items())
            self._slots.clear()
        self._issue(slots)

    def clear(self) -> None:
        """Remove all callbacks."""
        with self._lock:
            self._slots.clear()

    @staticmethod
    def _issue(slots: list[tuple[str, _PathWatch]]) -> None:
        """Call the wakes and the callback of each slot; a failing one does not stop the others."""
        for path, slot in slots:
            calls: list[Callable[[], object]] = list(slot.wakes)
            if slot.callback is not None:
                if _takes_argument(slot.callback):
                    name = path.rpartition("/")[2]
                    calls.append(partial(slot.callback, name))
                else:
                    calls.append(slot.callback)
            for call in calls:
                try:
                    call()
                except Exception:
                    _log.exception("the callback of %s failed", path)
