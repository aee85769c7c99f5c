"""Tuple trees inside one worker, and the acks and fails of a pass of the loop.

Between workers every edge is a random number that is XORed (``core.dataplane.acking``). Inside a
worker no tuple is lost unless the process dies, so edges are only counted: a :class:`Tree` is the
part of a tuple tree below one edge into this worker. When its count reaches zero, one number acks
that edge and adds the edges to other workers below it. A tree that never left its worker sends
no message to an acker.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from struct import Struct
from typing import Any

import msgspec

from storm_dagster.model.bounded_map import BoundedMap
from storm_dagster.model.errors import InvalidRequest

_NUMBERS = 4096
"""Numbers that one system call returns."""
_MAX_REASONS = 4096
"""Roots whose reasons are kept; a new one replaces the oldest."""
Reason = tuple[int, str, str]
"""Reason of a failed tuple: (task, component, text of at most 500 characters)."""
LOST: Reason = (0, "", "a task or worker with parts of it stopped")
"""Reason that is not about the tuple: spouts replay it, and do not count a failure. Compared by
identity.
"""
# A number costs 40 ns in this form: no Python frame is entered, and one system call returns 4096
# of them. Measured by benchmarks/dataplane.py.
next_edge: Callable[[], int] = chain.from_iterable(
    map(Struct(f"<{_NUMBERS}Q").unpack, map(os.urandom, repeat(8 * _NUMBERS)))
).__next__
"""An unguessable 64-bit number. One thread only (the worker's loop)."""


class Tree(msgspec.Struct, eq=False, gc=False):
    """The part of a tuple tree below one edge into this worker."""

    count: int
    """Tuples here that are neither acked nor failed."""
    root: int
    """Number of the spout's tuple; 0 in a joint tree."""
    val: int
    """XOR of its edge (0 at the spout) and of all edges to other workers below it."""
    origin: Any = None
    """The spout's runner, if the root is a tuple of a spout of this worker."""
    parents: Any = None
    """The trees (a tuple of them) that this joint tree keeps open, if its tuples have several
    anchors.
    """
    failed: bool = False
    """True if its root has failed or is lost: the tree sends no ack."""
    peers: int = 0
    """Bits of the other workers that it sent tuples to (``engine.acks``)."""


def leaves(tree: Tree) -> Iterator[Tree]:
    """Trees with roots that ``tree`` joins.

    They are itself, or those of its parents.
    """
    if tree.parents is None:
        yield tree
    else:
        for parent in tree.parents:
            yield from leaves(parent)


def anchor_tree(anchors: Any) -> Tree | None:
    """Return the tree for a tuple anchored to ``anchors``.

    These are a received tuple, or several. ``None`` when untracked. A joint tree has no tuple yet:
    its count is 0 until one is added, and only then keeps its parents open.
    """
    # Called per tuple, measured by benchmarks/dataplane.py.
    trees: dict[int, Tree] = {}
    try:
        if not isinstance(anchors, Sequence):
            return anchors._tree
        for anchor in anchors:
            tree = anchor._tree
            if tree is not None:
                trees[id(tree)] = tree
    except AttributeError:
        raise InvalidRequest(
            f"a tuple cannot be anchored to {type(anchors).__name__}: pass a received tuple, or a "
            "list of them"
        ) from None
    if not trees:
        return None
    if len(trees) == 1:
        return trees.popitem()[1]
    return Tree(0, 0, 0, None, tuple(trees.values()))


@dataclass(slots=True, eq=False)
class Ledger:
    """Acks, inits and fails since the last flush. Used only by the loop.

    Its methods run per tuple; their form is measured by ``benchmarks/dataplane.py``.
    """

    acks: dict[int, int] = field(default_factory=dict)
    """Root -> XOR of its acked and added edges."""
    inits: list[tuple[int, int, int]] = field(default_factory=list)
    """(root, value, spout task)."""
    fails: list[int] = field(default_factory=list)
    """Failed roots, for their ackers."""
    losses: list[int] = field(default_factory=list)
    """As :attr:`fails`, for the reason :data:`LOST`."""
    reasons: BoundedMap[int, Reason] = field(default_factory=lambda: BoundedMap(_MAX_REASONS))
    """Root -> why it failed, here or in another worker. An entry is kept until its spout reads it,
    or too many later ones have failed.
    """
    touched: list[tuple[int, int]] = field(default_factory=list)
    """(root, bits of the workers that its tree was sent on to), for the acker."""
    others: tuple[int, ...] = ()
    """By ``root % number of ackers``: the bits of all workers but the acker's, whose loss the spout
    notices. Empty with two workers: the spout sent there all parts that the other one has.
    """

    def add(self, tree: Tree) -> None:
        """Count one more tuple of ``tree``.

        The first tuple of a joint tree opens its parents.
        """
        if not tree.count and tree.parents is not None:
            for parent in tree.parents:
                self.add(parent)
        tree.count += 1

    def ack_tree(self, tree: Tree) -> None:
        """End a tree whose count has become zero.

        A joint tree counts its parents down; a failed tree sends nothing. Any other tree is acked
        at its spout, if that is here and no part has left this worker, or else at the acker.
        """
        if tree.parents is not None:
            for parent in tree.parents:
                count = parent.count = parent.count - 1
                if not count:
                    self.ack_tree(parent)
            return
        if tree.failed:
            return
        if tree.origin is None:
            acks = self.acks
            root = tree.root
            acks[root] = acks.get(root, 0) ^ tree.val
            others = self.others
            if others and (bits := tree.peers & others[root % len(others)]):
                self.touched.append((root, bits))
        elif tree.val:
            self.inits.append((tree.root, tree.val, tree.origin.task_id))
        else:
            tree.origin.acked.append(tree.root)

    def ack(self, tup: Any) -> None:
        """Ack a received tuple.

        Without effect if it was acked or failed before.
        """
        tree = tup._tree
        if tree is None:
            return
        tup._tree = None
        count = tree.count = tree.count - 1
        if not count:
            self.ack_tree(tree)

    def fail(self, tup: Any, reason: Reason | None = None) -> None:
        """Fail a received tuple, and all roots that it belongs to.

        Without effect if it was acked or failed before.
        """
        tree = tup._tree
        if tree is None:
            return
        tup._tree = None
        self.fail_tree(tree, reason)
        # The tuple is finished, too: the parents of a joint tree must still be counted down. A
        # failed tree itself sends no ack.
        tree.count -= 1
        if not tree.count:
            self.ack_tree(tree)

    def fail_tree(self, tree: Tree, reason: Reason | None = None) -> None:
        """Fail all roots of ``tree``, once."""
        for leaf in leaves(tree):
            if leaf.failed:
                continue
            leaf.failed = True
            self.fail_root(leaf.root, leaf.origin, reason)

    def fail_root(self, root: int, origin: Any, reason: Reason | None) -> None:
        """Notify the spout or acker that a root failed, or is lost (:data:`LOST`).

        ``origin``: the spout's task, if it is here; ``None``: the acker is notified.
        """
        lost = reason is LOST
        if reason is not None and not lost:
            self.reasons[root] = reason
        if origin is not None:
            (origin.lost if lost else origin.failed).append(root)
        else:
            (self.losses if lost else self.fails).append(root)

    def empty(self) -> bool:
        """True if a flush would send no message."""
        # Each of `touched` has an ack beside it.
        return not (self.acks or self.inits or self.fails or self.losses)
