"""Record of the newest changes of assignments, in the data of ``/assignments``.

Each transaction that changes an assignment raises the version of that node (one placement at a time), and leaves there
which topology it was and which supervisors its old and its new placement name. Who remembers the version up to which
it has read everything learns from one read what else to read: usually nothing. A writer that leaves no record, or more
changes than are kept, costs its readers one full read.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from storm_dagster.model.records import Assignment
from storm_dagster.model.view import ClusterView

_MOST_CHANGES = 32
_MOST_NODES = 32
_MOST_BYTES = 8192
_Nodes = tuple[str, ...] | None


class _Change(msgspec.Struct, frozen=True):
    version: int
    nodes: Mapping[str, _Nodes]
    """Topology id -> supervisors that it concerns; ``None``: any."""


class _Changes(msgspec.Struct, frozen=True):
    changes: tuple[_Change, ...] = ()
    v: int = 1


def append_change(view: ClusterView, changed: Mapping[str, Assignment | None]) -> bytes:
    """The data of ``/assignments`` that goes with these new assignments; ``None`` removes one."""
    nodes: dict[str, _Nodes] = {}
    for topology_id, assignment in changed.items():
        known = view.topologies.get(topology_id)
        placements = [each for each in (assignment, known and known.assignment) if each is not None]
        named = {worker.node for placement in placements for worker in placement.workers}
        nodes[topology_id] = tuple(sorted(named)) if placements and len(named) <= _MOST_NODES else None
    kept = [*_decode(view.assignment_changes).changes, _Change(view.assignments_version + 1, nodes)][-_MOST_CHANGES:]
    while len(raw := msgspec.json.encode(_Changes(tuple(kept)))) > _MOST_BYTES and kept:
        del kept[0]
    return raw


def changes_since(raw: bytes, now: int, since: int) -> dict[str, _Nodes] | None:
    """Topology id -> supervisors concerned, of the changes after version ``since`` up to ``now``; ``None``: not known."""
    found: dict[str, _Nodes] = {}
    known = {change.version: change for change in _decode(raw).changes}
    if since > now or not all(version in known for version in range(since + 1, now + 1)):
        return None
    for version in range(since + 1, now + 1):
        for topology_id, nodes in known[version].nodes.items():
            before = found.get(topology_id, ())
            found[topology_id] = None if nodes is None or before is None else (*before, *nodes)
    return found


def _decode(raw: bytes) -> _Changes:
    try:
        return msgspec.json.decode(raw, type=_Changes)
    except ValueError:
        return _Changes()
