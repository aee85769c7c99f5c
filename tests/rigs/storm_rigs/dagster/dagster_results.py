"""Results of ticks and runs in the form in which tests compare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

AssetEvent = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation


@dataclass(frozen=True)
class SensorTick:
    """Result of one tick of a sensor."""

    cursor: str
    """Cursor of the next tick: the former one if this tick stored none."""
    skipped: bool
    """Whether the sensor returned no result, only a reason."""
    skip_message: str
    """Reason for the lack of runs; empty if there is none."""
    run_requests: list[dg.RunRequest] = field(default_factory=list)
    partition_requests: list[dg.AddDynamicPartitionsRequest | dg.DeleteDynamicPartitionsRequest] = (
        field(default_factory=list)
    )
    asset_events: list[AssetEvent] = field(default_factory=list)

    @property
    def observations(self) -> list[dg.AssetObservation]:
        """Observations among the events."""
        return [event for event in self.asset_events if isinstance(event, dg.AssetObservation)]

    @property
    def checks(self) -> list[dg.AssetCheckEvaluation]:
        """Evaluations of checks among the events."""
        return [event for event in self.asset_events if isinstance(event, dg.AssetCheckEvaluation)]


def tick_sensor(
    sensor: dg.SensorDefinition | str,
    instance: dg.DagsterInstance,
    cursor: str | None = None,
    defs: dg.Definitions | None = None,
) -> SensorTick:
    """Evaluate a sensor, or the one of that name in ``defs``, with resources of its own, as a code
    server does.
    """
    if isinstance(sensor, str):
        assert defs is not None, f"definitions of the sensor {sensor!r} are needed"
        sensor = defs.resolve_sensor_def(sensor)
    resources = dict(defs.resources or {}) if defs is not None else None
    with dg.build_sensor_context(
        instance=instance, cursor=cursor, definitions=defs, resources=resources
    ) as context:
        found = sensor(context)
    if isinstance(found, dg.SkipReason):
        return SensorTick(cursor or "", True, str(found.skip_message))
    assert isinstance(found, dg.SensorResult), f"{sensor.name} returned {found!r}"
    return SensorTick(
        cursor=found.cursor if found.cursor is not None else cursor or "",
        skipped=False,
        skip_message=str(found.skip_reason.skip_message) if found.skip_reason else "",
        run_requests=list(found.run_requests or ()),
        partition_requests=list(found.dynamic_partitions_requests or ()),
        asset_events=list(found.asset_events),
    )


def plain(metadata: Mapping[str, dg.MetadataValue]) -> dict[str, Any]:
    """Metadata as plain values; the rows of tables."""
    return {
        key: value.records if isinstance(value, dg.TableMetadataValue) else value.value
        for key, value in metadata.items()
    }


def shown(event: AssetEvent | None) -> dict[str, Any]:
    """Plain metadata of an event."""
    assert event is not None, "there is no such event"
    return plain(event.metadata)


def materialized(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, Any]:
    """Plain metadata of the run's materialization of the asset whose key ends with that part."""
    for event in result.get_asset_materialization_events():
        if event.asset_key is not None and event.asset_key.path[-1] == asset:
            return shown(event.step_materialization_data.materialization)
    raise AssertionError(f"{asset} was not materialized")


def step_failure(result: dg.ExecuteInProcessResult) -> tuple[str, str]:
    """(type, message) of the typed error with which a step failed."""
    for event in result.all_events:
        if event.event_type_value == "STEP_FAILURE":
            failure = event.step_failure_data.user_failure_data
            assert failure is not None, f"not a typed error: {event.step_failure_data}"
            found = plain(failure.metadata)
            return found["error_type"], found["message"]
    raise AssertionError("no step failed")


def run_config(request: dg.RunRequest, op: str) -> dict[str, Any]:
    """Config of an op in the run that a sensor or schedule asks for."""
    ops: Any = request.run_config["ops"]
    return ops[op]["config"]


def text_of_cause(caught: BaseException, *kinds: type[Exception]) -> str:
    """Text of the error of a kind that Dagster's error is based on.

    The class of Dagster's own error differs from release to release.
    """
    error: BaseException | None = caught
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__ or error.__context__
    assert error is not None, f"no {kinds} is behind {caught!r}"
    return str(error)
