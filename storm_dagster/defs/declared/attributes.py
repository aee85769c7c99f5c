"""The nested attributes of :class:`StormTopologyComponent`, as `defs.yaml` holds them. Unknown fields are errors."""

from __future__ import annotations

import dagster as dg
from pydantic import ConfigDict

from storm_dagster.defs.keys import described


class _Strict(dg.Model, dg.Resolvable):
    model_config = ConfigDict(extra="forbid")


class ScheduleAttributes(_Strict):
    """Schedule of a periodic action. Empty: never."""

    deploy: str | None = described("schedule.deploy", default=None)
    rebalance: str | None = described("schedule.rebalance", default=None)
    timezone: str | None = described("schedule.timezone", default=None)


class TopologyAlerts(_Strict):
    """Limits beyond which a check fails. Empty: not looked at."""

    complete_ms: float | None = described("alerts.complete_ms", default=None, gt=0)
    failed_ratio: float | None = described("alerts.failed_ratio", default=None, ge=0, le=1)
    errors: int | None = described("alerts.errors", default=None, ge=0)


class GrayAttributes(_Strict):
    """Batches of a gray upgrade."""

    number: int = described("gray.number", default=1, ge=1)
    component: str | None = described("gray.component", default=None)


class FreshnessAttributes(_Strict):
    """Limits of the check `fresh`: minutes since all tasks of the topology were last seen running."""

    warn_minutes: int = described("freshness.warn_minutes", default=10, ge=6)
    fail_minutes: int = described("freshness.fail_minutes", default=20, ge=7)
