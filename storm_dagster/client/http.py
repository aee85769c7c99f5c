"""The HTTP client of nimbus: finds the leader, waits for one with patience, turns responses into
typed errors.
"""

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.host.endpoints import ClusterFile, home_dir
from storm_dagster.model.conf import ClusterConf, seed_urls
from storm_dagster.model.errors import (
    InvalidRequest,
    StormDagsterError,
    Unavailable,
    error_from_document,
)
from storm_dagster.security.settings import Security

_PAUSE = 0.2
_TIMEOUT_SECS = 30.0
_CONNECT_SECS = 2.0
_LAUNCH_MARGIN_SECS = 30.0
"""Time beyond ``dagster.launch.timeout.secs`` in which the leader certainly responds, seconds."""
_QUIET_SECS = 3.0
_NO_LEADER, _NO_ZOOKEEPER = "no leader", "no connection to ZooKeeper"


def _plain(status: object) -> str:
    """The state of a nimbus that does not lead; one that names a leader which is not there has none
    either.
    """
    return _NO_ZOOKEEPER if status == _NO_ZOOKEEPER else _NO_LEADER


def _remedy(seen: str) -> str:
    if _NO_ZOOKEEPER in seen:
        return (
            "ZooKeeper does not answer; topologies pause meanwhile and lose nothing. Start ZooKeeper again "
            "(`storm-dagster dev` does so by itself), or see `storm-dagster doctor`"
        )
    if _NO_LEADER in seen:
        return "one will lead in a few seconds, try again; `storm-dagster doctor` names the problem"
    if "Timeout" in seen:
        return "it is there and does not answer, because it is frozen or overloaded: see `storm-dagster status`"
    return "start it with `storm-dagster dev`, or name it with --home, --conf-dir or -c nimbus.seeds=[host:port]"


class UnavailableAtLeader(Unavailable):
    """Response of a leader that is there and lacks something itself, such as Dagster."""


class NimbusClient(AbstractContextManager["NimbusClient"]):
    """Calls of nimbus's HTTP service; safe to share between threads.

    ``urls`` is called whenever the leader is searched, because addresses change when a local
    cluster is started again. ``patience`` is how long a call waits for a leader, in seconds: a
    restarting or changing leader is not an error before that. Each single request is bounded by its
    own: 30 s, and ``launch_secs`` + 30 s if it launches a Dagster run (``launch_secs`` is nimbus's
    ``dagster.launch.timeout.secs``).
    """

    def __init__(
        self,
        urls: Callable[[], list[str]] | list[str],
        *,
        patience: float = 30.0,
        thing: str = "the cluster",
        security: Security | None = None,
        waiting: Callable[[str], None] | None = None,
        require: Callable[[], None] | None = None,
        launch_secs: float = 60.0,
    ) -> None:
        """``waiting`` is called once with what a call waits for, after three seconds.

        ``require`` is called before the first search for a leader, and raises when there is no
        cluster to wait for.
        """
        self._urls: Callable[[], list[str]] = urls if callable(urls) else lambda: urls
        self._patience = patience
        self.launch_secs = launch_secs
        self._waiting = waiting
        self._require = require
        self._thing = thing
        self._leader: str | None = None
        self._terms: Mapping[str, str] = {}
        # Proxies of the environment are for the outside world, not for the cluster.
        plain = all(url.startswith("http://") for url in self._urls())
        options = (security or Security()).client_options(plain=plain)
        self._http = httpx.Client(
            timeout=httpx.Timeout(_TIMEOUT_SECS, connect=_CONNECT_SECS), **options
        )

    @staticmethod
    def of_cluster(
        conf: ClusterConf, home: Path | None = None, *, conf_dir: Path | None = None, **options: Any
    ) -> "NimbusClient":
        """The client of the cluster in ``home`` (``cluster.json``), else of ``nimbus.seeds`` of
        ``conf``.

        With ``conf_dir`` only the seeds count. ``nimbus.seeds`` given with ``-c`` wins over both.
        ``options``: ``patience``, ``waiting`` and ``require``.
        """
        folder = home_dir(home)
        explicit = conf.origins.get("nimbus.seeds") == "-c"

        def urls() -> list[str]:
            cluster = None if conf_dir is not None or explicit else ClusterFile.read(folder)
            if cluster is not None and cluster.nimbuses:
                return [nimbus.http for nimbus in cluster.nimbuses]
            return seed_urls(conf)

        return NimbusClient(
            urls,
            thing=f"the cluster of {conf_dir or folder}",
            security=Security.of(conf),
            launch_secs=conf["dagster.launch.timeout.secs"],
            **options,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def accepting_fewer(self, allow_degraded: bool = True) -> "NimbusClient":
        """The client of somebody who ``allow_degraded``: fewer copies do when too few nimbuses are
        alive.
        """
        other = copy.copy(self)
        other._terms = {"X-Storm-Allow-Degraded": "true"} if allow_degraded else {}
        return other

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the leader --------------------------------------------------------------------------------
    def _find_leader(self) -> tuple[str | None, str]:
        """(leader's URL, states of the others without one)."""
        seen: list[str] = []
        for url in self._urls():
            try:
                document = self._http.get(f"{url}/healthz", timeout=3.0).json()
            except (httpx.HTTPError, ValueError) as error:
                seen.append(f"{url}: {type(error).__name__}")
                continue
            if not isinstance(document, dict):
                seen.append(f"{url}: not a nimbus")
                continue
            if document.get("leader") is True:
                return url, ""
            named = document.get("leader_http")
            if isinstance(named, str) and named.rstrip("/") != url:
                with suppress(httpx.HTTPError, ValueError, AttributeError):
                    if (
                        self._http.get(f"{named.rstrip('/')}/healthz", timeout=3.0)
                        .json()
                        .get("leader")
                        is True
                    ):
                        return named.rstrip("/"), ""
            seen.append(f"{url}: {_plain(document.get('status'))}")
        return None, "; ".join(seen) or "no nimbus is known"

    def leader(self, *, deadline: float | None = None) -> str:
        """Base URL of the leader; waits for one, :class:`Unavailable` when the patience ends."""
        if self._leader is not None:
            return self._leader
        if self._require is not None:
            self._require()
            self._require = None
        began = time.monotonic()
        deadline = began + self._patience if deadline is None else deadline
        waiting = self._waiting
        while True:
            found, seen = self._find_leader()
            if found is not None:
                self._leader = found
                return found
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"{self._thing} has no leading nimbus in reach ({seen}): {_remedy(seen)}"
                )
            if waiting is not None and time.monotonic() - began >= _QUIET_SECS:
                waiting(f"waiting up to {self._patience:g} s for a leading nimbus ({seen})")
                waiting = None
            time.sleep(_PAUSE)

    # -- calls -------------------------------------------------------------------------------------
    @staticmethod
    def _raise(answer: httpx.Response) -> None:
        if answer.status_code < 400:
            return
        try:
            raise error_from_document(answer.json())
        except ValueError:
            text = answer.text.strip()[:200]
            kind = Unavailable if answer.status_code >= 500 else InvalidRequest
            raise kind(
                f"{answer.request.method} {answer.request.url} answered {answer.status_code}: {text or 'no text'}"
            ) from None

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: Callable[[], Any] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        repeat: bool = True,
        launches: bool = False,
    ) -> httpx.Response:
        """One call of the leader; typed errors for answers from 400 up.

        A call that ``launches`` a Dagster run is waited for as long as nimbus waits for Dagster,
        and longer.

        ``content`` may be a function that makes the body for each try. A call that finds no leader,
        or a follower, is made again until the patience ends; one whose connection broke only with
        ``repeat`` (it may have had its effect).
        """
        deadline = time.monotonic() + self._patience
        limit = self.launch_secs + _LAUNCH_MARGIN_SECS if launches else _TIMEOUT_SECS
        timeout = httpx.Timeout(limit, connect=_CONNECT_SECS)
        terms = {**self._terms, **(headers or {})}
        while True:
            base = self.leader(deadline=deadline)
            try:
                body = content() if callable(content) else content
                answer = self._http.request(
                    method,
                    base + path,
                    json=json,
                    content=body,
                    headers=terms,
                    params=params,
                    timeout=timeout,
                )
                self._raise(answer)
                return answer
            except httpx.ConnectError as error:
                failure: StormDagsterError = Unavailable(
                    f"{base} does not answer ({error}): is it running?"
                )
            except httpx.HTTPError as error:
                failure = Unavailable(
                    f"{method} {base}{path} broke off ({type(error).__name__}: {error})"
                )
                if not repeat:
                    raise failure from None
            except Unavailable as error:
                # Only a change of leader is waited for; an Unavailable of the leader itself is the
                # answer.
                if self._find_leader()[0] == base:
                    raise UnavailableAtLeader(error.message) from error
                failure = error
            self._leader = None
            if time.monotonic() >= deadline:
                raise failure from None
            time.sleep(_PAUSE)

    def get(self, path: str, **params: Any) -> Any:
        """The JSON document at ``path``."""
        return self.request("GET", path, params=params or None).json()

    def post(
        self, path: str, document: Any = None, *, repeat: bool = True, launches: bool = False
    ) -> Any:
        """The JSON answer to a POST of ``document``; ``repeat`` and ``launches`` are those of
        :meth:`request`.
        """
        body = {} if document is None else document
        return self.request("POST", path, json=body, repeat=repeat, launches=launches).json()

    def exists(self, path: str) -> bool:
        """Whether a HEAD of ``path`` answers 200; other errors than 404 are raised."""
        try:
            self.request("HEAD", path)
        except Unavailable:
            raise
        except StormDagsterError:
            return False
        return True
