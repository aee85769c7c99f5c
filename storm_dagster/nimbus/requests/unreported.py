"""What the leader did while Dagster was away, to be reported to it when it answers again (best effort)."""

from __future__ import annotations

import logging
import threading

from storm_dagster.model.dagster_names import SUBMIT_JOB
from storm_dagster.model.errors import Misconfigured, StormDagsterError, Unavailable
from storm_dagster.nimbus.dagster.client import DagsterClient
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.deeds import MOST_DEEDS, Deed, load_deeds, store_deeds

__all__ = ["Unreported"]

_log = logging.getLogger(__name__)


class Unreported:
    """A bounded memory of deeds, the oldest forgotten first. It stands in ZooKeeper: a new leader takes it over."""

    def __init__(self) -> None:
        self._deeds: list[Deed] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._deeds)

    def take_over(self, ctx: OperationsContext) -> None:
        """Begin as the leader: with what former leaders did not report."""
        with self._lock:
            self._deeds = list(load_deeds(ctx))

    def add(
        self,
        ctx: OperationsContext,
        partition: str,
        description: str,
        asset: tuple[str, ...] = ("storm", "active_topology"),
        *,
        gone: bool = False,
    ) -> None:
        """Remember a deed. ``gone``: the topology was removed, so that its partition key is to go."""
        with self._lock:
            self._deeds = [
                *self._deeds,
                Deed(asset=asset, partition=partition, description=description, gone=gone),
            ][-MOST_DEEDS:]
            self._store(ctx)

    def _store(self, ctx: OperationsContext) -> None:
        try:
            store_deeds(ctx, self._deeds)
        except StormDagsterError as error:
            _log.warning("what is to be reported to Dagster is kept in memory only: %s", error.message)

    def flush(self, ctx: OperationsContext, dagster: DagsterClient) -> int:
        """Report what is remembered, oldest first, until Dagster does not answer; how many were reported."""
        reported = 0
        done: set[int] = set()
        with self._lock:
            deeds = list(self._deeds)
        for deed in deeds:
            try:
                dagster.report(deed.asset, deed.partition, deed.description)
                reported += 1
                if deed.gone and _name_is_free(ctx, dagster, deed.partition):
                    dagster.drop_partition(deed.partition)
            except (Misconfigured, Unavailable):
                break
            except StormDagsterError as error:
                _log.warning("not reported to Dagster: %s (%s)", deed.description, error)
            done.add(id(deed))
        if done:
            with self._lock:
                self._deeds = [deed for deed in self._deeds if id(deed) not in done]
                self._store(ctx)
        return reported


def _name_is_free(ctx: OperationsContext, dagster: DagsterClient, name: str) -> bool:
    """Whether no topology of the name lives and none is being submitted: else its key must stay."""
    if ctx.cluster.load_view().topology_named(name) is not None:
        return False
    run = dagster.find_run("dagster/partition", name, job=SUBMIT_JOB)
    return run is None or run.finished
