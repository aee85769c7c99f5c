"""`dg scaffold defs storm_dagster.StormTopologyComponent NAME`: a topology that runs, and its ``defs.yaml``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dagster.components import Scaffolder, ScaffoldRequest
from dagster.components.component_scaffolding import scaffold_component

__all__ = ["StormTopologyScaffolder"]

_TOPOLOGY = Path(__file__).with_name("scaffolded_topology.txt")


class StormTopologyScaffolder(Scaffolder):
    """Writes a word count under the name of the folder, and a ``defs.yaml`` that declares it."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write both; files that exist are not overwritten."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", request.target_path.name)
        words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
        class_name = "".join(word[:1].upper() + word[1:] for word in words) or "Words"
        if class_name[0].isdigit():
            class_name = f"Topology{class_name}"
        # Imported under its stem, so that it must not be called as anything that is installed.
        module = re.sub(r"\W", "_", f"{name}_topology").lower()
        if module[0].isdigit():
            module = f"topology_{module}"
        path = request.target_path / f"{module}.py"
        if not path.exists():
            request.target_path.mkdir(parents=True, exist_ok=True)
            path.write_text(
                _TOPOLOGY.read_text(encoding="utf-8").replace("@CLASS@", class_name), encoding="utf-8"
            )
        scaffold_component(
            request,
            {"name": name, "target": f"{module}.py:{class_name}", "workers": 2, "deploy": "manual"},
        )
