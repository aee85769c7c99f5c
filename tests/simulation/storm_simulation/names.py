"""Installation of the simulation's time, threads, chance and network in the modules of the product.

The product reaches them through the names of modules (``time.sleep``), so that replacing these
names is enough: not a line of it is changed. It is done once in a process that does nothing else.
"""

from __future__ import annotations

import importlib
import os as real_os
import queue as real_queue
import random as real_random
import secrets as real_secrets
import socket as real_socket
import sys
import threading as real_threading
import time as real_time
import uuid as real_uuid
from concurrent import futures as real_futures
from types import ModuleType
from typing import Any

import httpx as real_httpx

from storm_simulation import network, threads
from storm_simulation.threads import THREADS

MODULES = (
    "storm_dagster.nimbus.daemon",
    "storm_dagster.supervisor.daemon",
    "storm_dagster.worker.runtime.cluster_sync",
    "storm_dagster.worker.engine.system",
    "storm_dagster.operations.live.lifecycle",
    "storm_dagster.operations.live.rebalance",
    "storm_dagster.operations.live.healing",
    "storm_dagster.operations.upgrade",
    "storm_dagster.client.blobs",
    "storm_dagster.defs.healing.heartbeat_sensor",
    "storm_dagster.defs.healing.sensor_watch",
    "storm_dagster.core.invariants",
)


class _Stand:
    """A module, with other attributes in front."""

    def __init__(self, module: ModuleType, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _rng() -> real_random.Random:
    return THREADS.get().rng


def _uuid4() -> real_uuid.UUID:
    return real_uuid.UUID(int=_rng().getrandbits(128), version=4)


def _getpid() -> int:
    kernel = THREADS.kernel
    process = None if kernel is None else kernel.process
    return real_os.getpid() if process is None else process.pid


def _boot_clock() -> float:
    return THREADS.get().boot()


def _boot_id() -> str:
    process = THREADS.get().process
    return (
        "boot-none"
        if process is None
        else f"boot-{process.host.name}-{process.host.files.get('boots', 0)}"
    )


def _getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
    found = THREADS.get().hosts.get(host)
    if found is None:
        raise real_socket.gaierror(f"{host} is not known")
    return [(None, None, None, "", (found.address, 0))]


def _random() -> float:
    return _rng().random()


def install() -> None:
    """Replace the names, in every module of the product that a simulation runs."""
    for name in MODULES:
        importlib.import_module(name)
    import storm_dagster.host.clock as clock
    from storm_dagster.operations.context import OperationsContext

    secrets = _Stand(
        real_secrets,
        token_hex=lambda size=16: _rng().getrandbits(8 * size).to_bytes(size, "big").hex(),
        token_bytes=lambda size=16: _rng().getrandbits(8 * size).to_bytes(size, "big"),
    )
    replaced: dict[int, Any] = {
        id(real_time): threads.time,
        id(real_threading): threads.threading,
        id(real_queue): threads.queue,
        id(real_uuid): _Stand(real_uuid, uuid4=_uuid4),
        id(real_secrets): secrets,
        id(real_random): _Stand(
            real_random, random=_random, choice=lambda many: _rng().choice(many)
        ),
        id(real_os): _Stand(real_os, getpid=_getpid),
        id(real_socket): _Stand(real_socket, getaddrinfo=_getaddrinfo),
        id(real_httpx): network.httpx,
        id(real_futures.ThreadPoolExecutor): threads.ThreadPoolExecutor,
        id(real_futures.wait): threads.wait,
        id(clock.boot_clock): _boot_clock,
        id(clock.boot_id): _boot_id,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("storm_dagster.") and name != clock.__name__:
            for attribute, value in list(vars(module).items()):
                if id(value) in replaced:
                    setattr(module, attribute, replaced[id(value)])
    kinds = {
        id(real_time.sleep): threads.time.sleep,
        id(real_time.monotonic): threads.time.monotonic,
    }
    kinds[id(real_random.random)] = _random
    defaults = OperationsContext.__init__.__defaults__ or ()
    OperationsContext.__init__.__defaults__ = tuple(
        kinds.get(id(value), value) for value in defaults
    )
