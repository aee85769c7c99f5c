"""Repetition of requests by their client token, when the leader changes.

The upload of a request that failed for good is removed here as well.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from storm_dagster.client.http import NimbusClient
from storm_dagster.client.waiting import Progress, RunContinues
from storm_dagster.model.errors import Fenced, StormDagsterError, Unavailable

T = TypeVar("T")

MAX_REPETITIONS = 2
"""Repetitions of a request with its token."""
_LEADER_STEP = "leader"
"""Progress step of a repetition."""


def repeat_by_token(
    nimbus: NimbusClient,
    token: str,
    attempt: Callable[[], T],
    progress: Progress | None = None,
) -> T:
    """Run ``attempt``, which sends a request with ``token``; repeat it if the leader changes.

    A run continues under the next leader by itself. The request is repeated if the run, or the
    request, was lost with the former leader: the token makes it take effect once, and a new run
    continues with what is staged. The :class:`Unavailable` or :class:`Fenced` of the third attempt,
    and one without a change of the leader, names the token.
    """
    repetitions = 0
    while True:
        epoch: int | None = None
        try:
            epoch = _leader_epoch(nimbus)
            return attempt()
        except (Fenced, Unavailable) as error:
            may_repeat = repetitions < MAX_REPETITIONS and not isinstance(error, RunContinues)
            if not may_repeat or not _leader_changed(nimbus, epoch, error):
                raise _with_token(error, token) from error
            repetitions += 1
            if progress is not None:
                progress(_LEADER_STEP, "changed, the request is repeated with its token")


def _leader_epoch(nimbus: NimbusClient) -> int | None:
    """Epoch of the leading nimbus; ``None`` if it does not say it."""
    epoch = nimbus.get("/healthz").get("epoch")
    return epoch if isinstance(epoch, int) else None


def _leader_changed(nimbus: NimbusClient, epoch: int | None, error: StormDagsterError) -> bool:
    """True if another nimbus leads than in ``epoch``, in which the request was sent."""
    if isinstance(error, Fenced):
        return True
    if epoch is None:
        return False
    try:
        current = _leader_epoch(nimbus)
    except StormDagsterError:
        return False
    return current is not None and current != epoch


def _with_token(error: Fenced | Unavailable, token: str) -> Fenced | Unavailable:
    """The error with the token, by which a caller repeats the request safely."""
    if token in error.message:
        return error
    return type(error)(
        f"{error.message}; repeat the request with its token (--token {token}): it is done once"
    )


@dataclass(frozen=True)
class SentRequest:
    """A request that nimbus has accepted, and what came of it."""

    answer: Mapping[str, Any]
    """The response to the request."""
    done: Mapping[str, Any]
    """The document of its run after a wait; else the response, or empty."""
    topology: Mapping[str, Any]
    """The document of the topology after a wait; else empty."""


def send_request(
    nimbus: NimbusClient,
    attempt: Callable[[Callable[[], None]], T],
    *,
    token: str | None,
    handle: str | None,
    progress: Progress | None = None,
) -> T:
    """Run ``attempt``, which sends a request that may bring the upload ``handle``.

    With ``token`` it is repeated (:func:`repeat_by_token`). ``attempt`` gets the function to call
    if the run of the request has failed. If the request fails for good, its upload is removed, with
    all that its run has staged. After another error a run may exist and use both.
    """
    has_run_failed = False

    def note_failure() -> None:
        nonlocal has_run_failed
        has_run_failed = True

    def one_attempt() -> T:
        nonlocal has_run_failed
        has_run_failed = False
        return attempt(note_failure)

    try:
        if token is None:
            return one_attempt()
        return repeat_by_token(nimbus, token, one_attempt, progress)
    except StormDagsterError as error:
        is_final = has_run_failed or not isinstance(error, Unavailable | Fenced)
        if handle is not None and is_final:
            drop_upload(nimbus, handle)
        raise


def drop_upload(nimbus: NimbusClient, handle: str) -> None:
    """Remove the upload of a try that has failed for good, with all that its run has staged.

    The cleaner removes what cannot be removed now.
    """
    with suppress(StormDagsterError):
        nimbus.request("DELETE", f"/v1/uploads/{handle}")
