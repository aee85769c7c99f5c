"""What leaders did without Dagster, kept in ZooKeeper until Dagster was told: a new leader tells what the old one did.

One bounded record at ``/unreported``; the oldest deeds are dropped first.
"""

from __future__ import annotations

from collections.abc import Sequence

from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.records import Record, decode_record, encode_record
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.turnstile import fenced

__all__ = ["MOST_DEEDS", "Deed", "load_deeds", "store_deeds"]

MOST_DEEDS = 200
_MOST_TEXT = 1000


class Deed(Record):
    """One thing that was done without a run."""

    asset: tuple[str, ...]
    partition: str
    description: str
    gone: bool = False
    """The topology was removed: its partition key goes once nobody uses the name."""


class _Deeds(Record):
    deeds: tuple[Deed, ...] = ()


def load_deeds(ctx: OperationsContext) -> tuple[Deed, ...]:
    """What is not reported yet, oldest first; a damaged record counts as none."""
    return _load(ctx).deeds


def _load(ctx: OperationsContext) -> _Deeds:
    raw = ctx.cluster.state.get_data(paths.UNREPORTED)
    try:
        return decode_record(_Deeds, raw, paths.UNREPORTED) if raw else _Deeds()
    except Corrupt as error:
        ctx.log.error("what former leaders did cannot be reported to Dagster: %s", error.message)
        return _Deeds()


def store_deeds(ctx: OperationsContext, deeds: Sequence[Deed]) -> None:
    """Replace the record by the newest of ``deeds``; :class:`Fenced` for a deposed leader."""
    kept = tuple(
        deed.model_copy(update={"description": deed.description[:_MOST_TEXT]}) for deed in deeds[-MOST_DEEDS:]
    )
    # Only the leader writes it, and the epoch says who that is: any version.
    record = _load(ctx).model_copy(update={"deeds": kept})
    fenced(ctx, ctx.current_epoch()).set(paths.UNREPORTED, encode_record(record), -1).commit()
