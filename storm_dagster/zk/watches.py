"""One-shot callbacks by path, and their dispatch on watch events, as in Storm."""

import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from storm_dagster.model import paths
from storm_dagster.model.errors import UnknownSubtree

_log = logging.getLogger(__name__)

Wake = Callable[[], object]
"""Called without arguments from ZooKeeper's thread; it may only set an event."""

_SUBTREES = frozenset(
    path[1:] for path in (*paths.FIRST_LEVEL, paths.CLUSTER_ID, paths.HEALER, paths.NIMBUS_MASTER)
)
# A reader that passes a new function each time must not grow a slot without bound.
_MOST_WAKES = 64


def _takes_argument(callback: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(callback).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        parameter.kind is parameter.VAR_POSITIONAL
        or (
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        )
        for parameter in parameters
    )


@dataclass
class _PathWatch:
    callback: Callable[..., object] | None = None
    wakes: list[Wake] = field(default_factory=list)


class WatchSlots:
    """The callbacks that wait for an event, one slot for each path.

    A callback is taken out before it is called, so it runs once and must be given again with the
    next read. The *callback* of a slot is replaced by a later one (Storm's rule); *wakes* gather,
    so that several loops of one process can wait for the same node. All methods are thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, _PathWatch] = {}

    def set_callback(self, path: str, callback: Callable[..., object]) -> None:
        """Call ``callback`` at the next event of ``path``, instead of the one given before.

        It gets the last element of the path if it requires an argument, and none otherwise.
        """
        with self._lock:
            self._slots.setdefault(path, _PathWatch()).callback = callback

    def add_wake(self, path: str, wake: Wake) -> None:
        """Call ``wake`` at the next event of ``path``, beside the others; the same one is kept
        once.
        """
        with self._lock:
            wakes = self._slots.setdefault(path, _PathWatch()).wakes
            if wake not in wakes:
                wakes.append(wake)
                del wakes[:-_MOST_WAKES]

    def dispatch(self, kind: str, path: str) -> None:
        """Issue the callbacks that wait for an event of ``path``.

        An event of a child also issues those of ``/supervisors``, whose list and records share one
        callback. Raises :class:`UnknownSubtree` when no kind of callback belongs to the first
        element.
        """
        first, *rest = [part for part in path.split("/") if part] or [""]
        if first not in _SUBTREES:
            raise UnknownSubtree(
                f"event {kind} of {path}: no callback belongs to the subtree {first!r}: "
                "read everything again, and find the code that set that watch"
            )
        wanted = [path]
        if rest and f"/{first}" == paths.SUPERVISORS:
            wanted.append(paths.SUPERVISORS)
        with self._lock:
            taken = [
                (path, slot) for path in wanted if (slot := self._slots.pop(path, None)) is not None
            ]
        self._issue(taken)

    def wake_all(self) -> None:
        """Issue every callback that waits: events may have been lost, so everything must be read
        again.
        """
        with self._lock:
            taken = list(self._slots.items())
            self._slots.clear()
        self._issue(taken)

    def clear(self) -> None:
        """Forget every callback."""
        with self._lock:
            self._slots.clear()

    @staticmethod
    def _issue(slots: list[tuple[str, _PathWatch]]) -> None:
        for path, slot in slots:
            calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = [
                (wake, ()) for wake in slot.wakes
            ]
            if slot.callback is not None:
                arguments = (path.rpartition("/")[2],) if _takes_argument(slot.callback) else ()
                calls.append((slot.callback, arguments))
            for call, arguments in calls:
                try:
                    call(*arguments)
                except Exception:
                    _log.exception("the callback of %s failed", path)
