"""The nested attributes of :class:`StormTopologyComponent`, as `defs.yaml` holds them. Unknown fields are errors."""

from __future__ import annotations

import dagster as dg
from pydantic import ConfigDict, Field


class _Strict(dg.Model, dg.Resolvable):
    model_config = ConfigDict(extra="forbid")


class ScheduleAttributes(_Strict):
    """Schedule of a periodic action. Empty: never."""

    deploy: str | None = Field(
        default=None,
        description="Cron: bring about what is declared, as `deploy_NAME` does.",
        examples=["*/10 * * * *"],
    )
    rebalance: str | None = Field(
        default=None, description="Cron: rebalance the topology when it gains from it.", examples=["0 * * * *"]
    )
    timezone: str | None = Field(default=None, description="Time zone of both; empty: UTC.")


class TopologyAlerts(_Strict):
    """Limits beyond which a check fails. Empty: not looked at."""

    complete_ms: float | None = Field(
        default=None, gt=0, description="Highest mean complete latency of a spout, in milliseconds."
    )
    failed_ratio: float | None = Field(
        default=None, ge=0, le=1, description="Highest share of the spouts' tuples that may fail."
    )
    errors: int | None = Field(default=None, ge=0, description="Most errors that components may have reported.")


class GrayAttributes(_Strict):
    """Batches of a gray upgrade."""

    number: int = Field(default=1, ge=1, description="Workers in each batch.")
    component: str | None = Field(
        default=None, description="Workers that run tasks of this component come first, the others afterwards."
    )


class FreshnessAttributes(_Strict):
    """Limits of the check `fresh`: minutes since all tasks of the topology were last seen running."""

    warn_minutes: int = Field(default=10, ge=6, description="Then it warns.")
    fail_minutes: int = Field(default=20, ge=7, description="Then it fails.")
