"""Check of workers' events by the leader: each is about an asset that its component declares."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from storm_dagster.core.asset_declarations import (
    PREFIXES_KEY,
    DeclaredAssets,
    LimitedUser,
    decide_on_event,
    user_prefixes,
)
from storm_dagster.core.authorization import Caller, is_admin
from storm_dagster.core.event_log import EventSource
from storm_dagster.core.submission.conf import total_conf
from storm_dagster.http.authentication import groups_of
from storm_dagster.model.bounded_map import BoundedMap
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.names import code_key, conf_key
from storm_dagster.model.topology import decode_topology
from storm_dagster.model.view import TopologyView
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.time_cache_map import TimeCacheMap
from storm_dagster.operations.live.event_logs import EventReport

_log = logging.getLogger(__name__)

_MAX_CODES = 64
"""Codes of topologies whose declarations are kept in memory."""
_WARNING_SECS = 3600.0
"""Time for which the warning of an asset is not repeated."""
_MAX_WARNINGS = 50
"""Warnings of that time, of one topology."""
_MAX_TOPOLOGIES = 10_000
"""Topologies that get warnings in that time."""


@dataclass
class CheckedReports:
    """Events of a worker's batch, by the decision about them."""

    accepted: list[EventReport] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Event id -> reason."""
    warnings: dict[str, str] = field(default_factory=dict)
    """Event id of an accepted event -> warning."""


class EventAssets:
    """Decisions about the assets of workers' events; safe to share between threads.

    Declarations come from the stored code of the topology. It never changes, so that the newest
    ones are kept in memory.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._lock = Lock()
        """Guards the declarations."""
        self._declarations: BoundedMap[str, DeclaredAssets] = BoundedMap(_MAX_CODES)
        """Prefix of blob keys of a code -> its declarations, the last used one last."""
        self._warned: TimeCacheMap[str, set[tuple[str, ...]]] = TimeCacheMap(
            _WARNING_SECS, now=time.monotonic(), limit=_MAX_TOPOLOGIES
        )
        """Topology id -> (component, *key) of the warnings that were given."""
        self._logged: TimeCacheMap[str, bool] = TimeCacheMap(
            _WARNING_SECS, now=time.monotonic(), limit=_MAX_TOPOLOGIES
        )
        """Topology ids of the refusals that were logged."""
        nimbus.expiring.append(self._warned)
        nimbus.expiring.append(self._logged)

    def check(
        self, topology: TopologyView, source: EventSource, reports: Sequence[EventReport]
    ) -> CheckedReports:
        """Decide about each event of a batch.

        ``source`` is the destination of the topology's events, by its stored conf.
        :class:`Unavailable` if its declarations cannot be read now.
        """
        checked = CheckedReports()
        limited = self._limited_user(topology, source)
        codes = _Codes(self, topology)
        name = topology.base.name
        for report in reports:
            key = report.event.key
            declared = codes.declaring(report.component, key)
            decision = decide_on_event(declared, name, report.component, key, limited)
            event_id = report.event.id
            if decision.outcome == "refused":
                checked.refused[event_id] = decision.reason
                self._log_refusal(report, source, decision.reason)
                continue
            checked.accepted.append(report)
            if decision.outcome == "warned" and self._is_new(report):
                checked.warnings[event_id] = decision.reason
        return checked

    def _limited_user(self, topology: TopologyView, source: EventSource) -> LimitedUser | None:
        """The owner of the topology; ``None`` without an owner and for an administrator."""
        if not source.user:
            return None
        conf = self._nimbus.conf.values
        groups: frozenset[str] = frozenset()
        if conf["nimbus.admins.groups"]:
            groups = groups_of(source.user)
        if is_admin(Caller(source.user, groups=groups), conf):
            return None
        prefixes = user_prefixes(conf[PREFIXES_KEY], topology.base.name, source.user)
        return LimitedUser(source.user, prefixes)

    def _is_new(self, report: EventReport) -> bool:
        """True if the warning of an asset was not given lately."""
        earlier_warnings = self._warned.get(report.topology)
        if earlier_warnings is None:
            earlier_warnings = set()
            if not self._warned.put(report.topology, earlier_warnings):
                return False
        warning = (report.component or "", *report.event.key)
        if warning in earlier_warnings or len(earlier_warnings) >= _MAX_WARNINGS:
            return False
        earlier_warnings.add(warning)
        return True

    def _log_refusal(self, report: EventReport, source: EventSource, reason: str) -> None:
        """Log a refused event, once an hour for each topology.

        The error of the task is written by the worker, whose code may have reported on purpose.
        """
        if report.topology in self._logged or not self._logged.put(report.topology, True):
            return
        event = report.event
        _log.warning(
            "%s of user %r: the %s of %r is refused: %s",
            report.topology,
            source.user,
            event.kind,
            event.asset,
            reason,
        )

    def of_upgrade(self, topology: TopologyView) -> DeclaredAssets | None:
        """Declarations of the code to which a gray upgrade changes; ``None`` without one."""
        record = self._nimbus.cluster.read_upgrade(topology.id).record
        if record is None or not record.code_dir:
            return None
        return self.of_code(topology.id, record.code_dir)

    def of_code(self, topology_id: str, code_dir: str) -> DeclaredAssets:
        """Declarations of a stored code; :class:`Unavailable` if it cannot be read now."""
        with self._lock:
            declared = self._declarations.pop(code_dir, None)
            if declared is not None:
                # As the newest entry it is dropped last.
                self._declarations[code_dir] = declared
                return declared
        declared = self._read(topology_id, code_dir)
        with self._lock:
            self._declarations[code_dir] = declared
        return declared

    def _read(self, topology_id: str, code_dir: str) -> DeclaredAssets:
        blobs = self._nimbus.blobs
        try:
            spec = decode_topology(blobs.read(code_key(code_dir)))
            conf = json.loads(blobs.read(conf_key(code_dir)))
        except (StormDagsterError, ValueError) as error:
            raise Unavailable(
                f"the code of topology {topology_id} cannot be read by this nimbus, and with it "
                f"the assets that it declares ({error}): start the nimbus that holds its code"
            ) from None
        stored_conf = conf if isinstance(conf, Mapping) else {}
        return DeclaredAssets.of(spec, total_conf(self._nimbus.conf.values, stored_conf))


class _Codes:
    """Declarations of the codes that the workers of a topology run.

    During a gray upgrade they are two: workers of both report. The second one is read only for an
    event whose asset the first one does not declare.
    """

    def __init__(self, assets: EventAssets, topology: TopologyView) -> None:
        self._assets = assets
        self._topology = topology
        self._current = assets.of_code(topology.id, topology.code_dir)
        self._upgrade: DeclaredAssets | None = None
        self._is_upgrade_read = False

    def declaring(self, component: str | None, key: Sequence[str]) -> DeclaredAssets:
        """The declarations that name the asset; the current ones if none does."""
        if self._current.declares(component, key):
            return self._current
        if not self._is_upgrade_read:
            self._upgrade = self._assets.of_upgrade(self._topology)
            self._is_upgrade_read = True
        if self._upgrade is not None and self._upgrade.declares(component, key):
            return self._upgrade
        return self._current
