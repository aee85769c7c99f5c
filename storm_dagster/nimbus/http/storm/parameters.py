"""Parameters of the routes of Storm's REST."""

from typing import Annotated

from storm_dagster.core.snapshot.windows import check_window
from storm_dagster.http.router import Parameter


def is_true(text: str | None) -> bool:
    """True if a parameter is ``1`` or ``true``."""
    return text in ("1", "true")


TopologyId = Annotated[str, Parameter("path", "id", "Topology id, or name")]
WorkerSlot = Annotated[str, Parameter("path", "slot", "HOST:PORT of a worker")]
Window = Annotated[
    str,
    Parameter(
        "query",
        "window",
        "600, 10800, 86400 or :all-time (default, also for any other)",
        parse=check_window,
    ),
]
IncludeSystem = Annotated[
    bool,
    Parameter(
        "query",
        "sys",
        "1 or true: with the system's components and streams",
        parse=is_true,
    ),
]
