"""The action listener: a class of the user that is notified of actions on topologies, in order
(Storm, JStorm).

``nimbus.topology.action.notifier.plugin.class: "module:Class"``. The leader makes one instance and
calls::

    prepare(conf)                    once, with the cluster conf        (optional)
    notify(topology_id, action)      for each action
    cleanup()                        when this nimbus leads no more     (optional)

The class cannot disturb the cluster: it is called in a thread of its own, its errors are logged,
and a call that does not end delays later calls only. The next leader notifies of the actions that a
former one did not finish; the one under way then is repeated.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.host.resolve import load_plugin
from storm_dagster.model.errors import InvalidRequest
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
_LATE_SECS = 30.0
_MOST_WAITING = 1000


def load_listener(name: str) -> Any:
    """An instance of ``module:Class``; :class:`InvalidRequest` if it cannot be made."""
    try:
        listener = load_plugin(NOTIFIER_KEY, name)()
    except (InvalidRequest, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise InvalidRequest(
            f"{NOTIFIER_KEY}: {name!r:.200} cannot be loaded ({type(error).__name__}: {error}): "
            "it must be importable by nimbus and take no arguments"
        ) from error
    if not callable(getattr(listener, "notify", None)):
        raise InvalidRequest(
            f"{NOTIFIER_KEY}: {name!r:.200} has no method notify(topology_id, action)"
        )
    return listener


class ActionNotifier:
    """Notifies the configured listener. :meth:`run` blocks in a thread of the daemon; without a
    listener it ends.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._idle = threading.Event()
        """Not set while a call has not returned."""
        self._idle.set()
        self._listener: Any = None
        self._epoch: int | None = None

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop``."""
        name = self._nimbus.conf[NOTIFIER_KEY]
        if not name:
            return
        try:
            self._listener = load_listener(str(name))
        except InvalidRequest as error:
            # The cluster works without it; its actions are dropped, so that they do not pile up.
            _log.error("%s; no listener is notified of actions", error.message)
        repeat(lambda: self.run_once(stop), _POLL_SECS, stop, "the listener is notified later")
        self._end()

    def run_once(self, stop: threading.Event) -> None:
        """Notify of pending actions, when this nimbus leads and the listener is free."""
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

    def _trim(self, ctx: OperationsContext, waiting: list[PendingAction]) -> list[PendingAction]:
        """The newest of them; the others are dropped, because nodes must not grow without bound."""
        late = waiting[: max(0, len(waiting) - _MOST_WAITING)]
        for action in late:
            _log.error(
                "the listener is not notified of %s of %s: too many wait",
                action.action,
                action.topology_id,
            )
            forget_action(ctx, action)
        return waiting[len(late) :]

    def _notify(self, action: PendingAction) -> None:
        if self._listener is None or not action.action:
            return
        what = f"{action.action} of {action.topology_id}"
        listener, name = self._listener, topology_name_of(action.topology_id)
        if not self._call(what, lambda: listener.notify(name, action.action), _LATE_SECS):
            _log.warning(
                "the action listener has not come back from %s for %g s: others wait",
                what,
                _LATE_SECS,
            )

    def _call(self, what: str, function: Callable[[], Any], wait_secs: float) -> bool:
        """Call in a thread of its own; whether it returned within ``wait_secs``. Its errors are
        logged.
        """
        self._idle.clear()

        def run() -> None:
            try:
                function()
            except BaseException as error:
                _log.warning(
                    "the action listener failed at %s: %s: %s", what, type(error).__name__, error
                )
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
        cleanup = getattr(self._listener, "cleanup", None)
        if self._epoch is not None and callable(cleanup) and self._idle.is_set():
            self._call("cleanup", cleanup, 2.0)
        self._epoch = None
