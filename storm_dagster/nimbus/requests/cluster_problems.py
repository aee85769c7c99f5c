"""Document of ``GET /v1/problems``: everything that is wrong, from one view of the cluster.

No topology master is asked: the answer does not depend on the processes that have problems.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from storm_dagster.core.host_problems import (
    ClusterProblem,
    nimbus_problems,
    supervisor_problems,
)
from storm_dagster.core.snapshot.statuses import down_tasks
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.requests import parse_number
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.cluster_rows import read_peer_health
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.operations.read import status
from storm_dagster.operations.read.explaining import problems, slow_call_problems, state_problems
from storm_dagster.security.settings import Security

_LIMIT = 50
"""Topologies with problems in a page by default."""
_MAX_LIMIT = 500
_MAX_START = 10**9
"""Highest number of a topology at which a page may begin."""
_REASONS_SECS = 2.0
"""Time for the reasons why tasks do not run, and for the reads of other topologies. A page is also
complete without them: it names the parts that it skipped.
"""
_HEALTH_SECS = 1.0
"""Longest wait for the other nimbuses, which are asked at the same time."""


class ClusterProblems:
    """Reader of the problems of one cluster."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    def document(self, limit: str | None = None, after: str | None = None) -> dict[str, Any]:
        """A page: problems of the cluster and its hosts, and of up to ``limit`` topologies.

        Topologies whose tasks do not run come first, then the others, each by name. ``after`` is
        ``next`` of the page before; later pages have topologies only. ``more`` is the number of
        topologies with problems on later pages, as far as they are known; ``skipped`` has a
        sentence for each thing that was left out.
        """
        size = _LIMIT
        if limit is not None:
            size = parse_number("limit", limit, lowest=1, highest=_MAX_LIMIT)
        start = 0 if after is None else parse_number("after", after, highest=_MAX_START)
        view = self._reader.view()
        rows: list[ClusterProblem] = []
        skipped: list[str] = []
        if start == 0:
            rows += supervisor_problems(view.supervisors)
            nimbuses = self._nimbuses(skipped)
            rows += nimbus_problems(nimbuses)
        search = _TopologySearch(self._nimbus, self._reader, view)
        topology_rows, following, more = search.page(start, size)
        rows += topology_rows
        skipped += search.skipped
        cluster = self._reader.cluster()
        return {
            "now_secs": time.time(),
            "supervisors": len(view.supervisors),
            "topologies": len(view.topologies),
            "healer": cluster["healer"],
            "alarm": cluster["alarm"],
            "healing": cluster["healing"],
            "corrupt": cluster["corrupt"],
            "events": cluster["events"],
            "problems": [row.to_document() for row in rows],
            "next": following,
            "more": more,
            "skipped": skipped,
        }

    def _nimbuses(self, skipped: list[str]) -> list[Mapping[str, Any]]:
        """Disk and clock of each nimbus; a nimbus that does not answer is named."""
        identity = self._nimbus.identity
        own = {**self._reader.health(), "host": identity.host, "clock_ahead_secs": 0.0}
        rows: list[Mapping[str, Any]] = [own]
        peers = self._nimbus.peers()
        if not peers:
            return rows
        options = Security.of(self._nimbus.conf).client_options()
        with (
            httpx.Client(timeout=_HEALTH_SECS, **options) as http,
            ThreadPoolExecutor(len(peers)) as pool,
        ):
            answers = pool.map(lambda peer: read_peer_health(http, peer.http), peers)
            for peer, answer in zip(peers, answers, strict=True):
                if answer is None:
                    skipped.append(f"nimbus {peer.address}, which does not answer")
                else:
                    host = peer.address.rpartition(":")[0]
                    rows.append({**answer, "address": peer.address, "host": host})
        return rows


class _TopologySearch:
    """Search for the problems of topologies, within a time."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader, view: ClusterView) -> None:
        self._nimbus = nimbus
        self._reader = reader
        self._view = view
        self._now_secs = int(time.time())
        self._ends_at = time.monotonic() + _REASONS_SECS
        self.skipped: list[str] = []
        self._unread_topologies = 0
        """Number of topologies of the page that were not read, since the time was over."""

    def page(self, start: int, size: int) -> tuple[list[ClusterProblem], str | None, int]:
        """Problems of ``size`` topologies, the begin of the next page, and a number of topologies.

        The number is that of the topologies on later pages whose tasks do not run. Of a topology
        whose tasks all run, it is not known whether it has a problem before it is read.
        """
        launch_secs = float(self._nimbus.conf["nimbus.task.launch.secs"])
        down_of: dict[str, list[int]] = {}
        for topology in self._view.topologies.values():
            down_of[topology.id] = down_tasks(self._view, topology, self._now_secs, launch_secs)

        def order(topology: TopologyView) -> tuple[bool, str]:
            return not down_of[topology.id], topology.base.name

        topologies = sorted(self._view.topologies.values(), key=order)
        rows: list[ClusterProblem] = []
        topologies_with_problems = 0
        position = start
        for topology in topologies[start:]:
            if topologies_with_problems == size:
                break
            position += 1
            own_rows = list(self._rows_of(topology, down_of[topology.id]))
            topologies_with_problems += bool(own_rows)
            rows += own_rows
        if self._unread_topologies:
            self.skipped.append(
                f"state and slow calls of {self._unread_topologies} topologies whose tasks run"
                " (storm-dagster show NAME)"
            )
        more = sum(1 for topology in topologies[position:] if down_of[topology.id])
        return rows, str(position) if position < len(topologies) else None, more

    def _rows_of(self, topology: TopologyView, down: list[int]) -> Iterator[ClusterProblem]:
        """Problems of one topology."""
        name = topology.base.name
        is_over = time.monotonic() > self._ends_at
        if down and is_over:
            sentences = [f"{len(down)} tasks do not run"]
        elif down:
            sentences = [*self._reasons(topology, down), *self._state_and_call_problems(topology)]
        elif is_over:
            self._unread_topologies += 1
            return
        else:
            sentences = self._state_and_call_problems(topology)
        for sentence in sentences:
            text = f"topology {name}: {sentence}"
            yield ClusterProblem("warning", f"topology {name}", text, f"storm-dagster show {name}")

    def _reasons(self, topology: TopologyView, down: list[int]) -> list[str]:
        """Reasons why tasks do not run."""
        try:
            runnable = self._reader.runnable(topology.id)
            reasons = problems(self._view, topology, runnable, down)
        except StormDagsterError as error:
            return [f"{len(down)} tasks do not run, and the reason is not known: {error.message}"]
        return reasons or [f"{len(down)} tasks do not run"]

    def _state_and_call_problems(self, topology: TopologyView) -> list[str]:
        """Sentences about the place of its state, and about slow calls."""
        try:
            context = self._nimbus.operations(epoch=-1)
            errors = status.errors_of(context, topology.id)
            return [
                *state_problems(self._nimbus.cluster, topology),
                *slow_call_problems(errors, self._now_secs),
            ]
        except StormDagsterError as error:
            return [f"its errors cannot be read: {error.message}"]
