"""Formats of Storm's UI: uptimes, latencies, links."""

from urllib.parse import quote

from storm_dagster.core.snapshot.windows import ALL_TIME
from storm_dagster.model.view import ClusterView

_LONGEST_ERROR = 200


def pretty_secs(secs: int) -> str:
    """``1d 2h 3m 4s``: leading units that are zero are left out, later ones are not. Zero is
    ``0s``.
    """
    days, rest = divmod(max(0, int(secs)), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
    first = next((index for index, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number}{unit}" for number, unit in parts[first:])


def format_fixed(number: float) -> str:
    """Format a latency or capacity with three decimals."""
    return f"{number:.3f}"


def window_hint(window: str) -> str:
    """A window for people: ``10m 0s``, ``All time``."""
    return "All time" if window == ALL_TIME else pretty_secs(int(window))


def short_error(text: str) -> str:
    """An error as tables of components show it: the exception, which a Python traceback has last,
    then where.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and any(
        line.startswith("Traceback") or "Traceback (" in line for line in lines
    ):
        return f"{lines[-1].strip()} ({lines[0].strip()})"[:_LONGEST_ERROR]
    return text[:_LONGEST_ERROR]


class Links:
    """Links to logs, at the HTTP services of the supervisors and of nimbus itself."""

    def __init__(self, view: ClusterView) -> None:
        """Links into a cluster: by supervisor id, and by host where only that is known."""
        self._supervisors = {node: info.http for node, info in view.supervisors.items()}
        self._hosts = {info.host: info.http for info in view.supervisors.values()}

    def worker(self, topology_id: str, node: str | None, host: str, port: int) -> str:
        """The page of a worker's log; empty while its supervisor has no HTTP service."""
        base = self._supervisors.get(node) if node is not None else self._hosts.get(host)
        if not base or not port:
            return ""
        return f"{base}/api/v1/log?file={quote(f'{topology_id}/{port}/worker.log', safe='')}"

    def base(self, host: str) -> str:
        """The HTTP service of a supervisor on that host; empty when none is known."""
        return self._hosts.get(host) or ""

    def supervisor(self, node: str) -> str:
        """The page of a supervisor's own log."""
        base = self._supervisors.get(node)
        return daemon_log(base, "supervisor", node) if base else ""


def daemon_log(base: str, role: str, name: str) -> str:
    """The page of a daemon's log at its own HTTP service."""
    return f"{base}/api/v1/daemonlog?file={quote(f'{role}-{name}.log', safe='')}"
