"""Conf keys of earlier releases that no longer exist."""

from collections.abc import Mapping

REMOVED_KEYS: Mapping[str, str] = {
    "dagster.history.retention.ticks.hours": (
        "Dagster deletes ticks itself: write `retention: {sensor: {purge_after_days: 1}, "
        "schedule: {purge_after_days: 1}}` into dagster.yaml, and remove the key"
    ),
    "dagster.metrics.retention.hours": (
        "statistics are no longer stored below HOME/metrics: let Prometheus read /metrics of "
        "nimbus, delete HOME/metrics once you have copied what you need, and remove the key"
    ),
    "nimbus.impersonation.acl": (
        "doAsUser is refused: let each user show a certificate or a token of their own, and "
        "remove the key"
    ),
}
"""Key -> what to do instead, as the end of a warning.

A conf that still has such a key is valid: the key has no effect, and
:func:`storm_dagster.model.conf.validate_conf` warns.
"""
