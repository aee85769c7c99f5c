"""Several workers of one topology in this process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import Self

from storm_dagster.api import TopologyBuilder
from storm_dagster.model.conf import default_conf
from storm_dagster.model.names import ACKER
from storm_dagster.model.slot import Slot
from storm_dagster.model.wire import decode_frame
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.dataplane.transport import Transport
from storm_dagster.worker.engine.native import NativeEngine
from storm_dagster.worker.tasks.runner import Runner
from storm_dagster.worker.tasks.shared import Shared


class LocalWorkers:
    """Workers with real sockets, which run in turn; a context manager that closes them.

    ``slots``: component, ``__acker`` perhaps, -> index of its worker. ``state_dir``: for components
    that keep state.
    """

    def __init__(
        self,
        topology: TopologyBuilder,
        slots: Mapping[str, int],
        conf: Mapping[str, Any],
        state_dir: Path | None = None,
    ) -> None:
        spec = topology.build()
        components = {task: name for task, (name, _, _) in enumerate(spec.components(), 1)}
        if ACKER in slots:
            components[len(components) + 1] = ACKER
        self.components = components
        self.errors: list[BaseException] = []
        self.engines: list[NativeEngine] = []
        self.transports = [
            Transport("127.0.0.1", 0, secrets.token_hex(8), 100) for _ in set(slots.values())
        ]
        for slot, transport in zip(self.places(), self.transports, strict=True):
            shared = Shared(
                conf={**default_conf(), **conf},
                owns=lambda: True,
                wake=lambda: None,
                report=lambda task, component, error, where: self.errors.append(error),
            )
            engine = NativeEngine(
                topology_id="t-1-1",
                spec=spec,
                conf=shared.conf,
                shared=shared,
                transport=transport,
                slot=slot,
                state_dir=state_dir,
            )
            self.engines.append(engine)
        self.place(1, slots)
        for engine in self.engines:
            engine.activate(True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def places(self) -> list[Slot]:
        """The slots of the workers."""
        return [Slot(f"s{index}", index) for index in range(len(self.transports))]

    def place(self, version: int, slots: Mapping[str, int], gone: int | None = None) -> None:
        """Place the tasks; the worker ``gone`` has stopped."""
        places = self.places()
        placed = {task: places[slots[name]] for task, name in self.components.items()}
        addresses = {
            slot: f"127.0.0.1:{transport.port}"
            for slot, transport in zip(places, self.transports, strict=True)
        }
        living = [index for index in range(len(places)) if index != gone]
        tokens = {self.transports[index].token: places[index] for index in living}
        for index in living:
            own = frozenset(task for task, place in placed.items() if place == places[index])
            ready = frozenset(places)
            self.engines[index].place(
                Placement(version, placed, addresses, self.components, own, own, tokens, ready)
            )

    def turn(self, but: int | None = None) -> None:
        """One pass of each worker, ``but`` one that has stopped."""
        for index, (engine, transport) in enumerate(
            zip(self.engines, self.transports, strict=True)
        ):
            if index == but:
                continue
            for message in transport.receive(32):
                engine.deliver(decode_frame(message[-1]), len(message[-1]))
            engine.run(time.monotonic())
            transport.flush(engine.cannot_travel)

    def runner(self, component: str) -> Runner:
        """The first task of a component."""
        for engine in self.engines:
            for runner in engine.runners.values():
                if runner.component == component:
                    return runner
        raise AssertionError(f"no worker runs {component}")

    def close(self) -> None:
        """Close all of them."""
        for engine, transport in zip(self.engines, self.transports, strict=True):
            engine.close()
            transport.close()
