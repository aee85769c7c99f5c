"""The run launcher that a ``dagster.yaml`` of an earlier release names."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

__all__ = ["WarmRunLauncher"]


class WarmRunLauncher(dg.DefaultRunLauncher):
    """Dagster's default run launcher, under the name that earlier releases had for their own.

    A ``dagster.yaml`` that names it keeps working; ``home`` no longer has an effect. Remove
    ``run_launcher`` there, and start the code server with ``storm-dagster daemon code``, which
    forks the runs.
    """

    def __init__(self, inst_data: Any = None, home: str | None = None) -> None:
        super().__init__(inst_data=inst_data)

    @classmethod
    def config_type(cls) -> Any:
        """Config schema: ``home``, which is ignored."""
        return {"home": dg.Field(dg.StringSource, is_required=False)}

    @classmethod
    def from_config_value(
        cls, inst_data: Any, config_value: Mapping[str, Any]
    ) -> "WarmRunLauncher":
        """Create the launcher from ``dagster.yaml`` (called by Dagster)."""
        return cls(inst_data=inst_data)
