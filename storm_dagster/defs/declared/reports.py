"""Events of a declared topology as Dagster's, and their definitions in the code location.

An event is reported by a component and pulled by `topology_events_sensor`. The check `reports` says
which of them have an asset, partition or check that the location does not define, and how many
wait.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal

import dagster as dg

from storm_dagster.defs.declared.declaration import DATA_VERSION_TAG
from storm_dagster.model.amounts import utc_text
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.event_log import LATE_SECS, EventLogSummary

REPORTS_CHECK = "reports"
"""Check of the events that the components of a topology report."""
EVENT_ID = "storm/event"
"""Metadata key: id of the event; a repeated event has the same."""
_USER_VERSION_TAG = "dagster/data_version_is_user_provided"
_UNDEFINED = "undefined"
"""Metadata key of the check: texts of undefined assets, partitions and checks."""

AssetEvent = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation
EventKind = Literal["materialization", "observation", "check"]


def asset_event(event: DagsterEvent, topology_id: str) -> AssetEvent:
    """The event in Dagster's form, with its origin among the metadata."""
    key = dg.AssetKey(list(event.key))
    metadata = {**event.metadata, "storm/topology": topology_id, EVENT_ID: event.id}
    if event.kind == "check":
        return dg.AssetCheckEvaluation(
            asset_key=key,
            check_name=str(event.check),
            passed=bool(event.passed),
            metadata=metadata,
            severity=dg.AssetCheckSeverity(event.severity),
            description=event.description,
        )
    tags: dict[str, str] = {}
    if event.data_version is not None:
        tags = {DATA_VERSION_TAG: event.data_version, _USER_VERSION_TAG: "true"}
    fields: dict[str, Any] = {
        "asset_key": key,
        "partition": event.partition,
        "description": event.description,
        "metadata": metadata,
        "tags": tags,
    }
    if event.kind == "materialization":
        return dg.AssetMaterialization(**fields)
    return dg.AssetObservation(**fields)


@dataclass(frozen=True)
class ReportedPart:
    """Part of a location that an event needs: asset, partition, check."""

    kind: EventKind
    asset: str
    """Key of the asset, as people write it."""
    partition: str | None = None
    check: str | None = None

    @staticmethod
    def of(event: DagsterEvent) -> "ReportedPart":
        """The part that an event needs."""
        return ReportedPart(event.kind, event.asset, event.partition, event.check)

    @property
    def key(self) -> tuple[str, str | None, bool]:
        """Asset, check, and if there is a partition: a later part with the key replaces it."""
        return (self.asset, self.check, self.partition is not None)


class DefinedAssets:
    """Assets, partitions and checks that a code location defines.

    Without ``repository`` (a tick outside of a code location) everything counts as defined.
    """

    def __init__(
        self, repository: dg.RepositoryDefinition | None, instance: dg.DagsterInstance
    ) -> None:
        self._repository = repository
        self._instance = instance

    @cached_property
    def _partitions(self) -> dict[str, dg.PartitionsDefinition | None]:
        """Asset -> its partitions, of each asset that is defined."""
        repository = self._repository
        partitions: dict[str, dg.PartitionsDefinition | None] = {}
        if repository is None:
            return partitions
        for key, definition in repository.assets_defs_by_key.items():
            partitions[key.to_user_string()] = definition.get_asset_spec(key).partitions_def
        for key, source in repository.source_assets_by_key.items():
            partitions[key.to_user_string()] = source.partitions_def
        return partitions

    @cached_property
    def _dependencies(self) -> set[str]:
        """Assets that the defined ones depend on: conditions below them start by their events."""
        if self._repository is None:
            return set()
        dependencies: set[str] = set()
        for key, definition in self._repository.assets_defs_by_key.items():
            deps = definition.get_asset_spec(key).deps
            dependencies.update(dep.asset_key.to_user_string() for dep in deps)
        return dependencies

    @cached_property
    def _checks(self) -> set[tuple[str, str]]:
        """Asset and name of each check."""
        if self._repository is None:
            return set()
        keys = self._repository.asset_checks_defs_by_key
        return {(key.asset_key.to_user_string(), key.name) for key in keys}

    def problem(self, part: ReportedPart) -> str | None:
        """Reason why no asset or check of the location shows the event; ``None`` if one does.

        The reason names the nearest known key.
        """
        if self._repository is None:
            return None
        asset = part.asset
        is_defined = asset in self._partitions
        if not is_defined and asset not in self._dependencies:
            nearest = _nearest(asset, self._partitions)
            return (
                f"asset {asset!r} is not defined in the code location that declared the topology"
                f"{nearest}: define it there, or report the key of one that is"
            )
        if part.check is not None and (asset, part.check) not in self._checks:
            names = [name for checked_asset, name in self._checks if checked_asset == asset]
            nearest = _nearest(part.check, names)
            return (
                f"check {part.check!r} of asset {asset!r} is not defined in the code location "
                f"that declared the topology{nearest}: add it as an AssetCheckSpec, or report the "
                "name of one that is"
            )
        # Of an asset that is only a dependency no partitions are known.
        return self._partition_problem(part) if is_defined else None

    def _partition_problem(self, part: ReportedPart) -> str | None:
        """Reason why the asset does not have the partition of the event."""
        partitions = self._partitions[part.asset]
        key = part.partition
        if key is None:
            if partitions is None or part.kind != "materialization":
                return None
            return (
                f"asset {part.asset!r} is partitioned, and its materialization names no "
                "partition: report it with partition="
            )
        if partitions is None:
            return (
                f"asset {part.asset!r} is not partitioned, and its {part.kind} names the "
                f"partition {key!r}: report it without a partition"
            )
        if self._has_partition(partitions, key):
            return None
        return (
            f"asset {part.asset!r} has no partition {key!r}{_example(partitions)}: report one of "
            "its keys"
        )

    def _has_partition(self, partitions: dg.PartitionsDefinition, key: str) -> bool:
        """True if the partition exists, or will at a later time."""
        if isinstance(partitions, dg.DynamicPartitionsDefinition) and partitions.name:
            return self._instance.has_dynamic_partition(partitions.name, key)
        try:
            if partitions.has_partition_key(key):
                return True
            is_window = isinstance(partitions, dg.TimeWindowPartitionsDefinition)
            return is_window and _is_future(partitions, key)
        except Exception:
            # Some partitions are known to a run only; Dagster stores the event all the same.
            return True


def _is_future(partitions: dg.TimeWindowPartitionsDefinition, key: str) -> bool:
    """True for the key of a window that has not ended yet: a bolt may report it before."""
    newest = partitions.get_last_partition_key()
    try:
        begin = datetime.strptime(key, partitions.fmt)
    except ValueError:
        return False
    if partitions.end is not None:
        return False
    return newest is None or begin > datetime.strptime(newest, partitions.fmt)


def _example(partitions: dg.PartitionsDefinition) -> str:
    """A key of the partitions, in words; empty without one."""
    if isinstance(partitions, dg.DynamicPartitionsDefinition):
        return f" (a dynamic partition of {partitions.name!r})"
    try:
        newest = partitions.get_last_partition_key()
    except Exception:
        newest = None
    return "" if newest is None else f" (its newest key is {newest!r})"


def _nearest(name: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    """The nearest of the names, in words; empty without one that is near."""
    nearest = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (the nearest is {nearest[0]!r})" if nearest else ""


def reports_result(
    log: EventLogSummary | None, undefined: Sequence[str], now: float
) -> dg.AssetCheckResult:
    """Result of the check `reports`.

    ``log`` is the event log of the topology's name, ``undefined`` are the reasons of the events
    that nothing in the location shows. Late events are a warning: Dagster gets them later.
    """
    waiting = 0 if log is None else log.waiting
    sentences = list(undefined)
    is_late = log is not None and log.since is not None and now - log.since > LATE_SECS
    if log is not None and log.since is not None and waiting:
        remedy = ""
        if is_late:
            remedy = ": start topology_events_sensor, and look at its last ticks"
        sentences.append(f"{waiting} events wait since {utc_text(log.since)}{remedy}")
    dropped = 0 if log is None else log.dropped
    if dropped:
        sentences.append(f"{dropped} events were dropped, because they waited for too long")
    severity = dg.AssetCheckSeverity.ERROR if undefined else dg.AssetCheckSeverity.WARN
    return dg.AssetCheckResult(
        passed=not undefined and not is_late,
        description="; ".join(sentences) or "no event waits, and each has its asset",
        severity=severity,
        metadata={
            "waiting": waiting,
            "dropped": dropped,
            _UNDEFINED: dg.MetadataValue.json(list(undefined)),
        },
    )


def _newest_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> dg.AssetCheckEvaluation | None:
    """The newest evaluation of the check; ``None`` without one."""
    # A run that evaluates the check is in the history before its result is.
    history = instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
    for record in history:
        if isinstance(record.evaluation, dg.AssetCheckEvaluation):
            return record.evaluation
    return None


def stored_undefined(instance: dg.DagsterInstance, key: dg.AssetKey) -> list[str]:
    """Reasons in the newest evaluation of the check; empty without one."""
    evaluation = _newest_evaluation(instance, dg.AssetCheckKey(key, REPORTS_CHECK))
    if evaluation is None:
        return []
    value = evaluation.metadata.get(_UNDEFINED)
    texts = value.value if value is not None else []
    if isinstance(texts, str):
        texts = json.loads(texts)
    return [str(text) for text in texts] if isinstance(texts, list) else []
