"""Submissions that were taken and whose Dagster run is still to be launched.

Clients of Storm wait seven seconds at most, and Dagster may take longer. A submission is answered
once it is stored whole, this record of it included (``upload.<handle>.pending``, on as many
nimbuses as any blob): whoever leads launches it, by its token exactly once, and then drops the
record.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from storm_dagster.host.futures import in_thread
from storm_dagster.model.errors import (
    AlreadyAlive,
    KeyNotFound,
    Misconfigured,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.nimbus.member import Nimbus, repeat
from storm_dagster.nimbus.requests.submitting import Submissions

_log = logging.getLogger(__name__)
_PREFIX, _SUFFIX = "upload.", ".pending"
_POLL_SECS = 3.0
T = TypeVar("T")


@dataclass(frozen=True)
class PendingSubmission:
    """Record of one submission."""

    name: str
    handle: str
    token: str
    inactive: bool

    @property
    def key(self) -> str:
        """Key of the record."""
        return f"{_PREFIX}{self.handle}{_SUFFIX}"


class PendingSubmissions:
    """Launches what is pending: at once for its caller, and again while Dagster is out of reach."""

    def __init__(self, nimbus: Nimbus, submissions: Submissions) -> None:
        self._nimbus = nimbus
        self._submissions = submissions
        self._launching: set[str] = set()
        self._names: set[str] = set()
        """Names of submissions that are being taken or launched."""
        self._lock = threading.Lock()

    def reserve(self, name: str) -> None:
        """Keep the name for one submission until it is launched or dropped; :class:`AlreadyAlive`
        when it is kept.

        Of many callers with one name exactly one succeeds, however slow Dagster is.
        """
        with self._lock:
            if name in self._names:
                raise AlreadyAlive(
                    f"topology {name!r} is being submitted already: wait until it has finished, or choose another name"
                )
            self._names.add(name)

    def release(self, name: str) -> None:
        """The name is free for others, as far as this is concerned; repeatable."""
        with self._lock:
            self._names.discard(name)

    def add(self, pending: PendingSubmission) -> None:
        """Store the record: from here on the submission survives this nimbus."""
        with self._lock:
            self._launching.add(pending.key)
        self._nimbus.blobs.put(pending.key, json.dumps(asdict(pending)).encode())

    def launch(self, pending: PendingSubmission, deadline: float) -> bool:
        """Launch what was added, and wait for it.

        ``False`` when it is not known at ``deadline``: it goes on by itself then. Raises what the
        launch raised; then nothing of the submission is left.
        """

        def submit() -> None:
            self._submissions.submit(asdict(pending))
            self._forget(pending)

        try:
            within(deadline, submit, f"the launch of {pending.name}, which is tried again and")
        except Late:
            # Nobody waits any more: an outage of Dagster is no answer now, but a reason to try
            # again.
            with self._lock:
                self._launching.discard(pending.key)
            return False
        except BaseException:
            self.drop(pending)
            raise
        return True

    def run(self, ended: threading.Event) -> None:
        """Launch what others left, or what Dagster could not take before; until ``ended``."""
        repeat(self._launch_left, _POLL_SECS, ended, "pending submissions wait")

    def drop(self, pending: PendingSubmission) -> None:
        """Forget it, with everything that was stored for it."""
        try:
            self._nimbus.uploads.cancel(pending.handle)
        finally:
            with self._lock:
                self._launching.discard(pending.key)
                self._names.discard(pending.name)

    def _forget(self, pending: PendingSubmission) -> None:
        """The run exists: only the record goes, the parts belong to the run."""
        try:
            self._nimbus.blobs.delete(pending.key)
        except KeyNotFound:
            pass
        except Exception as error:  # Whatever it is, the launch has not failed.
            _log.info("the record %s stays for the next poll: %s", pending.key, error)
        with self._lock:
            self._launching.discard(pending.key)
            self._names.discard(pending.name)

    def _launch_left(self) -> None:
        if self._nimbus.status.epoch is None:
            if self._nimbus.status.known.leader not in (None, self._nimbus.status.me):
                with self._lock:
                    self._names.clear()  # Another nimbus launches them, which is not seen here.
            return
        for key in self._nimbus.blobs.keys(_PREFIX):
            if not key.endswith(_SUFFIX):
                continue
            with self._lock:
                if key in self._launching:
                    continue
            pending = self._read(key)
            if pending is None:
                continue
            try:
                self._submissions.submit(asdict(pending))
            except (Misconfigured, Unavailable) as error:
                _log.warning("submission %s of %s waits: %s", pending.token, pending.name, error)
            except StormDagsterError as error:
                _log.error(
                    "submission %s of %s, which was taken, failed: %s",
                    pending.token,
                    pending.name,
                    error,
                )
                self.drop(pending)
            else:
                self._forget(pending)

    def _read(self, key: str) -> PendingSubmission | None:
        try:
            document: Mapping[str, Any] = json.loads(self._nimbus.blobs.read(key))
            return PendingSubmission(**document)
        except KeyNotFound:
            return None
        except (ValueError, TypeError) as error:
            _log.error("%s is not a pending submission and is dropped: %s", key, error)
            self._nimbus.blobs.delete(key)
            return None


class Late(Unavailable):
    """A change was not finished in time; it goes on all the same."""


def within(deadline: float, work: Callable[[], T], what: str) -> T:
    """What ``work`` returns or raises; :class:`Late` when it is not done by then. It goes on all
    the same.
    """
    done = in_thread("nimbus-thrift-submit", work)

    def log_failure(_: Future[T]) -> None:
        if (error := done.exception()) is not None:
            _log.warning("%s, which its caller did not wait for, failed: %s", what, error)

    if not wait([done], max(0.0, deadline - time.monotonic())).done:
        done.add_done_callback(log_failure)
        raise Late(
            f"{what} is still being started, because Dagster takes its time: check whether the topology appears before you try again"
        )
    return done.result()
