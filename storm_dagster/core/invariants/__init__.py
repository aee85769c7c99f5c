"""Invariants I1 to I8 of a cluster (``docs/decisions.md#invariants``), checked on a snapshot of it. Pure.

Each rule yields one :class:`Violation` for everything that breaks it, and nothing for a sound cluster. What
was not read (``None`` in :class:`ClusterSnapshot`) is not checked. A cluster that is changing may break a rule
for a moment: :func:`confirm_violations` keeps what stays broken.
"""

from __future__ import annotations

from storm_dagster.core.invariants import placement_rules, state_rules
from storm_dagster.core.invariants.snapshot import ClusterSnapshot, Rule, Violation

RULES: tuple[Rule, ...] = tuple(
    each for module in (placement_rules, state_rules) for each in vars(module).values() if isinstance(each, Rule)
)
"""All rules, in the order of the invariants."""


def violations(snapshot: ClusterSnapshot) -> list[Violation]:
    """All violations in one snapshot."""
    return [violation for rule in RULES for violation in rule.check(snapshot)]
