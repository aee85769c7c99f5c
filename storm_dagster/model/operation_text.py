"""Open operations in words, for the command line, pages and errors."""

from collections.abc import Mapping
from typing import Any

from storm_dagster.model.amounts import duration
from storm_dagster.model.verbs import VERBS

_STEPS: Mapping[str, str] = {
    "launch": "its run is being launched",
    "topology_conf": "checks conf and topology",
    "topology_code": "stores code blobs",
    "task_info": "numbers tasks",
    "assignment": "places tasks",
    "published_assignment": "publishes the assignment",
    "active_topology": "activates the spouts",
    "delay": "waits for its delay",
    "workers": "starts workers",
}
"""Step of an operation -> the step for people."""


def _doing(name: str) -> str:
    """A verb or submission under way in one word.

    The name of a verb of another release.
    """
    if name == "submit":
        return "submitting"
    verb = VERBS.get(name)
    if verb is None or not verb.doing:
        return name
    return verb.doing


def operation_text(row: Mapping[str, Any]) -> str:
    """A row of ``GET /v1/operations`` for people.

    For example "submitting (stores code blobs) for 3 s".
    """
    name = str(row.get("verb"))
    step = str(row.get("step"))
    age = row.get("age_secs")
    text = f"{_doing(name)} ({_STEPS.get(step, step)})"
    return text if age is None else f"{text} for {duration(age)}"
