"""Search for the leading nimbus, and calls that are repeated until it responds."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import httpx

from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import (
    NOT_LEADING_HEADER,
    NOTHING_SENT,
    InvalidRequest,
    KeyNotFound,
    NotLeading,
    StormDagsterError,
    Unavailable,
    error_from_document,
    error_text,
    untrusted,
)

_HEALTH_SECS = 3.0
"""Maximum time in which a nimbus answers ``/healthz``."""
_FIRST_PAUSE_SECS = 0.1
_MAX_PAUSE_SECS = 1.0
"""The pause before a call is repeated grows from the first to this one."""
_SEARCH_PAUSE_SECS = 0.2
"""Pause between two rounds of the nimbuses in search of a leader."""
_QUIET_SECS = 3.0
"""A shorter wait for a leader is not reported."""
# States of nimbuses, which ``find_leader`` returns and ``remedy_without_leader`` reads.
_NO_LEADER = "no leader"
_NO_ZOOKEEPER = "no connection to ZooKeeper"


class UnavailableAtLeader(Unavailable):
    """Response of a leader that lacks a service itself, such as Dagster."""


# -- the search among nimbuses -----------------------------------------------------------------


def read_health(http: httpx.Client, url: str, timeout_secs: float = _HEALTH_SECS) -> Any:
    """Return the document of a nimbus's ``/healthz``.

    ``httpx.HTTPError`` or ``ValueError`` if it cannot be read.
    """
    return http.get(f"{url}/healthz", timeout=timeout_secs).json()


def is_nimbus(http: httpx.Client, url: str, timeout_secs: float) -> bool:
    """True if a nimbus is at the URL, also if it is frozen or refuses this client."""
    try:
        document = read_health(http, url, timeout_secs)
    except httpx.ReadTimeout:
        return True
    except (httpx.HTTPError, ValueError) as error:
        # Certificates that do not fit, and servers of others, are reported by the call that
        # follows.
        return untrusted(error) is not None or "certificate" in str(error).lower()
    return isinstance(document, dict)


def find_leader(http: httpx.Client, urls: Iterable[str]) -> tuple[str | None, str]:
    """Return the base URL of the leader, or the states of the nimbuses.

    Without a leader the URL is ``None``, with one the states are empty. They are in words, one for
    each URL, for :func:`remedy_without_leader`. The leader that a follower names
    is called as well, since ``urls`` need not list it.
    """
    states: list[str] = []
    for url in urls:
        try:
            document = read_health(http, url)
        except (httpx.HTTPError, ValueError) as error:
            refusal = untrusted(error)
            states.append(refusal.message if refusal else f"{url}: {type(error).__name__}")
            continue
        if not isinstance(document, dict):
            states.append(f"{url}: not a nimbus")
            continue
        if document.get("leader") is True:
            return url, ""
        leader_url = document.get("leader_http")
        if isinstance(leader_url, str):
            leader_url = leader_url.rstrip("/")
            if leader_url != url and _leads(http, leader_url):
                return leader_url, ""
        # A nimbus that names a leader which does not answer has no leader either.
        no_zookeeper = document.get("status") == _NO_ZOOKEEPER
        states.append(f"{url}: {_NO_ZOOKEEPER if no_zookeeper else _NO_LEADER}")
    return None, "; ".join(states) or "no nimbus is known"


def _leads(http: httpx.Client, url: str) -> bool:
    """True if the nimbus at the URL says that it leads; False if it cannot be read."""
    try:
        document = read_health(http, url)
    except (httpx.HTTPError, ValueError):
        return False
    return isinstance(document, dict) and document.get("leader") is True


def remedy_without_leader(states: str) -> str:
    """Advice for a cluster in which :func:`find_leader` found the ``states``."""
    if _NO_ZOOKEEPER in states:
        return (
            "ZooKeeper does not answer; topologies pause until it does, without data loss. "
            "Restart ZooKeeper (`storm-dagster dev` restarts its own), or see "
            "`storm-dagster doctor`"
        )
    if _NO_LEADER in states:
        return "one will lead in a few seconds, try again; `storm-dagster doctor` names the problem"
    if NOTHING_SENT in states:
        return "follow the remedy in that message; `storm-dagster doctor --security` has details"
    if "Timeout" in states:
        return (
            "it is there and does not answer, because it is frozen or overloaded: "
            "see `storm-dagster status`"
        )
    return (
        "start it with `storm-dagster dev`, or name it with --home, --conf-dir or "
        "-c nimbus.seeds=[host:port]"
    )


# -- sources of the leader's address -----------------------------------------------------------


class LeaderSource(Protocol):
    """Source of the leader's address."""

    def url(self, deadline: float) -> str:
        """Wait for a leader and return its base URL.

        :class:`Unavailable` at ``deadline`` (``time.monotonic()``).
        """
        ...

    def leads(self, url: str) -> bool:
        """True if the nimbus at ``url`` is known to lead, so that its refusal is final."""
        ...

    def forget(self) -> None:
        """Search the leader for the next call."""
        ...


class SearchedLeader(LeaderSource):
    """Leader that nimbuses name over HTTP; it is cached until a call of it fails.

    ``urls`` is called at each search. ``on_wait`` is called once in a wait, after three seconds,
    with the states of the nimbuses. ``thing`` is the cluster in errors, such as "the cluster of
    FOLDER".
    """

    def __init__(
        self,
        http: httpx.Client,
        urls: Callable[[], list[str]],
        *,
        thing: str = "the cluster",
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self._http = http
        self._urls = urls
        self._thing = thing
        self._on_wait = on_wait
        self._leader: str | None = None
        """URL of the leader; ``None`` if it must be searched."""

    def url(self, deadline: float) -> str:
        # Read once: another thread may reset it now.
        leader = self._leader
        if leader is not None:
            return leader
        notify_at = time.monotonic() + _QUIET_SECS
        notified = False
        while True:
            leader, states = find_leader(self._http, self._urls())
            if leader is not None:
                self._leader = leader
                return leader
            now = time.monotonic()
            if now >= deadline:
                raise Unavailable(
                    f"{self._thing} has no leading nimbus in reach ({states}): "
                    f"{remedy_without_leader(states)}"
                )
            if not notified and self._on_wait is not None and now >= notify_at:
                self._on_wait(states)
                notified = True
            time.sleep(_SEARCH_PAUSE_SECS)

    def leads(self, url: str) -> bool:
        leader, _ = find_leader(self._http, self._urls())
        return leader == url

    def forget(self) -> None:
        self._leader = None


class NamedLeader(LeaderSource):
    """Leader that ZooKeeper names, or a fixed address; it is read before each try.

    ``url`` may raise :class:`Unavailable`, which is retried. The nimbus at that address may no
    longer lead, so that each of its :class:`Unavailable` responses is retried, too.
    """

    def __init__(self, url: Callable[[], str] | str) -> None:
        self._url = url

    def url(self, deadline: float) -> str:
        if isinstance(self._url, str):
            return self._url.rstrip("/")
        pauses = Backoff(_FIRST_PAUSE_SECS, _MAX_PAUSE_SECS)
        while True:
            try:
                return self._url().rstrip("/")
            except Unavailable:
                pause = pauses.next_pause()
                if time.monotonic() + pause >= deadline:
                    raise
            time.sleep(pause)

    def leads(self, url: str) -> bool:
        return False

    def forget(self) -> None:
        pass


# -- calls -------------------------------------------------------------------------------------


def response_error(response: httpx.Response) -> StormDagsterError:
    """Typed error of a response with a status from 400 up.

    A body that is not an error document (of a proxy, or of another service) is in the text of the
    error.
    """
    try:
        return error_from_document(response.json())
    except ValueError:
        pass
    text = response.text.strip()[:200] or "no text"
    kind = Unavailable if response.status_code >= 500 else InvalidRequest
    return kind(
        f"{response.request.method} {response.request.url} answered {response.status_code} with "
        f"something that is not JSON ({text}): is a nimbus listening there?"
    )


_REFUSALS_IN_WORDS = ("is a follower and takes no writes", "does not lead, and no other nimbus")
"""Parts of the refusals of a nimbus of the release before, which sends no header."""


def is_refused_by_follower(response: httpx.Response, failure: StormDagsterError) -> bool:
    """True if the nimbus refused the call because it does not lead: it had no effect."""
    if NOT_LEADING_HEADER in response.headers:
        return True
    in_words = any(words in failure.message for words in _REFUSALS_IN_WORDS)
    return response.status_code == NotLeading.http_status and in_words


def call_leader(
    source: LeaderSource,
    send: Callable[[str], httpx.Response],
    *,
    doing: str,
    deadline: float,
    resend: bool = True,
    error_of: Callable[[httpx.Response], StormDagsterError] = response_error,
) -> httpx.Response:
    """Call ``send(base_url)`` until the response is good, or raise its error.

    A call that reached no nimbus, or one that refused it because it does not lead, is repeated
    until ``deadline`` (``time.monotonic()``); then its last error is raised, or that of
    ``source.url``. A call whose connection broke, or that got another :class:`Unavailable` of a
    nimbus that no longer leads, may have had its effect: it is repeated only with ``resend``. If
    such a call was a DELETE, a :class:`KeyNotFound` to its repetition is a good response. An
    :class:`Unavailable` of a nimbus that still leads is its response, and raised as
    :class:`UnavailableAtLeader`. ``send`` bounds the time of a single try. ``doing`` names the call
    in errors, ``error_of`` makes the error of a response that is not good.
    """
    pauses = Backoff(_FIRST_PAUSE_SECS, _MAX_PAUSE_SECS)
    may_have_landed = False
    while True:
        base = source.url(deadline)
        try:
            response = send(base)
            if response.is_success:
                return response
            failure = error_of(response)
        except httpx.HTTPError as error:
            failure = untrusted(error) or Unavailable(
                f"{doing}: the leading nimbus at {base} does not answer "
                f"({error_text(error)}): check with `storm-dagster status`"
            )
            was_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            if was_sent and not resend:
                raise failure from None
            may_have_landed = may_have_landed or was_sent
        else:
            is_deletion = response.request.method == "DELETE"
            if may_have_landed and is_deletion and isinstance(failure, KeyNotFound):
                return response
            if not isinstance(failure, Unavailable):
                raise failure
            if not is_refused_by_follower(response, failure):
                if source.leads(base):
                    raise UnavailableAtLeader(failure.message)
                if not resend:
                    raise failure
                may_have_landed = True
        source.forget()
        pause = pauses.next_pause()
        if time.monotonic() + pause >= deadline:
            raise failure from None
        time.sleep(pause)
