"""Conf keys of earlier releases that no longer exist."""

from collections.abc import Mapping

REMOVED_KEYS: Mapping[str, str] = {
    "nimbus.impersonation.acl": (
        "doAsUser is refused: let each user show a certificate or a token of their own, and "
        "remove the key"
    ),
}
"""Key -> what to do instead, as the end of a warning.

A conf that still has such a key is valid: the key has no effect, and
:func:`storm_dagster.model.conf.validate_conf` warns.
"""
