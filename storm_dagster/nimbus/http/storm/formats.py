"""Formats of Storm's UI: uptimes, latencies, links."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from storm_dagster.core.snapshot.upgrades import worker_log_url
from storm_dagster.core.snapshot.windows import ALL_TIME
from storm_dagster.model.view import ClusterView

_MAX_ERROR_CHARACTERS = 200
"""Longest text of an error in a table of components."""


def pretty_secs(secs: int) -> str:
    """A duration such as ``1d 2h 3m 4s``; zero is ``0s``.

    Units that are zero are left out before the first other unit, and not after it.
    """
    days, secs_of_day = divmod(max(0, int(secs)), 86400)
    hours, secs_of_hour = divmod(secs_of_day, 3600)
    minutes, seconds = divmod(secs_of_hour, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
    while len(parts) > 1 and parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{number}{unit}" for number, unit in parts)


def format_fixed(number: float) -> str:
    """Format a latency or capacity with three decimals."""
    return f"{number:.3f}"


def debug_fields(conf: Mapping[str, Any]) -> dict[str, Any]:
    """``debug``, and the percentage of tuples that are logged.

    ``topology.debug`` logs all of them; without it the percentage is Storm's default.
    """
    is_debugged = bool(conf.get("topology.debug"))
    return {"debug": is_debugged, "samplingPct": 100.0 if is_debugged else 10.0}


def window_hint(window: str) -> str:
    """Title of a window: ``10m 0s``, ``All time``."""
    return "All time" if window == ALL_TIME else pretty_secs(int(window))


def short_error(text: str) -> str:
    """An error in one line, for tables of components.

    Of a Python traceback it is the exception, which is in the last line, and the first line.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    is_traceback = any(line.startswith("Traceback") or "Traceback (" in line for line in lines)
    if len(lines) > 1 and is_traceback:
        text = f"{lines[-1].strip()} ({lines[0].strip()})"
    return text[:_MAX_ERROR_CHARACTERS]


class Links:
    """Links to logs, at the HTTP services of supervisors.

    A supervisor is named by its id, or by its host where only the host is known.
    """

    def __init__(self, view: ClusterView) -> None:
        self._supervisors = {node: info.http for node, info in view.supervisors.items()}
        """Id of a supervisor -> URL of its HTTP service."""
        self._hosts = {info.host: info.http for info in view.supervisors.values()}
        """Host -> URL of the HTTP service of one of its supervisors."""

    def worker(self, topology_id: str, node: str | None, host: str, port: int) -> str:
        """The page of a worker's log; empty without an HTTP service there."""
        if node is None:
            base = self._hosts.get(host)
        else:
            base = self._supervisors.get(node)
        if not base or not port:
            return ""
        return worker_log_url(base, topology_id, port)

    def base(self, host: str) -> str:
        """The HTTP service of a supervisor on a host; empty if unknown."""
        return self._hosts.get(host) or ""

    def supervisor(self, node: str) -> str:
        """The page of a supervisor's log; empty without an HTTP service."""
        base = self._supervisors.get(node)
        return daemon_log(base, "supervisor", node) if base else ""


def daemon_log(base: str, role: str, name: str) -> str:
    """The page of a daemon's log at its own HTTP service."""
    file = quote(f"{role}-{name}.log", safe="")
    return f"{base}/api/v1/daemonlog?file={file}"
