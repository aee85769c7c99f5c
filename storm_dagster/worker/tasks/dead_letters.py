"""Dead letters of a spout's task: tuples that failed too often.

They are in a log from which they can be emitted once more.
"""

import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

import msgspec

from storm_dagster.api.context import TopologyContext
from storm_dagster.core.dataplane.acking import PendingMap
from storm_dagster.model.bounded_map import BoundedMap
from storm_dagster.model.errors import InvalidRequest, StormDagsterError, Unavailable, error_text
from storm_dagster.model.json_values import shown_json
from storm_dagster.model.topology import ComponentSpec
from storm_dagster.model.values import copy_value, decode_value, encode_value
from storm_dagster.model.wire import DeadLetterQuery
from storm_dagster.worker.dataplane.tree import Reason
from storm_dagster.worker.state.letters import DeadLetterLog
from storm_dagster.worker.state.storage import dead_letter_log
from storm_dagster.worker.tasks.plain_values import short_repr
from storm_dagster.worker.tasks.shared import Shared
from storm_dagster.worker.tasks.stats import TaskStats
from storm_dagster.worker.tasks.system_wait import AwaitedTexts

_log = logging.getLogger(__name__)
Verdict = bool | Literal["lost"] | None
"""True: acked, False: failed, ``None``: given up, ``"lost"``: failed with a worker."""
Notify = Callable[[Verdict, Any], None]
"""Notify the spout of a tuple id: acked, failed, given up (``None``), or failed with a worker."""

_MAX_IDS = 10_000
"""Failing tuple ids that a task remembers; the tries of the oldest ones count from zero."""
_PAGE_BYTES = 1 << 20
"""Length of a page after which it gets no further letter."""

_MAX_ID = 1000
"""Bytes of the JSON of a tuple id in its letter; of a longer one it has the text."""
_SOURCE = "dead letters"
"""Source of the text on the system that a task waits for."""
_REPORT_MS = 60_000
"""Milliseconds between two reports that letters fill their room, or are dropped."""
_HOLDS = (
    "waits for room: its dead letters that were not replayed have {used:,} bytes of {limit:,} "
    "(topology.dead.letter.max.bytes). Repair what their errors name and replay them "
    "(storm-dagster dead-letters {name} --replay), export (--export) and delete those that no "
    "repair can help (--delete --older-than SECS, or --all), raise the limit, or let the oldest "
    "be dropped (topology.dead.letter.overflow: drop)"
)
"""Reason of a held spout."""


class _Replay:
    """Tuple id of a letter that was emitted once more."""

    def __init__(self, letter: dict[str, Any]) -> None:
        self.letter = letter


def _shown_id(tup_id: Any) -> Any:
    """A tuple id as JSON; the beginning of its text if it is long, as that of a source's record."""
    shown = _as_json(tup_id)
    if isinstance(shown, msgspec.Raw) and len(memoryview(shown)) > _MAX_ID:
        return short_repr(tup_id, _MAX_ID)
    return shown


def _key(tup_id: Any) -> Any:
    """Key of a tuple id in a map; its ``repr`` if it cannot be hashed."""
    try:
        hash(tup_id)
        return tup_id
    except Exception:
        return short_repr(tup_id, 200)


def _as_json(value: Any) -> Any:
    """Return a value as encoded JSON, or its ``repr`` if it has no such form.

    NaN and other parts that JSON lacks are text in it.
    """
    try:
        return msgspec.Raw(shown_json(value, short_repr))
    except Exception:
        return short_repr(value, 1000)


class LetterSpout(Protocol):
    """A spout's task with dead letters.

    ``SpoutBase`` of ``worker/tasks/spouts.py``.
    """

    task_id: int
    component: str
    context: TopologyContext
    conf: Mapping[str, Any]
    part: ComponentSpec
    shared: Shared
    stats: TaskStats
    awaited: AwaitedTexts
    pending: PendingMap[Any]
    send: Callable[..., Any]
    """Emit of the spout, which is created when it opens."""

    def report(self, error: BaseException, activity: str) -> None:
        """Log and record an error."""
        ...

    def metric(self, name: str, value: Any) -> None:
        """Keep the newest value of a metric."""
        ...

    def reason_of(self, cause: Any) -> Reason:
        """Return the reason of a failure in this task."""
        ...


class DeadLetters:
    """Tries of the tuples of one spout's task, and its letters.

    Used only by the loop.
    """

    def __init__(self, runner: LetterSpout) -> None:
        self._runner = runner
        conf = runner.conf
        context = runner.context
        self.max_tries = int(conf.get("topology.dead.letter.tries") or 0)
        """Failures after which a tuple is a dead letter; 0: the spout decides."""
        self._stream: str | None = conf.get("topology.dead.letter.stream")
        """Stream on which new letters are emitted."""
        self._tries: BoundedMap[Any, dict[str, Any]] = BoundedMap(_MAX_IDS)
        """Key of a tuple id that has failed -> fields of its letter about the tries."""
        self._replays: dict[int, _Replay] = {}
        """Number of a letter -> its tuple id, while the letter is emitted once more."""
        self._count = 0
        """Stored letters that were not replayed."""
        self._dropped = 0
        """Letters that were dropped without a replay, since the task was opened."""
        self._warn_at = 0
        """Time from which on dropped letters may be logged again."""
        self.holds = False
        """True while the letters fill their room, and the spout emits nothing. Any thread."""
        self._held_since = 0
        """Begin of the hold, in milliseconds since 1970."""
        self._report_hold_at = 0
        """Time from which on the begin of a hold may be reported."""
        self._hold_is_reported = False
        """True if the begin of the hold is reported, so that its end must be."""
        self.log: DeadLetterLog | None = dead_letter_log(
            context,
            int(conf.get("topology.dead.letter.max.bytes") or 0),
            lambda error: runner.report(error, "dead letters"),
            drops_unreplayed=conf.get("topology.dead.letter.overflow") == "drop",
        )
        if self.log is not None:
            context._on_close.append(self.log.close)

    def open(self) -> None:
        """Check the conf and count the stored letters, before the task runs.

        A log that cannot be opened is reported, and the spout runs.
        """
        if self._stream is not None and len(self._runner.context.output_fields(self._stream)) != 1:
            raise InvalidRequest(
                f"topology.dead.letter.stream {self._stream!r} of {self._runner.component!r} must "
                "have one field, for the letter"
            )
        if self.log is not None:
            try:
                self.log.open()
                self._recount(self.log)
            except (OSError, StormDagsterError) as error:
                self._runner.report(error, "the dead letters cannot be opened")

    def _recount(self, log: DeadLetterLog) -> None:
        """Count the letters of a log that was opened, and publish the count."""
        letters = log.read()
        self._publish(sum("replayed_ms" not in letter for letter in letters.values()))
        self._check_room(log)

    def _check_room(self, log: DeadLetterLog) -> None:
        """Hold the spout if the letters fill their room, or release it.

        Unless letters may be dropped. It is released when a tenth of the room is free. Begin and
        end are errors of the task, at most once a minute, and the begin is on the page.
        """
        if log.drops_unreplayed:
            return
        used = log.unreplayed_bytes()
        is_full = used > log.max_bytes * (0.9 if self.holds else 1.0)
        if is_full == self.holds:
            return
        self.holds = is_full
        if is_full:
            self._begin_hold(used, log.max_bytes)
        else:
            self._end_hold()

    def _begin_hold(self, used: int, limit: int) -> None:
        """Show that the spout waits for room, and report it unless a hold was in this minute."""
        runner = self._runner
        now = runner.shared.now_ms()
        self._held_since = now
        reason = _HOLDS.format(used=used, limit=limit, name=runner.context.topology_name)
        runner.awaited.show(_SOURCE, reason)
        self._hold_is_reported = now >= self._report_hold_at
        if self._hold_is_reported:
            self._report_hold_at = now + _REPORT_MS
            runner.report(Unavailable(f"the spout emits nothing: {reason}"), "dead letters")

    def _end_hold(self) -> None:
        """Show that the spout no longer waits, and report it if the begin was reported."""
        runner = self._runner
        runner.awaited.show(_SOURCE, "")
        if not self._hold_is_reported:
            return
        secs = (runner.shared.now_ms() - self._held_since) // 1000
        text = (
            f"the dead letters have room again: the spout, which was held for {secs} s, continues"
        )
        runner.report(Unavailable(text), "dead letters")

    def _publish(self, count: int) -> None:
        """Set the count and its metric; a spout that never had a letter has no metric."""
        self._count = count
        if count or "dead_letters" in self._runner.stats.metrics:
            self._runner.metric("dead_letters", count)

    def watches(self) -> bool:
        """True if acks must be passed to :meth:`on_acked`."""
        return bool(self._tries or self._replays)

    def wrap_emit(self, emit: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``emit`` so that pending entries keep tracked values.

        Only if the conf sets the number of tries.
        """
        if not self.max_tries:
            return emit
        entries = self._runner.pending.entries

        # Called per tuple, measured by benchmarks/dataplane.py.
        def emit_with_values(
            tup: Any,
            tup_id: Any = None,
            stream: Any = None,
            direct_task: Any = None,
            need_task_ids: bool = False,
        ) -> Any:
            try:
                return emit(tup, tup_id, stream, direct_task, need_task_ids)
            finally:
                # Also if a grouping raised: the tuple has failed then.
                if tup_id is not None and entries:
                    root = next(reversed(entries))
                    entry, added = entries[root]
                    if entry[0] is tup_id and len(entry) == 3:
                        values = [copy_value(value) for value in tup]
                        entries[root] = ((*entry, values, direct_task), added)

        return emit_with_values

    # -- verdicts ----------------------------------------------------------------------------------

    def on_acked(self, tup_id: Any, notify: Notify) -> None:
        """Notify the spout of a complete tuple, or mark its letter as replayed."""
        if type(tup_id) is not _Replay:
            self._tries.pop(_key(tup_id), None)
            notify(True, tup_id)
            return
        self._change(tup_id, -1, replayed_ms=self._runner.shared.now_ms())

    def on_failed(self, root: int, entry: Any, lost: bool, notify: Notify) -> None:
        """Count a try of a failed tuple.

        The spout is notified, or a letter is written. ``lost``: it failed with a worker, which is
        not a try of the tuple. ``entry``: of ``SpoutBase.pending``.
        """
        runner = self._runner
        now = runner.shared.now_ms()
        # `wrap_emit` adds the values and the direct task to the entry, if letters may be written.
        tup_id, stream, _, *emitted = entry
        if lost:
            default_reason = "a worker with parts of it ended"
        else:
            default_reason = "not complete within topology.message.timeout.secs"
        reasons = runner.shared.ledger.reasons
        task, component, error = reasons.pop(root, (0, "", default_reason))
        failure = {"error": error, "component": component, "failed_task": task, "last_ms": now}
        if type(tup_id) is _Replay:
            self._change(tup_id, 0, tries=tup_id.letter["tries"] + 1, **failure)
            return
        if lost:
            notify("lost", tup_id)
            return
        key = _key(tup_id)
        former = self._tries.get(key) or {"tries": 0, "first_ms": now}
        tries = {**former, "tries": former["tries"] + 1, **failure}
        self._tries[key] = tries
        if self.max_tries and tries["tries"] >= self.max_tries and emitted:
            values, direct_task = emitted
            if self.give_up(tup_id, values, stream, direct_task):
                notify(None, tup_id)
                return
        notify(False, tup_id)

    def _put(self, log: DeadLetterLog, letter: dict[str, Any], more: int) -> None:
        """Store a letter, and add ``more`` to the count of unreplayed letters.

        The letters that are dropped for it are counted, and logged.
        """
        runner = self._runner
        was_open = log.is_open
        dropped = log.put(letter["number"], letter)
        unreplayed = sum("replayed_ms" not in dropped_letter for dropped_letter in dropped)
        if unreplayed:
            self._dropped += unreplayed
            runner.metric("dead_letters_dropped", self._dropped)
            self._warn_of_drops()
        if was_open:
            self._publish(self._count + more - unreplayed)
            self._check_room(log)
        else:
            self._recount(log)

    def _warn_of_drops(self) -> None:
        """Log that letters are dropped, once a minute: there may be thousands a second."""
        runner = self._runner
        now = runner.shared.now_ms()
        if now < self._warn_at:
            return
        self._warn_at = now + _REPORT_MS
        _log.warning(
            "the oldest dead letters of %s-%d are dropped, %d so far",
            runner.component,
            runner.task_id,
            self._dropped,
        )

    def _change(self, replay: _Replay, more: int, **fields: Any) -> None:
        """Set fields of a letter whose replay has ended.

        ``more``: as in :meth:`_put`. Without effect if the letter was dropped since. An error is
        reported.
        """
        number = replay.letter["number"]
        self._replays.pop(number, None)
        try:
            assert self.log is not None
            letter = self.log.get(number)
            if letter is not None:
                self._put(self.log, {**letter, **fields}, more)
        except (OSError, StormDagsterError) as error:
            self._runner.report(
                error, f"dead letter {number} was emitted again, which cannot be noted"
            )

    def own_ids(self, tup_ids: list[Any]) -> list[Any]:
        """Return the ids that the spout knows, without those of replayed letters.

        These letters remain in the log, and their replays are forgotten.
        """
        self._replays.clear()
        return [tup_id for tup_id in tup_ids if type(tup_id) is not _Replay]

    def give_up(
        self,
        tup_id: Any,
        tup: Sequence[Any],
        stream: str | None,
        direct_task: int | None,
        reason: Any = None,
        position: Any = None,
    ) -> bool:
        """Write a letter, emit it if a stream is set for that, and return True.

        False if it cannot be written, which is reported. ``position``: place of the tuple in its
        source, for the reader of the letter.
        """
        runner = self._runner
        now = runner.shared.now_ms()
        stream = stream or "default"
        values = [*tup]
        letter: dict[str, Any] = {
            "number": now,
            "spout": runner.component,
            "task": runner.task_id,
            "tup_id": _shown_id(tup_id),
            "stream": stream,
            "fields": runner.part.outputs[stream].fields if stream in runner.part.outputs else (),
            "values": _as_json(values),
            "raw": None,
            "position": _as_json(position),
            "direct_task": direct_task,
            **self._tries_of(tup_id, reason, now),
        }
        try:
            if self.log is None:
                raise InvalidRequest("there is no folder for dead letters: set topology.state.dir")
            letter["number"] = self.log.next_number(now)
            with suppress(Exception):
                letter["raw"] = base64.b64encode(encode_value(values)).decode()
            # One letter must not push out most of the others: without `raw` it is not replayed.
            if len(msgspec.json.encode(letter)) > self.log.max_bytes // 4:
                letter = {**letter, "values": short_repr(values, 1000), "raw": None}
            self._put(self.log, letter, 1)
        except Exception as error:
            runner.report(error, "a dead letter cannot be kept")
            return False
        self._tries.pop(_key(tup_id), None)
        _log.error(
            "tuple %s of %s is a dead letter: %s",
            short_repr(tup_id),
            runner.component,
            letter["error"],
        )
        if self._stream is not None:
            try:
                plain = msgspec.json.decode(msgspec.json.encode(letter))
                runner.send([plain], None, self._stream)
            except runner.shared.catches as error:
                runner.report(error, "a dead letter cannot be emitted")
        return True

    def _tries_of(self, tup_id: Any, reason: Any, now: int) -> dict[str, Any]:
        """Fields of a letter about the tries of its tuple.

        A tuple that has not failed yet is given up at its first try. ``reason``: of the spout, or
        ``None`` for that of the last failure.
        """
        task, component, text = self._runner.reason_of(reason or "given up by the spout")
        first_try = {
            "tries": 1,
            "first_ms": now,
            "last_ms": now,
            "error": text,
            "component": component,
            "failed_task": task,
        }
        tries = {**self._tries.get(_key(tup_id), first_try)}
        if reason is not None:
            tries["error"] = text
        return tries

    # -- requests ----------------------------------------------------------------------------------

    def page(self, query: DeadLetterQuery) -> dict[str, Any]:
        """Return a page of letters after a number: ``{"entries", "next"}``.

        A page has at most about 1 MiB. ``next`` is the last number, ``None`` at the end. With
        ``replay`` the letters are emitted once more, except those that were already, or cannot be:
        the page has only those. :class:`Unavailable` if the topology is not active. A letter is
        marked when its tree is complete, and stays when it fails. With ``delete_older_secs`` the
        page has the letters that are deleted: those whose last failure is at least as long ago.
        """
        runner = self._runner
        if query.replay and not runner.shared.spouts_run:
            raise Unavailable(
                f"topology {runner.context.topology_name!r} is not active: activate it, and try "
                "again"
            )
        letters: list[dict[str, Any]] = []
        next_number: int | None = None
        delete_before: float | None = None
        if query.delete_older_secs is not None:
            delete_before = runner.shared.now_ms() - query.delete_older_secs * 1000
        size = 0
        stored = self.log.read() if self.log is not None else {}
        for number, letter in stored.items():
            if number <= query.after:
                continue
            if len(letters) >= query.limit or size > _PAGE_BYTES:
                next_number = letters[-1]["number"]
                break
            if not self._selects(letter, query, delete_before):
                continue
            if query.replay:
                self._replay(letter)
            letters.append(letter)
            size += len(str(letter))
        if delete_before is not None and letters:
            self._delete([letter["number"] for letter in letters])
        return {"entries": letters, "next": next_number}

    def _selects(
        self, letter: dict[str, Any], query: DeadLetterQuery, delete_before: float | None
    ) -> bool:
        """True if a query returns the letter: it is old enough, and can be replayed.

        ``delete_before``: time in milliseconds since 1970; ``None`` for letters of any age.
        """
        if delete_before is not None and letter["last_ms"] > delete_before:
            return False
        if not query.replay:
            return True
        is_replayed = "replayed_ms" in letter or letter["number"] in self._replays
        return letter["raw"] is not None and not is_replayed

    def _replay(self, letter: dict[str, Any]) -> None:
        """Emit a letter once more; ``InvalidRequest`` if that raises."""
        number = letter["number"]
        replay = _Replay(letter)
        try:
            values = decode_value(base64.b64decode(letter["raw"]))
            self._runner.send(values, replay, letter["stream"], letter["direct_task"])
        except Exception as error:
            raise InvalidRequest(
                f"dead letter {number} cannot be emitted: {error_text(error)}"
            ) from None
        self._replays[number] = replay

    def _delete(self, numbers: list[int]) -> None:
        """Delete letters; a spout that they held emits again if there is room now."""
        assert self.log is not None
        self.log.delete(numbers)
        for number in numbers:
            self._replays.pop(number, None)
        self._recount(self.log)
