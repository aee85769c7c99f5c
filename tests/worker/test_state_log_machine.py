"""State logs against a map in memory, with crashes at any byte, second openers, and other numbers
of tasks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storm_dagster.api.state import TaskState
from storm_dagster.core.dataplane.keyed_state import Checkpoint, Partitioning, encode_value
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.groupings import stable_hash
from storm_dagster.model.values import decode_value
from storm_dagster.testing.task_state import read_task_states
from storm_dagster.worker.state import log as state_log
from storm_dagster.worker.state.log import StateLog, state_folder
from storm_dagster.worker.state.log_files import read_newest
from storm_dagster.worker.state.storage import open_task_log
from storm_dagster.worker.state.task_store import TaskStore, task_folder
from storm_rigs.servers.memory_folder import MEMORY_FOLDER

KEYS = st.sampled_from(["a", "b", "", "key of some length", "\u00e9", "\ud800", "p.1", "p.2"])
IDS = st.sampled_from(["1", "line-2", "\ud800", "3"])
VALUES = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.text(max_size=40),
    st.binary(max_size=200),
    st.lists(st.floats(allow_nan=False), max_size=3),
    st.dictionaries(st.integers(0, 9), st.none(), max_size=3),
)
Snapshot = tuple[dict[str, Any], set[str]]


class Killed(BaseException):
    """The process ended here."""


def join_compaction(log: StateLog) -> None:
    """Wait for a rewritten log: the next change begins with it."""
    if log._compaction is not None:
        log._compaction.thread.join()


class LogOfATask(RuleBasedStateMachine):
    """What :class:`TaskState` returns, before and after crashes."""

    @initialize()
    def begin(self) -> None:
        """Create the state."""
        self.root = Path(tempfile.mkdtemp(prefix="storm-log-", dir=MEMORY_FOLDER))
        self.folder = task_folder(self.root, "wc", "count", 4)
        self.patches = [
            # So that short logs are rewritten, too.
            patch.object(state_log, "_MIN_COMPACTED", 300),
        ]
        for patched in self.patches:
            patched.start()
        self.values: dict[str, Any] = {}
        self.ids: set[str] = set()
        self.opening = 0
        self.open()

    def teardown(self) -> None:
        """Remove the state."""
        if hasattr(self, "root"):
            self.state.close()
            # Its thread makes the folder again.
            join_compaction(self.log)
            for patched in self.patches:
                patched.stop()
            shutil.rmtree(self.root)

    def open(self) -> None:
        """Open the state as the next worker does, which knows the last opening."""
        self.log = open_task_log(self.folder, lambda: True, opening=self.opening)
        self.state = TaskState(TaskStore(self.log))
        assert self.log.position[1] > self.opening
        self.note_file()

    def note_file(self) -> None:
        """Begin a history of the file that was published last."""
        self.opening = self.log.position[1]
        self.history: list[tuple[int, Snapshot]] = [(self.log.size, self.snapshot())]

    def snapshot(self) -> Snapshot:
        """What must be there now."""
        return dict(self.values), set(self.ids)

    @rule(
        values=st.dictionaries(KEYS, VALUES, max_size=4),
        remove=st.lists(KEYS, max_size=2),
        applied=st.lists(IDS, max_size=2),
        forget=st.lists(IDS, max_size=1),
        sync=st.booleans(),
    )
    def save(
        self,
        values: dict[str, Any],
        remove: list[str],
        applied: list[str],
        forget: list[str],
        sync: bool,
    ) -> None:
        """One transaction."""
        join_compaction(self.log)
        self.state.save(values, applied=applied, remove=remove, forget=forget, sync=sync)
        for key in remove:
            self.values.pop(key, None)
        self.values.update(values)
        self.ids |= {*applied}
        self.ids -= {*forget}
        self.note_write()

    def note_write(self) -> None:
        """Add the newest write to the history."""
        if self.log.position[1] != self.opening:
            # The log was rewritten before the write.
            self.opening = self.log.position[1]
            _, before = self.history[-1]
            self.history = [(self.log._full_size, before)]
        self.history.append((self.log.size, self.snapshot()))

    @rule()
    def clear(self) -> None:
        """Drop everything."""
        join_compaction(self.log)
        self.state.clear()
        self.values.clear()
        self.ids.clear()
        self.note_write()

    @rule(values=st.dictionaries(KEYS, VALUES, min_size=1, max_size=2))
    def save_what_cannot_be_saved(self, values: dict[str, Any]) -> None:
        """One value of several is refused: none is stored."""
        with pytest.raises(TypeError):
            self.state.save({**values, "z": object()}, applied=["1"], remove=["a"])

    @rule(error=st.sampled_from([OSError(28, "No space left on device"), Killed()]), data=st.data())
    def write_in_part(self, error: BaseException, data: st.DataObject) -> None:
        """The disk is full, or the process ends, in the middle of a write."""
        join_compaction(self.log)
        real = os.write
        most = data.draw(st.integers(0, 40))
        written = 0

        def write(descriptor: int, raw: bytes) -> int:
            nonlocal written
            if descriptor != self.log._file:
                return real(descriptor, raw)
            if written >= most:
                raise error
            count = real(descriptor, raw[: most - written])
            written += count
            return count

        before = self.log.position[1]
        with patch.object(os, "write", write), pytest.raises(type(error)):
            self.state.save({"a": "never acknowledged" * 9}, applied=["3"])
        if self.log.position[1] != before:
            self.note_file()

    @rule(cut=st.integers(0, 100_000))
    def crash(self, cut: int) -> None:
        """The process ends, and the file with it at any byte: whole checkpoints are there."""
        path = self.log._file_path
        first, last = self.history[0][0], self.history[-1][0]
        at = first + cut % (last - first + 1)
        self.state.close()
        os.truncate(path, at)
        whole = [snapshot for size, snapshot in self.history if size <= at]
        self.values, self.ids = dict(whole[-1][0]), set(whole[-1][1])
        self.open()

    @rule(step=st.sampled_from(["link", "unlink", "fsync"]), after=st.booleans())
    def crash_while_it_opens(self, step: str, after: bool) -> None:
        """The next worker ends while it opens the state; another one opens it then."""
        real: Callable[..., Any] = getattr(os, step)

        def ended(*args: Any, **options: Any) -> Any:
            if after:
                real(*args, **options)
            raise Killed

        self.state.close()
        with patch.object(os, step, ended), pytest.raises(Killed):
            open_task_log(self.folder, lambda: True)
            # Not every opening takes each step.
            raise Killed
        self.open()

    @rule()
    def close(self) -> None:
        """A worker stops, and the next one begins."""
        self.state.close()
        self.open()

    @rule()
    def another_worker_opens_it(self) -> None:
        """The worker that had it is refused from then on, whatever it believes."""
        old = self.state
        old_log = self.log
        self.open()
        with pytest.raises(Unavailable):
            old.save({"a": "of the old worker"})
        assert not old_log._file_path.exists()
        old.close()

    @precondition(lambda self: hasattr(self, "root"))
    @invariant()
    def is_as_the_map(self) -> None:
        """The state, and that of a reader beside it, are as the map in memory."""
        (reader,) = read_task_states(self.root, "wc", "count").values()
        for state in (self.state, reader):
            rows = list(state.items())
            assert rows == sorted(self.values.items())
            assert [type(value) for _, value in rows] == [
                type(value) for _, value in sorted(self.values.items())
            ]
            assert state.applied_ids() == self.ids and len(state) == len(self.values)
            assert dict(state.items("p.")) == {
                key: value for key, value in self.values.items() if key.startswith("p.")
            }


class LogsOfDividedState(RuleBasedStateMachine):
    """State that is divided over tasks, whose number changes: each key is where its tuples go."""

    @initialize(tasks=st.integers(1, 4))
    def begin(self, tasks: int) -> None:
        """Create the state."""
        self.root = Path(tempfile.mkdtemp(prefix="storm-log-", dir=MEMORY_FOLDER))
        self.folder = state_folder(self.root, "wc", "count")
        # So that short logs are rewritten, too.
        self.patched = patch.object(state_log, "_MIN_COMPACTED", 300)
        self.patched.start()
        self.values: dict[str, Any] = {}
        self.ids: dict[str, str] = {}
        """Applied id -> grouping key of its tuple."""
        self.known: dict[int, tuple[int, int]] = {}
        """What the cluster knows of openings."""
        self.stamp = 0
        self.logs: dict[int, StateLog] = {}
        """The tasks that have opened their share."""
        self.former: list[StateLog] = []
        """Logs of tasks that do not know that they were replaced."""
        self.tasks = tasks

    def teardown(self) -> None:
        """Remove the state."""
        if hasattr(self, "root"):
            for log in [*self.logs.values(), *self.former]:
                log.close()
                join_compaction(log)
            self.patched.stop()
            shutil.rmtree(self.root)

    def owner(self, key: str) -> int:
        """Index of the task that gets the tuples of a key."""
        return stable_hash(key) % self.tasks

    def open(self, index: int, stamp: int | None = None, tasks: int | None = None) -> StateLog:
        """Open the share of a task as its worker does."""
        return StateLog(
            self.folder,
            Partitioning(self.tasks if tasks is None else tasks, by_key=True),
            index,
            (1, self.stamp if stamp is None else stamp),
            lambda key, values: pytest.fail(f"two tasks had {key!r}"),
            lambda: True,
            dict(self.known),
        )

    def open_share(self, index: int) -> None:
        """Open the share of a task, and let the cluster know."""
        log = self.open(index)
        if index in self.logs:
            self.former.append(self.logs[index])
        self.logs[index] = log
        self.known[index] = log.position
        assert dict(log.contents.values) == self.share(index)

    def share(self, index: int) -> dict[str, Any]:
        """Values that a task must have."""
        return {key: value for key, value in self.values.items() if self.owner(key) == index}

    @rule(index=st.integers(0, 3))
    def open_task(self, index: int) -> None:
        """A worker opens a task, perhaps another worker than before."""
        self.open_share(index % self.tasks)

    @rule(key=KEYS, value=VALUES, tuple_number=st.none() | st.integers(0, 5), removes=st.booleans())
    def save(self, key: str, value: Any, tuple_number: int | None, removes: bool) -> None:
        """One checkpoint of the task that has the key."""
        index = self.owner(key)
        if index not in self.logs:
            self.open_share(index)
        log = self.logs[index]
        join_compaction(log)
        log.compact()
        ids = [] if tuple_number is None else [f"{key}/{tuple_number}"]
        log.append(
            Checkpoint(
                values=[] if removes else [(key, encode_value(value, key))],
                removed=[key] if removes else [],
                ids=[(stable_hash(key), id) for id in ids],
            )
        )
        if removes:
            self.values.pop(key, None)
        else:
            self.values[key] = value
        self.ids.update((id, key) for id in ids)

    @rule(tasks=st.integers(1, 4), is_orderly=st.booleans(), first=st.integers(0, 3))
    def divide(self, tasks: int, is_orderly: bool, first: int) -> None:
        """Another number of tasks: the first one that opens its share divides the state.

        ``is_orderly``: the tasks before have stopped. Otherwise they learn it from their next save.
        """
        if tasks == self.tasks:
            return
        former = list(self.logs.values())
        before = self.tasks
        self.logs = {}
        self.tasks = tasks
        self.stamp += 1
        if is_orderly:
            for log in former:
                log.close()
        else:
            self.former += former
        self.open_share(first % tasks)
        with pytest.raises(Unavailable, match="by a newer assignment"):
            self.open(0, stamp=self.stamp - 1, tasks=before)

    @precondition(lambda self: self.former)
    @rule()
    def save_as_before(self) -> None:
        """A task that was replaced cannot change the state."""
        log = self.former.pop()
        with pytest.raises(Unavailable):
            log.append(Checkpoint(values=[("a", encode_value("of the former task", "a"))]))
        log.close()

    @precondition(lambda self: self.logs)
    @rule(size=st.integers(0, 60), index=st.integers(0, 3))
    def crash_in_a_write(self, size: int, index: int) -> None:
        """A worker ends in the middle of a write."""
        index = sorted(self.logs)[index % len(self.logs)]
        log = self.logs.pop(index)
        real = os.write

        def write(descriptor: int, raw: bytes) -> int:
            if descriptor == log._file:
                real(descriptor, raw[: min(size, len(raw) - 1)])
                raise Killed
            return real(descriptor, raw)

        with (
            patch.object(os, "write", write),
            patch.object(os, "ftruncate", side_effect=OSError),
            pytest.raises(Killed),
        ):
            log.append(Checkpoint(values=[("a", encode_value("never acknowledged", "a"))]))
        log.close()
        join_compaction(log)
        self.open_share(index)

    @rule(
        tasks=st.integers(1, 4),
        index=st.integers(0, 3),
        step=st.sampled_from(["link", "unlink"]),
        number=st.integers(0, 3),
        after=st.booleans(),
    )
    def crash_while_it_opens(
        self, tasks: int, index: int, step: str, number: int, after: bool
    ) -> None:
        """A worker ends while it opens its share, perhaps of another number of tasks."""
        if tasks != self.tasks:
            self.former += self.logs.values()
            self.logs = {}
            self.tasks = tasks
            self.stamp += 1
        index %= self.tasks
        real: Callable[..., Any] = getattr(os, step)
        left = number

        def end(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                if after:
                    real(*args, **options)
                raise Killed
            return real(*args, **options)

        with patch.object(os, step, end), pytest.raises(Killed):
            self.open(index)
            # Not every opening takes each step.
            raise Killed
        self.open_share(index)

    @precondition(lambda self: hasattr(self, "root"))
    @invariant()
    def has_each_key_once(self) -> None:
        """Each task that has opened its share has the keys and ids of its tuples."""
        for index in self.logs:
            contents = read_newest(self.folder, index)
            values = {key: decode_value(raw) for key, raw in contents.values.items()}
            assert values == self.share(index)
            own_ids = {id for id, key in self.ids.items() if self.owner(key) == index}
            assert own_ids == contents.ids.keys()


TestLogOfATask = LogOfATask.TestCase
TestLogsOfDividedState = LogsOfDividedState.TestCase


def test_a_link_whose_reply_was_lost_opens_the_state(tmp_path: Path) -> None:
    """NFS sends the request again then, and answers that the name exists."""
    folder = task_folder(tmp_path, "wc", "count", 4)
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    with patch.object(os, "link", link_twice):
        log = open_task_log(folder, lambda: True)
        TaskState(TaskStore(log)).save({"a": 1})
        log.close()
        again = open_task_log(folder, lambda: True)
    assert again.position == (1, 2) and dict(TaskState(TaskStore(again)).items()) == {"a": 1}
    assert not list(tmp_path.rglob("*.tmp"))


def test_nothing_is_appended_after_a_part_that_could_not_be_removed(tmp_path: Path) -> None:
    folder = task_folder(tmp_path, "wc", "count", 4)
    log = open_task_log(folder, lambda: True)
    state = TaskState(TaskStore(log))
    state.save({"a": 1})
    write = os.write

    def write_half(descriptor: int, raw: bytes) -> int:
        if len(raw) < 9:
            raise OSError(28, "No space left on device")
        return write(descriptor, raw[: len(raw) - 8])

    with (
        patch.object(os, "write", write_half),
        patch.object(os, "ftruncate", side_effect=OSError(5, "Input/output error")),
        pytest.raises(OSError, match="No space"),
    ):
        state.save({"a": 2})
    with pytest.raises(OSError):
        state.save({"a": 3})
    assert dict(state.items()) == {"a": 1}
    assert dict(TaskState(TaskStore(open_task_log(folder, lambda: True))).items()) == {"a": 1}
