"""HTTP client of nimbus, which finds the leader and raises typed errors."""

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
"""Maximum time of a single request that launches no run."""
_CONNECT_SECS = 2.0
"""Maximum time until a connection is made."""
_LAUNCH_MARGIN_SECS = 30.0
"""Time beyond ``dagster.launch.timeout.secs`` in which the leader certainly responds, seconds."""


class NimbusClient(AbstractContextManager["NimbusClient"]):
    """Calls of nimbus's HTTP service; safe to share between threads.

    ``urls`` is called whenever the leader is searched, because addresses change when a local
    cluster restarts. ``patience`` is the time that a call waits for a leader, in seconds: a
    restarting or changing leader is not an error before that. Each single request has its own
    limit: 30 s, and ``launch_secs`` + 30 s if it launches a Dagster run (``launch_secs`` is
    nimbus's ``dagster.launch.timeout.secs``).
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
        """``waiting`` is called once with the reason of a wait, after three seconds.

        ``require`` is called before the first search for a leader, and raises if no cluster exists
        to wait for. ``thing`` is the cluster in errors.
        """
        self._urls: Callable[[], list[str]] = urls if callable(urls) else lambda: urls
        self._patience = patience
        self.launch_secs = launch_secs
        self._require = require
        """Called by the next call, and then ``None``: the cluster exists."""
        self._headers: Mapping[str, str] = {}
        """Headers of every request of this client."""
        # Authorities are loaded only for https, which takes 50 ms. A restart of the cluster changes
        # its addresses, but not their scheme.
        uses_only_http = all(url.startswith("http://") for url in self._urls())
        options = (security or Security()).client_options(plain=uses_only_http)
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
        """Client of the cluster in ``home``, or of the cluster that ``conf`` names.

        The addresses are those of ``cluster.json`` in ``home``, else ``nimbus.seeds`` of ``conf``.
        With ``conf_dir`` only the seeds count. ``nimbus.seeds`` given with ``-c`` takes precedence
        over both. ``options``: ``patience``, ``waiting`` and ``require``.
        """
        folder = home_dir(home)
        # Seeds that the caller names in this call are the cluster that it means.
        only_seeds = conf_dir is not None or conf.origins.get("nimbus.seeds") == "-c"

        def urls() -> list[str]:
            if not only_seeds:
                cluster = ClusterFile.read(folder)
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
        """Copy of the client that accepts fewer copies while too few nimbuses are alive.

        Without ``allow_degraded`` it does not accept them.
        """
        client = copy.copy(self)
        client._headers = {"X-Storm-Allow-Degraded": "true"} if allow_degraded else {}
        return client

    def __exit__(self, *_: object) -> None:
        self.close()

    def leader(self, *, deadline: float | None = None) -> str:
        """Wait for a leader and return its base URL.

        :class:`Unavailable` at the deadline (``time.monotonic()``), by default when the patience
        ends.
        """
        self._require_cluster()
        if deadline is None:
            deadline = time.monotonic() + self._patience
        return self._leader.url(deadline)

    def _require_cluster(self) -> None:
        """Raise the error of ``require``; no effect after its first success."""
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
        """Call the leader, and return its response; typed errors for a status from 400 up.

        A call that ``launches`` a Dagster run waits longer than nimbus waits for Dagster.
        ``content`` may be a function that makes the body for each try. A call that finds no leader,
        or a follower, is repeated until the patience ends. A call whose connection broke may have
        had its effect: it is repeated only with ``repeat``. :class:`Unavailable` without a response
        in that time.
        """
        deadline = time.monotonic() + self._patience
        limit = self.launch_secs + _LAUNCH_MARGIN_SECS if launches else _TIMEOUT_SECS
        timeout = httpx.Timeout(limit, connect=_CONNECT_SECS)
        all_headers = {**self._headers, **(headers or {})}
        self._require_cluster()

        def send(base: str) -> httpx.Response:
            return self._http.request(
                method,
                base + path,
                json=json,
                content=content() if callable(content) else content,
                headers=all_headers,
                params=params,
                timeout=timeout,
            )

        return call_leader(
            self._leader, send, doing=f"{method} {path}", deadline=deadline, resend=repeat
        )

    def get(self, path: str, **params: Any) -> Any:
        """Return the JSON document at ``path``."""
        return self.request("GET", path, params=params or None).json()

    def post(
        self, path: str, document: Any = None, *, repeat: bool = True, launches: bool = False
    ) -> Any:
        """Post a document and return the JSON response.

        ``repeat`` and ``launches`` are those of :meth:`request`.
        """
        body = {} if document is None else document
        return self.request("POST", path, json=body, repeat=repeat, launches=launches).json()

    def exists(self, path: str) -> bool:
        """True if ``path`` exists, by a HEAD request.

        False for every error but :class:`Unavailable`, which is raised.
        """
        try:
            self.request("HEAD", path)
        except Unavailable:
            raise
        except StormDagsterError:
            return False
        return True
