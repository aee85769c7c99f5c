"""Loop that makes this nimbus leader or follower.

See ``docs/decisions.md#leader-election``.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from storm_dagster.core.leader_priority import leader_decision
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import StormDagsterError, Unavailable, untrusted
from storm_dagster.nimbus.blobs.sync import BlobSync
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.security.settings import Security

_log = logging.getLogger(__name__)

CHECK_SECS = 5.0
"""Interval at which a follower polls for a leader, besides its watch."""
_MIN_BACK_OFF_SECS = 1.0
_MAX_BACK_OFF_SECS = 60.0
"""Bounds of the pause after an attempt that failed."""
_RETRY_SECS = 1.0
"""Pause before the next attempt while no nimbus leads, or without ZooKeeper."""
_STOP_SECS = 0.2
"""Longest time that a pause continues after ``stop``, which does not wake the loop."""
_ANSWER_SECS = 3.0
"""Longest wait for this nimbus's own answer at its address."""
_MAX_UNANSWERED = 3
"""Checks of its own address that must fail in a row before a leader resigns.

One failure may only mean that the machine is busy.
"""


class Election:
    """Election of this nimbus.

    :meth:`run_once` is called at each wake-up and every five seconds, in one thread.
    ``initialize(epoch)`` is the leader's initialization. If it raises, or an attempt fails in
    another way, leadership is dropped, the reason is logged, and this nimbus waits as a follower
    for 1, 2, 4 ... 60 s before the next attempt, while another nimbus may lead.
    """

    def __init__(self, nimbus: Nimbus, sync: BlobSync, initialize: Callable[[int], None]) -> None:
        self._nimbus = nimbus
        self._sync = sync
        self._initialize = initialize
        self._wake = threading.Event()
        self._vacant_since: float | None = None
        """Monotonic time since which this nimbus sees no leader; ``None`` while there is one."""
        self._pauses = Backoff(_MIN_BACK_OFF_SECS, _MAX_BACK_OFF_SECS)
        self._unanswered = 0
        """Number of checks of this nimbus's own address that failed in a row."""
        self._http = httpx.Client(timeout=_ANSWER_SECS, **Security.of(nimbus.conf).client_options())
        self._not_before = 0.0
        """Monotonic time before which this nimbus makes no attempt to lead."""
        self._logged: str | None = None
        """Last state that was logged."""
        self._registered: tuple[int, Mapping[str, Any]] | None = None
        """(session id, detail) of the registration as a follower; ``None`` if it must be made."""
        nimbus.cluster.state.add_listener(self.wake)

    def wake(self, _: str = "") -> None:
        """Poll now, also after a change of the connection; callable from any thread."""
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop``.

        Errors are logged, and the round is repeated. Only a root that now belongs to another
        cluster ends it: :class:`Conflict`.
        """
        while not stop.is_set():
            # Before the round, so that the first one counts as a pass of this thread, too.
            self._nimbus.passes.passed()
            self._wake.clear()
            try:
                self._nimbus.cluster.check_cluster_id()
                pause = self._attempt()
            except Unavailable as error:
                self._log_once(logging.WARNING, f"no election now: {error}")
                self._forget_leadership()
                pause = _RETRY_SECS
            deadline = time.monotonic() + pause
            self._nimbus.passes.passed()
            while not stop.is_set() and not self._wake.is_set() and time.monotonic() < deadline:
                # A pause after a failure is as long as the silence of a loop that hangs.
                self._nimbus.passes.passed()
                self._wake.wait(min(_STOP_SECS, max(0.0, deadline - time.monotonic())))

    def _attempt(self) -> float:
        """Run one round and return the pause after it.

        After an attempt that fails for any reason this nimbus is a follower that waits.
        """
        try:
            return self.run_once()
        except Unavailable:
            raise
        except Exception as error:
            return self._give_up("an election attempt failed", error)

    def _give_up(self, reason: str, error: Exception) -> float:
        """Drop ``/nimbus_master`` and log the reason.

        Returns the pause before the next attempt: 1, 2, 4 ... 60 s.
        """
        pause = self._pauses.next_pause()
        self._not_before = time.monotonic() + pause
        trace = None if isinstance(error, StormDagsterError) else error
        text = "nimbus %s drops leadership, %s: %s; it tries again in %g s"
        _log.error(text, self._nimbus.identity.address, reason, error, pause, exc_info=trace)
        self._forget_leadership()
        try:
            self._nimbus.leadership.resign()
        except StormDagsterError as lost:
            # Leadership then ends with the session. Until then no write is made under it, because
            # no thread acts as the leader.
            _log.warning("leadership could not be given up now: %s", lost)
        # As a registered follower this nimbus receives blobs.
        self._registered = None
        try:
            self._register()
        except StormDagsterError as unseen:
            _log.warning("this nimbus is not shown among the followers now: %s", unseen)
        return pause

    def run_once(self) -> float:
        """Run one round and return the maximum pause before the next one, in seconds."""
        leadership = self._nimbus.leadership
        me = self._nimbus.identity
        leader = leadership.current(self.wake)
        if leader is None or leader == me.address:
            allowed, pause = self._may_try(leader)
            if allowed:
                epoch = leadership.try_lead(me.address, me.http, self.wake)
                if epoch is not None:
                    return self._lead(epoch)
                leader = leadership.current(self.wake)
        else:
            self._vacant_since = None
            pause = CHECK_SECS
        self._follow(leader)
        return pause

    def _may_try(self, leader: str | None) -> tuple[bool, float]:
        """Return True if this nimbus may try to lead now, and the pause if it does not lead then.

        Before an attempt the blobs that it lacks are counted, and set in its status.
        """
        now = time.monotonic()
        address = self._nimbus.identity.address
        if leader == address and self._nimbus.status.snapshot.epoch is not None:
            # This nimbus leads already, and only confirms it.
            return True, CHECK_SECS
        if now < self._not_before:
            return False, self._not_before - now
        if self._vacant_since is None:
            self._vacant_since = now
        lacking, _ = self._sync.missing()
        self._nimbus.status.set_lacking(lacking)
        missing_counts: dict[str, int] = {}
        for follower, detail in self._nimbus.leadership.followers().items():
            missing = detail.get("missing")
            if isinstance(missing, int):
                missing_counts[follower] = missing
        decision = leader_decision(
            address, len(lacking), missing_counts, vacant_secs=now - self._vacant_since
        )
        if not decision.allowed or lacking:
            self._log_once(logging.WARNING, decision.reason)
        # Another nimbus may be about to announce itself as leader: poll soon.
        return decision.allowed, _RETRY_SECS

    def _lead(self, epoch: int) -> float:
        """Act as the leader in ``epoch``, and return the pause before the next round.

        A new leader is initialized first. One that leads already checks its own address. If either
        fails, leadership is dropped.
        """
        me = self._nimbus.identity
        status = self._nimbus.status
        self._vacant_since = None
        if status.snapshot.epoch == epoch:
            problem = self._unreachable_reason()
            if problem is not None:
                return self._give_up("it is not reachable at its address", problem)
            return CHECK_SECS
        try:
            self._initialize(epoch)
        except Exception as error:
            return self._give_up("its initialization failed", error)
        self._pauses.reset()
        status.update(epoch=epoch, leader=me.address, leader_http=me.http)
        self._nimbus.leadership.unregister_follower(me.address)
        self._registered = None
        self._logged = None
        _log.info("nimbus %s leads in epoch %d", me.address, epoch)
        return CHECK_SECS

    def _unreachable_reason(self) -> Unavailable | None:
        """Return an error if clients do not reach this leader at its announced address.

        ``None`` also for the first failures, and while no other nimbus could lead.
        """
        url = f"{self._nimbus.identity.http}/healthz"
        try:
            self._http.get(url)
        except httpx.HTTPError as error:
            self._unanswered += 1
            # Without a follower no other nimbus could lead, and resigning would not help.
            if self._unanswered >= _MAX_UNANSWERED and self._nimbus.leadership.followers():
                self._unanswered = 0
                return untrusted(error) or Unavailable(
                    f"{url} does not answer ({type(error).__name__}): see storm.local.hostname"
                )
        else:
            self._unanswered = 0
        return None

    def _follow(self, leader: str | None) -> None:
        """Act as a follower of ``leader``; ``None`` if there is no leader."""
        me = self._nimbus.identity
        status = self._nimbus.status
        if status.snapshot.epoch is not None:
            _log.warning("nimbus %s no longer leads, it is a follower", me.address)
        http = None
        # ``leader`` may be this nimbus, although it does not lead: its former process wrote the
        # node, and that session has not ended, or this nimbus could not resign.
        if leader is not None and leader != me.address:
            stored_epoch = self._nimbus.cluster.epoch()
            if stored_epoch is not None:
                _, record = stored_epoch
                if record.leader == leader:
                    http = record.http
        if status.snapshot.leader != leader:
            if leader is None:
                _log.info("nimbus %s has no leader to follow yet", me.address)
            else:
                _log.info("nimbus %s follows %s", me.address, leader)
        status.update(epoch=None, leader=leader, leader_http=http)
        self._register()

    def _register(self) -> None:
        """Register this nimbus as a follower.

        It writes only after a change and in a new session.
        """
        me = self._nimbus.identity
        detail = {
            "v": 1,
            "http": me.http,
            "missing": self._nimbus.status.snapshot.missing,
            "started_secs": me.started_secs,
            "version": me.version,
        }
        registration = (self._nimbus.cluster.session.session_id, detail)
        if registration != self._registered:
            self._nimbus.leadership.register_follower(me.address, me.uptime_secs, detail)
            self._registered = registration

    def _forget_leadership(self) -> None:
        """Stop acting as the leader in this process; the node in ZooKeeper stays."""
        if self._nimbus.status.snapshot.epoch is not None:
            self._nimbus.status.update(epoch=None, leader=None, leader_http=None)

    def _log_once(self, level: int, text: str) -> None:
        """Log a state once, not at every round."""
        if text != self._logged:
            self._logged = text
            _log.log(level, "%s", text)

    def close(self) -> None:
        """Stop listening to the connection."""
        self._nimbus.cluster.state.remove_listener(self.wake)
        self._http.close()
