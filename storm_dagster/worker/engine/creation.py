"""Creation of the runners of users' components."""

from __future__ import annotations

import inspect

from storm_dagster.api.context import TopologyContext
from storm_dagster.model.topology import ComponentSpec
from storm_dagster.worker.dataplane.routes import resolve
from storm_dagster.worker.tasks.bolts import BoltRunner
from storm_dagster.worker.tasks.runner import Runner, Shared
from storm_dagster.worker.tasks.spouts import SpoutRunner


def make_runner(shared: Shared, context: TopologyContext, part: ComponentSpec, *, is_spout: bool) -> Runner:
    """Create the runner of one task of a user's component.

    A class that cannot be imported gets a plain runner, which reports the error when it starts.
    """
    if part.object.shell is not None:
        from storm_dagster.worker.tasks.shells import ShellBoltRunner, ShellSpoutRunner

        return (ShellSpoutRunner if is_spout else ShellBoltRunner)(shared, context, part)
    blocking = concurrent = takes_messages = False
    try:
        code = resolve(part.object.python or "")
        blocking = bool(getattr(code, "blocking", False))
        takes_messages = is_spout and bool(getattr(code, "_takes_peer_messages", False))
        concurrent = not is_spout and inspect.iscoroutinefunction(getattr(code, "process", None))
    except shared.catches:
        # The first start reports the same error.
        blocking = False
    if blocking or concurrent:
        from storm_dagster.worker.tasks.thread_bolts import AsyncBoltRunner, BlockingBoltRunner
        from storm_dagster.worker.tasks.thread_spouts import BlockingSpoutRunner

        if is_spout:
            spout = BlockingSpoutRunner(shared, context, part)
            spout.takes_peer_messages = takes_messages
            return spout
        return (AsyncBoltRunner if concurrent else BlockingBoltRunner)(shared, context, part)
    return (SpoutRunner if is_spout else BoltRunner)(shared, context, part)
