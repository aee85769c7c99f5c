"""Dead letters of a spout's task: tuples that failed too often, in a file from which they can be
emitted again.
"""

import base64
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from storm_dagster.core.acking import BoundedMap
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.values import copy_value, decode_value, encode_value
from storm_dagster.model.wire import LetterQuestion
from storm_dagster.worker.tasks.runner import shown
from storm_dagster.worker.tasks.state_log import state_folder

if TYPE_CHECKING:
    from storm_dagster.worker.tasks.spouts import SpoutBase

_log = logging.getLogger(__name__)
Verdict = bool | Literal["lost"] | None
Tell = Callable[[Verdict, Any], None]
"""Notify the spout of a tuple id: acked, failed, given up (``None``), or failed with a worker."""

_MOST_IDS = 10_000
"""Failing tuple ids that a task remembers; the tries of the oldest are counted from zero again."""
_PAGE_BYTES = 1 << 20


class LetterFile:
    """Lines of JSON, each a letter or a change of an earlier one with the same ``number``.

    Half of ``most_bytes`` full, the file replaces ``*.old.jsonl``, whose letters are dropped.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self.old: Path = path.with_suffix(".old.jsonl")
        self.most: int = most_bytes // 2

    def append(self, line: bytes) -> bool:
        """Add a line, and whether old letters were dropped for it."""
        line, drops = line + b"\n", False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and size + len(line) > self.most:
            drops = self.old.exists()
            os.replace(self.path, self.old)
            size = 0
        with self.path.open("ab+") as file:
            # What a process that was killed had begun is a line of its own.
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            file.write(line)
        return drops

    def read(self) -> dict[int, dict[str, Any]]:
        """Number -> letter, in order; without changes of letters that were dropped."""
        found: dict[int, dict[str, Any]] = {}
        for path in (self.old, self.path):
            for line in path.read_bytes().splitlines() if path.exists() else ():
                try:
                    change = msgspec.json.decode(line)
                    found.setdefault(change["number"], {}).update(change)
                except (ValueError, TypeError, KeyError):
                    continue
        return {number: found[number] for number in sorted(found) if "values" in found[number]}


class _Replay:
    """Tuple id of a letter that was emitted again."""

    def __init__(self, letter: dict[str, Any]) -> None:
        self.letter = letter


def _key(tup_id: Any) -> Any:
    try:
        hash(tup_id)
        return tup_id
    except Exception:
        return shown(tup_id, 200)


def _as_json(value: Any) -> Any:
    try:
        return msgspec.Raw(msgspec.json.encode(value, enc_hook=shown))
    except Exception:
        return shown(value, 1000)


class DeadLetters:
    """Tries of the tuples of one spout's task, and its letters. Used only by the loop."""

    def __init__(self, runner: "SpoutBase") -> None:
        self._runner = runner
        conf, context = runner.conf, runner.context
        self.most_tries = int(conf.get("topology.dead.letter.tries") or 0)
        """Failures after which a tuple is a dead letter, whatever its spout does; 0: the spout
        decides.
        """
        self._stream: str | None = conf.get("topology.dead.letter.stream")
        self._tries: BoundedMap[Any, dict[str, Any]] = BoundedMap(_MOST_IDS)
        self._replays: dict[int, _Replay] = {}
        self._last = 0
        self._count = self._dropped = 0
        self.file: LetterFile | None = None
        if context._state_dir is not None:
            folder = state_folder(
                context._state_dir, context.topology_name, runner.component
            ).with_suffix(".letters")
            most = int(conf.get("topology.dead.letter.max.bytes") or 0)
            self.file = LetterFile(folder / f"{context.task_index}.jsonl", most)

    def open(self) -> None:
        """Check the conf and count the letters that are there. Called before the task runs."""
        if self._stream is not None and len(self._runner.context.output_fields(self._stream)) != 1:
            raise InvalidRequest(
                f"topology.dead.letter.stream {self._stream!r} of {self._runner.component!r} must have one field, for the letter"
            )
        if self.file is not None:
            self._last = max(self.file.read(), default=0)
            self._recount(self.file)
            self._adopt(self.file)

    def _adopt(self, mine: LetterFile) -> None:
        """Take over letters of tasks that are no more, since the component has fewer."""
        context = self._runner.context
        tasks = len(context.component_tasks(context.component))
        names = {path.name.partition(".")[0] for path in mine.path.parent.glob("*.jsonl")}
        for index in sorted(int(name) for name in names if name.isdecimal()):
            if index >= tasks and index % tasks == context.task_index:
                other = LetterFile(mine.path.with_name(f"{index}.jsonl"), 0)
                for letter in other.read().values():
                    self._last += 1
                    line = msgspec.json.encode({**letter, "number": self._last})
                    self._append(mine, line, "replayed_ms" not in letter)
                other.path.unlink(missing_ok=True)
                other.old.unlink(missing_ok=True)

    def _recount(self, file: LetterFile) -> None:
        self._publish(sum("replayed_ms" not in letter for letter in file.read().values()))

    def _publish(self, count: int) -> None:
        self._count = count
        if count or "dead_letters" in self._runner.stats.metrics:
            self._runner.metric("dead_letters", count)

    def watches(self) -> bool:
        """Whether acks are to be passed to :meth:`on_acked`."""
        return bool(self._tries or self._replays)

    def keeping(self, emit: Callable[..., Any]) -> Callable[..., Any]:
        """``emit`` that keeps the values of tracked tuples with their pending entry, if the conf
        sets the tries.
        """
        if not self.most_tries:
            return emit
        entries = self._runner.pending.entries

        def emit_kept(
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
                    what, added = entries[root]
                    if what[0] is tup_id and len(what) == 3:
                        entries[root] = (
                            (*what, [copy_value(value) for value in tup], direct_task),
                            added,
                        )

        return emit_kept

    # -- verdicts ----------------------------------------------------------------------------------

    def on_acked(self, tup_id: Any, tell: Tell) -> None:
        """A tuple is complete."""
        if type(tup_id) is not _Replay:
            self._tries.pop(_key(tup_id), None)
            tell(True, tup_id)
            return
        self._change(tup_id, -1, replayed_ms=self._runner.shared.now_ms())

    def on_failed(self, root: int, what: Any, lost: bool, tell: Tell) -> None:
        """A tuple failed. ``lost``: with a worker, which is no try of the tuple."""
        runner = self._runner
        now, tup_id = runner.shared.now_ms(), what[0]
        why = (
            "a worker with parts of it ended"
            if lost
            else "not complete within topology.message.timeout.secs"
        )
        task, component, error = runner.shared.ledger.reasons.pop(root, (0, "", why))
        failure = {"error": error, "component": component, "failed_task": task, "last_ms": now}
        if type(tup_id) is _Replay:
            self._change(tup_id, 0, tries=tup_id.letter["tries"] + 1, **failure)
            return
        if not lost:
            key = _key(tup_id)
            tries = self._tries.get(key) or {"tries": 0, "first_ms": now}
            self._tries[key] = tries = {**tries, "tries": tries["tries"] + 1, **failure}
            dies = self.most_tries and tries["tries"] >= self.most_tries and len(what) > 3
            if dies and self.give_up(tup_id, what[3], what[1], what[4]):
                tell(None, tup_id)
                return
        tell("lost" if lost else False, tup_id)

    def _append(self, file: LetterFile, line: bytes, more: int) -> None:
        """Add a line, for ``more`` letters to replay. Those that are dropped for it are counted,
        and logged.
        """
        runner, count = self._runner, self._count + more
        if file.append(line):
            self._recount(file)
            self._dropped += count - self._count
            runner.metric("dead_letters_dropped", self._dropped)
            _log.warning(
                "the oldest dead letters of %s-%d are dropped", runner.component, runner.task_id
            )
        else:
            self._publish(count)

    def _change(self, replay: _Replay, more: int, **fields: Any) -> None:
        number = replay.letter["number"]
        self._replays.pop(number, None)
        try:
            assert self.file is not None
            self._append(self.file, msgspec.json.encode({"number": number, **fields}), more)
        except OSError as error:
            self._runner.report(
                error, f"dead letter {number} was emitted again, which cannot be noted"
            )

    def own_ids(self, tup_ids: list[Any]) -> list[Any]:
        """Those ids that the spout knows; letters that were emitted again remain."""
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
        """Write a letter. ``False``: that is not possible, which is reported."""
        runner, now = self._runner, self._runner.shared.now_ms()
        task, component, text = runner.reason_of(reason or "given up by the spout")
        here = {
            "tries": 1,
            "first_ms": now,
            "last_ms": now,
            "error": text,
            "component": component,
            "failed_task": task,
        }
        stream, self._last = stream or "default", max(now, self._last + 1)
        values = [*tup]
        letter: dict[str, Any] = {
            "number": self._last,
            "spout": runner.component,
            "task": runner.task_id,
            "tup_id": _as_json(tup_id),
            "stream": stream,
            "fields": runner.part.outputs[stream].fields if stream in runner.part.outputs else (),
            "values": _as_json(values),
            "raw": None,
            "position": _as_json(position),
            "direct_task": direct_task,
            **self._tries.get(_key(tup_id), here),
            **({"error": text} if reason is not None else {}),
        }
        try:
            if self.file is None:
                raise InvalidRequest("there is no folder for dead letters: set topology.state.dir")
            with suppress(Exception):
                letter["raw"] = base64.b64encode(encode_value(values)).decode()
            if len(line := msgspec.json.encode(letter)) > self.file.most // 2:
                line = msgspec.json.encode({**letter, "values": shown(values, 1000), "raw": None})
            self._append(self.file, line, 1)
        except Exception as error:
            runner.report(error, "a dead letter cannot be kept")
            return False
        self._tries.pop(_key(tup_id), None)
        _log.error(
            "tuple %s of %s is a dead letter: %s", shown(tup_id), runner.component, letter["error"]
        )
        if self._stream is not None:
            try:
                runner.send([msgspec.json.decode(line)], None, self._stream)
            except runner.shared.catches as error:
                runner.report(error, "a dead letter cannot be emitted")
        return True

    # -- requests ----------------------------------------------------------------------------------

    def answer(self, query: LetterQuestion) -> dict[str, Any]:
        """``{"entries", "next"}``: a page of letters after a number, of at most about 1 MiB;
        ``next`` is the last number, ``None`` at the end. With ``replay`` they are emitted again,
        but those that were already or cannot be; a letter is marked when its tree is complete, and
        stays when it fails.
        """
        runner = self._runner
        if query.replay and not runner.shared.spouts_run:
            raise Unavailable(
                f"topology {runner.context.topology_name!r} is not active: activate it, and try again"
            )
        letters: list[dict[str, Any]] = []
        size = 0
        for number, letter in (self.file.read() if self.file is not None else {}).items():
            if number <= query.after:
                continue
            if len(letters) >= query.limit or size > _PAGE_BYTES:
                return {"entries": letters, "next": letters[-1]["number"]}
            if query.replay:
                if letter["raw"] is None or "replayed_ms" in letter or number in self._replays:
                    continue
                replay = _Replay(letter)
                try:
                    values = decode_value(base64.b64decode(letter["raw"]))
                    runner.send(values, replay, letter["stream"], letter["direct_task"])
                except Exception as error:
                    raise InvalidRequest(
                        f"dead letter {number} cannot be emitted: {error}"
                    ) from None
                self._replays[number] = replay
            letters.append(letter)
            size += len(str(letter))
        return {"entries": letters, "next": None}
