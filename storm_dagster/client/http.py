"""The HTTP client of nimbus: finds the leader, waits for one with patience, turns responses into
typed errors.
"""

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.client.leader import SearchedLeader, call_leader
from storm_dagster.host.endpoints import ClusterFile, home_dir
from storm_dagster.model.conf import ClusterConf, seed_urls
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.security.settings import Security

_TIMEOUT_SECS = 30.0
_CONNECT_SECS = 2.0
_LAUNCH_MARGIN_SECS = 30.0
"""Time beyond ``dagster.launch.timeout.secs`` in which the leader certainly responds, seconds."""


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
        self._require = require
        self._terms: Mapping[str, str] = {}
        # Proxies of the environment are for the outside world, not for the cluster.
        plain = all(url.startswith("http://") for url in self._urls())
        options = (security or Security()).client_options(plain=plain)
        self._http = httpx.Client(
            timeout=httpx.Timeout(_TIMEOUT_SECS, connect=_CONNECT_SECS), **options
        )

        def on_wait(states: str) -> None:
            if waiting is not None:
                waiting(f"waiting up to {patience:g} s for a leading nimbus ({states})")

        self._leader = SearchedLeader(self._http, self._urls, thing=thing, on_wait=on_wait)

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

    def leader(self, *, deadline: float | None = None) -> str:
        """Base URL of the leader; waits for one, :class:`Unavailable` when the patience ends."""
        self._require_cluster()
        return self._leader.url(time.monotonic() + self._patience if deadline is None else deadline)

    def _require_cluster(self) -> None:
        if self._require is not None:
            self._require()
            self._require = None

    # -- calls -------------------------------------------------------------------------------------
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
        self._require_cluster()

        def send(base: str) -> httpx.Response:
            return self._http.request(
                method,
                base + path,
                json=json,
                content=content() if callable(content) else content,
                headers=terms,
                params=params,
                timeout=timeout,
            )

        return call_leader(
            self._leader, send, doing=f"{method} {path}", deadline=deadline, resend=repeat
        )

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
