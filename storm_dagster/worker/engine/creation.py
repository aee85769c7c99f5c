"""Creation and graceful end of tasks."""

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.spark.fused import FusedBolt
from storm_dagster.model.topology import ComponentSpec, TopologySpec
from storm_dagster.worker.dataplane.routes import by_component, resolve
from storm_dagster.worker.tasks.bolts import BoltRunner, FusedBoltRunner
from storm_dagster.worker.tasks.runner import Runner
from storm_dagster.worker.tasks.shared import Shared
from storm_dagster.worker.tasks.spouts import SpoutRunner


def make_runner(
    shared: Shared, context: TopologyContext, part: ComponentSpec, *, is_spout: bool
) -> Runner:
    """Create the runner of one task of a user's component.

    A class that cannot be imported gets a plain runner, which reports the error when it starts.
    """
    if part.object.shell is not None:
        from storm_dagster.worker.multilang.bolts import ShellBoltRunner
        from storm_dagster.worker.multilang.spouts import ShellSpoutRunner

        return (ShellSpoutRunner if is_spout else ShellBoltRunner)(shared, context, part)
    code: Any = None
    threaded = concurrent = False
    # A class that cannot be imported: the first start of the task reports the error.
    with suppress(*shared.catches):
        code = resolve(part.object.python or "")
        concurrent = not is_spout and inspect.iscoroutinefunction(getattr(code, "process", None))
        threaded = concurrent or bool(getattr(code, "blocking", False))
    if threaded:
        from storm_dagster.worker.threads.bolts import AsyncBoltRunner, BlockingBoltRunner
        from storm_dagster.worker.threads.spouts import BlockingSpoutRunner

        if is_spout:
            spout = BlockingSpoutRunner(shared, context, part)
            spout.takes_peer_messages = bool(getattr(code, "_takes_peer_messages", False))
            return spout
        return (AsyncBoltRunner if concurrent else BlockingBoltRunner)(shared, context, part)
    if code is FusedBolt:
        return FusedBoltRunner(shared, context, part)
    return (SpoutRunner if is_spout else BoltRunner)(shared, context, part)


def changed_components(
    spec: TopologySpec, former: Mapping[int, str], current: Mapping[int, str]
) -> set[str]:
    """Components whose tasks must reopen, because the tasks of the topology changed.

    ``former`` and ``current`` are task -> component. A component divides input, state and keys over
    its tasks, and direct senders name tasks of their readers: with other tasks, what ``initialize``
    derived from the context is wrong.
    """
    former_tasks = by_component(former)
    current_tasks = by_component(current)
    changed: set[str] = set()
    for component in {*current_tasks, *former_tasks}:
        if current_tasks.get(component) != former_tasks.get(component):
            changed.add(component)
    direct_senders: set[str] = set()
    for reader, _, part in spec.components():
        for item in part.inputs:
            if reader in changed and item.grouping.type == "direct":
                direct_senders.add(item.component)
    return changed | direct_senders


def tasks_to_reopen(
    spec: TopologySpec,
    runners: Mapping[int, Runner],
    former: Mapping[int, str],
    current: Mapping[int, str],
) -> list[int]:
    """Return the tasks of ``runners`` whose component is in :func:`changed_components`.

    ``former`` (empty before the first placement) and ``current`` are task -> component. Ackers and
    the topology master stay open: they have no component whose ``initialize`` reads the tasks.
    """
    changed = changed_components(spec, former, current)
    return [
        task
        for task, runner in runners.items()
        if runner.kind != "system" and runner.component in changed
    ]


def close_runners(runners: Sequence[Runner], until: float, *, retire: bool) -> None:
    """Close tasks in this order; a running thread delays its own task.

    All threads end side by side, until the moment ``until`` of ``time.monotonic()``. Threads that
    have not ended by then are abandoned. ``retire``: see :meth:`Runner.close`; without it, tasks
    later in the order first process what the closing ones have emitted.
    """
    for runner in runners:
        runner.attempt("close", partial(runner.begin_close, retire=retire))
    # The other tasks close while the threads end.
    waiting: list[Runner] = []
    for index, runner in enumerate(runners):
        if not runner.has_ended():
            waiting.append(runner)
            continue
        runner.attempt("close", partial(runner.close, retire=retire))
        for reader in () if retire else runners[index + 1 :]:
            if reader.queue and isinstance(reader, BoltRunner) and reader.status == "running":
                # The tuples that the closing task emitted.
                reader.attempt("process", lambda reader=reader: reader.run(reader.shared.clock()))
    while waiting:
        is_late = time.monotonic() >= until
        for runner in list(waiting):
            if runner.has_ended() or is_late:
                waiting.remove(runner)
                runner.attempt("close", partial(runner.close, retire=retire))
        if waiting:
            time.sleep(0.001)


def senders_first(spec: TopologySpec, runners: Iterable[Runner]) -> list[Runner]:
    """Sort tasks so that each one follows those that it reads.

    In a cycle, one of them precedes a task that it reads.
    """
    order: list[str] = []
    sources: dict[str, set[str]] = {}
    for name, _, part in spec.components():
        sources[name] = {item.component for item in part.inputs}
    while sources:
        ready = [name for name, names in sources.items() if not names & sources.keys()]
        if not ready:
            # All of them are in or below a cycle: start with any component.
            ready = [next(iter(sources))]
        order += ready
        for name in ready:
            del sources[name]
    places = {name: place for place, name in enumerate(order)}
    # System tasks have no place: they come with the first component.
    return sorted(runners, key=lambda runner: places.get(runner.component, 0))
