"""Invariants I1 to I8 of a cluster (``docs/decisions.md#invariants``), checked on a snapshot of it.
Pure.

Each rule yields one :class:`Violation` for everything that breaks it, and nothing for a sound
cluster. What was not read (``None`` in :class:`ClusterSnapshot`) is not checked. A cluster that is
changing may break a rule for a moment: :func:`confirm_violations` keeps what stays broken.
"""
