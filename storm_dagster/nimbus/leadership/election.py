"""The loop that makes this nimbus leader or follower (``docs/decisions.md#leader-election``)."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from storm_dagster.core.leader_priority import leader_decision
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.nimbus.blobs.sync import BlobSync
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.security.settings import Security

_log = logging.getLogger(__name__)

CHECK_SECS = 5.0
"""A follower polls for a leader this often, besides being woken by its watch."""
_FIRST_BACK_OFF_SECS = 1.0
_LONGEST_BACK_OFF_SECS = 60.0
_ANSWER_SECS = 3.0
_UNANSWERED = 3
"""So many checks of its own address must fail in a row: a busy machine is no reason to resign."""


class Election:
    """Runs :meth:`run_once` at each wake-up and every five seconds, in one thread.

    ``initialize(epoch)`` is the leader's initialization. When it raises, or an attempt fails in
    another way, leadership is dropped, the reason is logged, and this nimbus waits as a follower
    for 1, 2, 4 ... 60 s before it tries again, while others may lead.
    """

    def __init__(self, nimbus: Nimbus, sync: BlobSync, initialize: Callable[[int], None]) -> None:
        self._nimbus = nimbus
        self._sync = sync
        self._initialize = initialize
        self._wake = threading.Event()
        self._vacant_since: float | None = None
        self._pauses = Backoff(_FIRST_BACK_OFF_SECS, _LONGEST_BACK_OFF_SECS)
        self._unanswered = 0
        self._http = httpx.Client(timeout=_ANSWER_SECS, **Security.of(nimbus.conf).client_options())
        self._not_before = 0.0
        self._logged: str | None = None
        self._registered: tuple[int, Mapping[str, Any]] | None = None
        nimbus.cluster.state.add_listener(self.wake)

    def wake(self, _: str = "") -> None:
        """Poll now, also when the connection has changed; may be called from any thread."""
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop``. Errors are logged and the round repeated; only another cluster's id
        ends it.

        Raises :class:`Conflict` when the root became another cluster's.
        """
        while not stop.is_set():
            self._wake.clear()
            try:
                self._nimbus.cluster.check_cluster_id()
                pause = self._attempt()
            except Unavailable as error:
                self._log_once(logging.WARNING, f"no election now: {error}")
                self._forget_leadership()
                pause = 1.0
            deadline = time.monotonic() + pause
            while not stop.is_set() and not self._wake.is_set() and time.monotonic() < deadline:
                self._wake.wait(min(0.2, max(0.0, deadline - time.monotonic())))

    def _attempt(self) -> float:
        """:meth:`run_once`; an attempt that fails, for whatever reason, ends as a follower that
        waits.
        """
        try:
            return self.run_once()
        except Unavailable:
            raise
        except Exception as error:
            return self._give_up("an election attempt failed", error)

    def _give_up(self, what: str, error: Exception) -> float:
        """Drop ``/nimbus_master``, log the reason, and wait 1, 2, 4 ... 60 s; how long, in
        seconds.
        """
        pause = self._pauses.next_pause()
        self._not_before = time.monotonic() + pause
        trace = None if isinstance(error, StormDagsterError) else error
        text = "nimbus %s drops leadership, %s: %s; it tries again in %g s"
        _log.error(text, self._nimbus.identity.address, what, error, pause, exc_info=trace)
        self._forget_leadership()
        try:
            self._nimbus.leadership.resign()
        except StormDagsterError as lost:
            # Then it ends with the session; no write lands meanwhile, because nothing acts for it.
            _log.warning("leadership could not be given up now: %s", lost)
        # Among the followers again: registered as one, and it takes blobs.
        self._registered = None
        try:
            self._register()
        except StormDagsterError as unseen:
            _log.warning("this nimbus is not shown among the followers now: %s", unseen)
        return pause

    def run_once(self) -> float:
        """One round; how long to wait at most before the next, in seconds."""
        leadership, me = self._nimbus.leadership, self._nimbus.identity
        leader = leadership.current(self.wake)
        if leader is None or leader == me.address:
            allowed, pause = self._may_try(leader)
            if allowed:
                if (epoch := leadership.try_lead(me.address, me.http, self.wake)) is not None:
                    return self._lead(epoch)
                leader = leadership.current(self.wake)
        else:
            self._vacant_since = None
            pause = CHECK_SECS
        self._follow(leader)
        return pause

    def _may_try(self, leader: str | None) -> tuple[bool, float]:
        """Whether to try for leadership now, and the pause if not."""
        now = time.monotonic()
        if leader == self._nimbus.identity.address and self._nimbus.status.known.epoch is not None:
            return True, CHECK_SECS  # confirming what is held
        if now < self._not_before:
            return False, self._not_before - now
        if self._vacant_since is None:
            self._vacant_since = now
        lacking, _ = self._sync.missing()
        self._nimbus.status.set_lacking(lacking)
        others = {
            address: count
            for address, detail in self._nimbus.leadership.followers().items()
            if isinstance(count := detail.get("missing"), int)
        }
        decision = leader_decision(
            self._nimbus.identity.address,
            len(lacking),
            others,
            vacant_secs=now - self._vacant_since,
        )
        if not decision.allowed or lacking:
            self._log_once(logging.WARNING, decision.reason)
        # Somebody else's leader may be about to announce itself: poll again soon.
        return decision.allowed, 1.0

    def _lead(self, epoch: int) -> float:
        me, status = self._nimbus.identity, self._nimbus.status
        self._vacant_since = None
        if status.known.epoch == epoch:
            deaf = self._deaf()
            return CHECK_SECS if deaf is None else self._give_up("nobody can reach it", deaf)
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

    def _deaf(self) -> Unavailable | None:
        """Why clients do not reach this leader under the address that it announces, when another
        nimbus could lead.
        """
        url = f"{self._nimbus.identity.http}/healthz"
        try:
            self._http.get(url)
        except httpx.HTTPError as error:
            self._unanswered += 1
            if self._unanswered >= _UNANSWERED and self._nimbus.leadership.followers():
                self._unanswered = 0
                return Unavailable(
                    f"{url} does not answer ({type(error).__name__}): see storm.local.hostname"
                )
        else:
            self._unanswered = 0
        return None

    def _follow(self, leader: str | None) -> None:
        me, status = self._nimbus.identity, self._nimbus.status
        if status.known.epoch is not None:
            _log.warning("nimbus %s does not lead any more, it follows", me.address)
        http = None
        if leader is not None and leader != me.address:
            known = self._nimbus.cluster.epoch()
            http = known[1].http if known is not None and known[1].leader == leader else None
        if status.known.leader != leader:
            _log.info("nimbus %s follows %s", me.address, leader or "nobody yet")
        status.update(epoch=None, leader=leader, leader_http=http)
        self._register()

    def _register(self) -> None:
        """Show this nimbus among the followers; written on change and in a new session only."""
        me, missing = self._nimbus.identity, self._nimbus.status.known.missing
        detail = {
            "v": 1,
            "http": me.http,
            "missing": missing,
            "started_secs": me.started_secs,
            "version": me.version,
        }
        wanted = (self._nimbus.cluster.session.session_id, detail)
        if wanted != self._registered:
            self._nimbus.leadership.register_follower(me.address, me.uptime_secs, detail)
            self._registered = wanted

    def _forget_leadership(self) -> None:
        if self._nimbus.status.known.epoch is not None:
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
