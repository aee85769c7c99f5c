"""Invariants I1 to I8 of a cluster (``docs/decisions.md#invariants``), checked on a snapshot of it. Pure.

Each rule yields one :class:`Violation` for everything that breaks it, and nothing for a sound cluster. What
was not read (``None`` in :class:`ClusterSnapshot`) is not checked. A cluster that is changing may break a rule
for a moment: :func:`confirm_violations` keeps what stays broken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from storm_dagster.core.invariants import placement_rules, state_rules
from storm_dagster.core.invariants.snapshot import ClusterSnapshot, Found, Rule, Violation
from storm_dagster.model.tables import load_table

_FINDERS: dict[str, Callable[[ClusterSnapshot], Found]] = {**vars(placement_rules), **vars(state_rules)}


def _rule(name: str, row: dict[str, Any]) -> Rule:
    find = _FINDERS[row.pop("finder", name)]
    return Rule(name=name, words=find.__doc__ or "", find=find, **row)


RULES: tuple[Rule, ...] = tuple(_rule(name, row) for name, row in load_table(placement_rules.__name__, "rules").items())
"""All rules, in the order of the invariants."""


def violations(snapshot: ClusterSnapshot) -> list[Violation]:
    """All violations in one snapshot."""
    return [violation for rule in RULES for violation in rule.check(snapshot)]
