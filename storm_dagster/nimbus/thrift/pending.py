"""Submissions that were taken and whose Dagster run is still to be launched.

Clients of Storm wait seven seconds at most, and Dagster may take longer. A submission is answered
once it is stored whole, the record of its token included: the leader at that time launches it, by
its token exactly once (:mod:`storm_dagster.nimbus.requests.accepted_operations`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from storm_dagster.core.authorization import REQUEST_USER
from storm_dagster.host.futures import in_thread
from storm_dagster.model.errors import AlreadyAlive, StormDagsterError, Unavailable
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.submit.open_tokens import OpenTokenReader
from storm_dagster.operations.submit.staging import (
    allocate_topology_id,
    discard_token,
    read_client_token,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class PendingSubmission:
    """A submission that was taken: the fields of its request."""

    name: str
    handle: str
    """Handle of the upload of its parts."""
    token: str
    inactive: bool
    """True if the topology starts inactive."""


class PendingSubmissions:
    """Takes submissions, and launches each at once while its caller waits."""

    def __init__(self, nimbus: Nimbus, submissions: Submissions) -> None:
        self._nimbus = nimbus
        self._submissions = submissions
        self._names: set[str] = set()
        """Names of submissions that are being taken."""
        self._lock = threading.Lock()
        self._token_reader = OpenTokenReader()

    @contextmanager
    def reserve(self, name: str) -> Iterator[None]:
        """Reserve a name for one submission until its record is stored.

        Of many callers with one name exactly one succeeds, however slow Dagster is. The others get
        :class:`AlreadyAlive`, as does a caller while another submission of the name has no run yet.
        """
        with self._lock:
            if name in self._names:
                raise _being_submitted(name)
            self._names.add(name)
        try:
            self._refuse_waiting(name)
            yield
        finally:
            with self._lock:
                self._names.discard(name)

    def _refuse_waiting(self, name: str) -> None:
        """Raise :class:`AlreadyAlive` if a leader still has to launch a submission of the name."""
        runs = self._nimbus.launches.runs
        for token, record in self._token_reader.tokens(self._nimbus.cluster.state).items():
            # A record without a request is not launched by a leader: its caller repeats it.
            waits = record.request and token not in runs
            if record.verb == "submit" and record.name == name and waits:
                raise _being_submitted(name)

    def add(self, pending: PendingSubmission) -> None:
        """Store the record: from here on the submission survives this nimbus.

        :class:`NotLeading` at a follower.
        """
        epoch = self._nimbus.status.require()
        allocate_topology_id(
            self._nimbus.operations(epoch),
            pending.token,
            pending.name,
            epoch,
            "submit",
            request=asdict(pending),
            user=REQUEST_USER.get(),
        )

    def launch(self, pending: PendingSubmission, deadline: float) -> bool:
        """Launch the run of a submission that was added, and wait for the launch.

        Return False if the launch has not ended at ``deadline``: it continues in the background. An
        error of the launch is raised after the submission was dropped, or an error of :meth:`drop`.
        """

        def submit() -> None:
            self._submissions.submit(asdict(pending), is_promised=True, is_new=True)

        try:
            within(deadline, submit, f"the launch of {pending.name}, which is retried and")
        except Late:
            # The caller has its answer: after an outage of Dagster the launch is retried.
            return False
        except BaseException:
            self.drop(pending)
            raise
        return True

    def drop(self, pending: PendingSubmission) -> None:
        """Delete its record and its upload.

        :class:`Unavailable` when its record may be left, most often because this nimbus no longer
        leads: the next leader then launches it, and the upload stays for it.
        """
        if not self._discard(pending.token):
            raise Unavailable(
                f"the launch of topology {pending.name!r} failed at this nimbus, but another "
                "leader "
                "may still launch it: check with `storm-dagster list` before you submit it again"
            )
        self._nimbus.uploads.cancel(pending.handle)

    def _discard(self, token: str) -> bool:
        """Delete the record; false if it may be left.

        A record that is missing or published needs no deletion: true.
        """
        epoch = self._nimbus.status.epoch
        if epoch is None:
            return False
        ctx: OperationsContext = self._nimbus.operations(epoch)
        try:
            stored = read_client_token(ctx, token)
        except StormDagsterError as error:
            _log.warning("the record of token %s is left: %s", token, error.message)
            return False
        if stored is None:
            return True
        record, version = stored
        return record.published or discard_token(ctx, token, version, epoch)


def _being_submitted(name: str) -> AlreadyAlive:
    return AlreadyAlive(
        f"topology {name!r} is being submitted already: wait until it has finished, or choose "
        "another name"
    )


class Late(Unavailable):
    """A change was not finished in time; it continues in the background."""


def within(deadline: float, work: Callable[[], T], title: str) -> T:
    """Return the result of ``work``, or raise its error, before the deadline.

    :class:`Late`, which names the work by ``title``, if the work is not done by then. It continues
    in the background.
    """
    future = in_thread("nimbus-thrift-submit", work)

    def log_failure(_: Future[T]) -> None:
        error = future.exception()
        if error is not None:
            _log.warning("%s, which its caller did not wait for, failed: %s", title, error)

    if not wait([future], max(0.0, deadline - time.monotonic())).done:
        future.add_done_callback(log_failure)
        raise Late(
            f"{title} is still being started, because Dagster is slow: check if the "
            "topology appears before you try again"
        )
    return future.result()
