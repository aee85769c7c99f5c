"""Watch of a supervisor's drain: its end, and the topologies that it waits for."""

import logging

from storm_dagster.core.slots.drain import DrainState, end_of_drain
from storm_dagster.supervisor.cluster_link import ClusterLink
from storm_dagster.supervisor.slots import SlotTable

_log = logging.getLogger(__name__)


class DrainWatch:
    """State of one drain, in the supervisor's loop."""

    def __init__(self, began: float, max_secs: float) -> None:
        """The drain began at ``began``, by the boot clock, and lasts at most ``max_secs``."""
        self._began = began
        self.max_secs = max_secs
        """``supervisor.drain.secs``."""
        self._alone_since: float | None = None
        """Boot clock since which every supervisor drains; ``None`` while another one does not."""
        self._logged = ""
        """Obstacles that were logged last."""

    def end(
        self, now: float, table: SlotTable, link: ClusterLink, *, is_hurried: bool
    ) -> str | None:
        """Reason why the drain is over, ``None`` while it waits; new obstacles are logged."""
        if not link.all_drain:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        if link.drain_obstacles != self._logged:
            self._logged = link.drain_obstacles
            self._log_obstacles(now)
        state = DrainState(
            seconds=now - self._began,
            max_secs=self.max_secs,
            used_ports=table.used_ports(),
            has_read=link.desired is not None,
            known_secs=link.drain_known_secs,
            alone_secs=0.0 if self._alone_since is None else now - self._alone_since,
            is_hurried=is_hurried,
        )
        return end_of_drain(state)

    def _log_obstacles(self, now: float) -> None:
        if not self._logged:
            _log.info("the drain continues: every topology can leave this host")
            return
        remaining_secs = max(0.0, self._began + self.max_secs - now)
        _log.warning(
            "the drain waits at most %.0f s longer (supervisor.drain.secs): %s; if slots are "
            "short, start a supervisor on another host; when it ends, the tasks run elsewhere",
            remaining_secs,
            self._logged,
        )
