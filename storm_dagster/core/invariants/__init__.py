"""Invariants I1 to I8 of a cluster (``docs/decisions.md#invariants``). Pure.

They are checked on a snapshot of the cluster. Each rule yields one :class:`Violation` for each
thing that breaks it, and none for a sound cluster. A part of the cluster that was not read
(``None`` in :class:`ClusterSnapshot`) is not checked. A cluster that is changing may break a rule
for a moment: :func:`confirm_violations` keeps the violations that last.
"""
