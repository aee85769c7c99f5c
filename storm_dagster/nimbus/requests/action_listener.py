"""Notification of a user's action listener, as in Storm and JStorm.

The conf key ``nimbus.topology.action.notifier.plugin.class`` names a class as ``"module:Class"``.
It is notified of actions on topologies, in their order. The leader makes one instance and calls::

    prepare(conf)                    once, with the cluster conf        (optional)
    notify(topology_id, action)      for each action
    cleanup()                        when this nimbus no longer leads   (optional)

The class cannot disturb the cluster: it is called in a separate thread, its errors are logged, and
a call that does not end delays later calls only. The next leader notifies of the actions that a
former one did not finish; the call that was under way is repeated.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.host.resolve import load_plugin
from storm_dagster.model.errors import InvalidRequest, typed_error_text
from storm_dagster.model.names import topology_name_of
from storm_dagster.nimbus.member import Nimbus, repeat
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.transactions import (
    NOTIFIER_KEY,
    PendingAction,
    forget_action,
    pending_actions,
)

_log = logging.getLogger(__name__)

_POLL_SECS = 1.0
"""Pause between two polls for actions."""
_LATE_SECS = 30.0
"""Time after which a call that has not returned is left to itself; others wait until it returns."""
_CLEANUP_SECS = 2.0
"""Longest wait for ``cleanup``: it must not delay the end of the daemon."""
_MAX_PENDING = 1000
"""Limit of actions that wait for the listener, one node each."""


def load_listener(name: str) -> Any:
    """Make an instance of ``module:Class``; :class:`InvalidRequest` if that fails."""
    try:
        listener = load_plugin(NOTIFIER_KEY, name)()
    except (InvalidRequest, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise InvalidRequest(
            f"{NOTIFIER_KEY}: {name!r:.200} cannot be loaded ({typed_error_text(error)}): "
            "it must be importable by nimbus and take no arguments"
        ) from error
    if not callable(getattr(listener, "notify", None)):
        raise InvalidRequest(
            f"{NOTIFIER_KEY}: {name!r:.200} has no method notify(topology_id, action)"
        )
    return listener


class ActionNotifier:
    """Notification of the configured listener, in a thread of the daemon."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._idle = threading.Event()
        """Cleared while a call has not returned."""
        self._idle.set()
        self._listener: Any = None
        """Instance of the configured class; ``None`` if it cannot be loaded."""
        self._epoch: int | None = None
        """Epoch for which the listener was prepared; ``None`` while this nimbus does not lead."""

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop``; return at once if no listener is configured."""
        name = self._nimbus.conf[NOTIFIER_KEY]
        if not name:
            return
        try:
            self._listener = load_listener(str(name))
        except InvalidRequest as error:
            # The cluster works without it; its actions are dropped, so that they do not accumulate.
            _log.error("%s; no listener is notified of actions", error.message)
        repeat(lambda: self.run_once(stop), _POLL_SECS, stop, "the listener is notified later")
        self._end()

    def run_once(self, stop: threading.Event) -> None:
        """Notify of pending actions if this nimbus leads and the listener is idle.

        The listener is prepared in a new epoch, and cleaned up when leadership has ended. Each
        action is forgotten after its call, also if that failed or has not returned.
        """
        epoch = self._nimbus.status.epoch
        if epoch != self._epoch:
            self._end()
            self._epoch = epoch
            if epoch is not None:
                self._begin()
        if epoch is None:
            return
        ctx = self._nimbus.operations(epoch)
        for action in self._trim(ctx, pending_actions(ctx)):
            if stop.is_set() or not self._idle.is_set():
                return
            self._notify(action)
            forget_action(ctx, action)

    def _trim(self, ctx: OperationsContext, pending: list[PendingAction]) -> list[PendingAction]:
        """Drop the oldest actions above the limit, and return the others.

        Nodes must not grow without bound.
        """
        excess = max(0, len(pending) - _MAX_PENDING)
        for action in pending[:excess]:
            _log.error(
                "the listener is not notified of %s of %s: too many wait",
                action.action,
                action.topology_id,
            )
            forget_action(ctx, action)
        return pending[excess:]

    def _notify(self, action: PendingAction) -> None:
        """Call the listener; no effect without one, or for an action without a name."""
        if self._listener is None or not action.action:
            return
        title = f"{action.action} of {action.topology_id}"
        listener = self._listener
        name = topology_name_of(action.topology_id)
        if not self._call(title, lambda: listener.notify(name, action.action), _LATE_SECS):
            _log.warning(
                "the action listener has not come back from %s for %g s: others wait",
                title,
                _LATE_SECS,
            )

    def _call(self, title: str, function: Callable[[], Any], wait_secs: float) -> bool:
        """Call a function in a new thread; return True if it ends within ``wait_secs``.

        Its errors are logged.
        """
        self._idle.clear()

        def run() -> None:
            try:
                function()
            except BaseException as error:
                _log.warning("the action listener failed at %s: %s", title, typed_error_text(error))
            finally:
                self._idle.set()

        threading.Thread(target=run, name="action-listener", daemon=True).start()
        return self._idle.wait(wait_secs)

    def _begin(self) -> None:
        prepare = getattr(self._listener, "prepare", None)
        if callable(prepare):
            conf: Mapping[str, Any] = dict(self._nimbus.conf.values)
            self._call("prepare", lambda: prepare(conf), _LATE_SECS)

    def _end(self) -> None:
        """End the epoch: call ``cleanup`` if this nimbus led.

        It is not called while another call has not returned.
        """
        cleanup = getattr(self._listener, "cleanup", None)
        if self._epoch is not None and callable(cleanup) and self._idle.is_set():
            self._call("cleanup", cleanup, _CLEANUP_SECS)
        self._epoch = None
