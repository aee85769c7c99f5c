"""Settings of the runs of a declared topology: ``op`` and ``job_tags`` of the YAML.

Runs are what an operator of a shared instance limits and places: by a pool, by a retry policy, and
by tags that a run launcher reads, such as ``dagster-k8s/config`` and ``ecs/cpu``.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

import dagster as dg
from pydantic import ConfigDict

from storm_dagster.defs.keys import catalog_field

_BACKOFF = {"linear": dg.Backoff.LINEAR, "exponential": dg.Backoff.EXPONENTIAL}


class RetryAttributes(dg.Model, dg.Resolvable):
    """Retries of a step inside its run."""

    model_config = ConfigDict(extra="forbid")

    max_retries: int = catalog_field("retry.max_retries", default=1, ge=0)
    delay: float | None = catalog_field("retry.delay", default=None, ge=0)
    backoff: Literal["linear", "exponential"] | None = catalog_field("retry.backoff", default=None)

    def policy(self) -> dg.RetryPolicy:
        """The policy in Dagster's form."""
        backoff = _BACKOFF[self.backoff] if self.backoff is not None else None
        return dg.RetryPolicy(max_retries=self.max_retries, delay=self.delay, backoff=backoff)


class OpAttributes(dg.Model, dg.Resolvable):
    """Settings of the op that deploys a topology.

    The names are those of Dagster's ``OpSpec``. It has no ``backfill_policy``, because the asset
    has no partitions, and no ``name``, because the config of runs is by the name of the op.
    """

    model_config = ConfigDict(extra="forbid")

    pool: str | None = catalog_field("op.pool", default=None)
    tags: dict[str, Any] = catalog_field("op.tags", default={})
    description: str | None = catalog_field("op.description", default=None)
    retry_policy: RetryAttributes | None = catalog_field("op.retry_policy", default=None)

    def options(self) -> dict[str, Any]:
        """Arguments of ``dg.multi_asset``; only those that are set."""
        options: dict[str, Any] = {}
        if self.pool is not None:
            options["pool"] = self.pool
        if self.tags:
            options["op_tags"] = dict(self.tags)
        if self.description is not None:
            options["description"] = self.description
        if self.retry_policy is not None:
            options["retry_policy"] = self.retry_policy.policy()
        return options


def encode_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """Tags as run launchers read them: a value that is not text as JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in tags.items()
    }
