"""Simulated nimbus processes: the real daemon, without its sockets."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from storm_dagster.model.conf import ClusterConf
from storm_dagster.nimbus import daemon
from storm_dagster.nimbus.member import Nimbus
from storm_simulation.disks import MemoryBlobStore
from storm_simulation.kernel import Host, Process
from storm_simulation.nimbus_http import nimbus_handler
from storm_simulation.threads import THREADS, Event

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster

HTTP_PORT, THRIFT_PORT = 7621, 6627
_cluster: list[Cluster] = []


class _Listener:
    def __init__(self, port: int) -> None:
        process = THREADS.get().process
        self._name = (process.host.address if process is not None else "", port)

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        pass


class _Http:
    """``HttpService``: announces the nimbus on the simulated network."""

    def __init__(self, app: Nimbus, listener: _Listener, **_: Any) -> None:
        self._nimbus = app
        self.stop = lambda: None

    def start(self) -> None:
        process = THREADS.get().process
        assert process is not None
        cluster = _cluster[-1]
        self.stop = cluster.web.serve(
            self._nimbus.identity.http, process, nimbus_handler(self._nimbus)
        )
        cluster.nimbuses[process.host.name].nimbus = self._nimbus


class _Nothing:
    """A part that a simulation has no use for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ask = None

    def start(self) -> None:
        pass

    stop = close = start


def _open_store(conf: ClusterConf, folder: Path) -> MemoryBlobStore:
    process = THREADS.get().process
    assert process is not None
    return MemoryBlobStore(process.host)


def _host_of(conf: ClusterConf, *_: Any) -> str:
    return str(conf["storm.local.hostname"])


def install() -> None:
    """Take the sockets out of the daemon."""
    replaced: dict[str, Any] = {
        "listen": lambda host, port, key: _Listener(HTTP_PORT if "http" in key else THRIFT_PORT),
        "HttpService": _Http,
        "build_app": lambda nimbus, *_: nimbus,
        "ThriftService": _Nothing,
        "ClusterReader": _Nothing,
        "TopologyStats": _Nothing,
        "hold_folder": lambda *_: closing(_Listener(0)),
        "RunFile": SimpleNamespace(write=lambda *_, **__: SimpleNamespace(remove=lambda *_: None)),
        "open_blob_store": _open_store,
        "open_reads": lambda *_: None,
        "check_exposure": _host_of,
        "thrift_host": _host_of,
    }
    for name, value in replaced.items():
        assert hasattr(daemon, name), f"nimbus/daemon.py has no {name} any more"
        setattr(daemon, name, value)


class SimulatedNimbus:
    """One nimbus, on a machine of its own; started again it finds its disk."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
        self.cluster = cluster
        self.host = host
        self.process: Process | None = None
        self.nimbus: Nimbus | None = None
        self._stop: Event | None = None

    @property
    def up(self) -> bool:
        return self.process is not None and self.process.runs

    def start(self) -> None:
        if self.process is not None and not self.process.dead:
            # A process that is about to end is started after its end, once for all faults that
            # want it to run.
            is_ending = self._stop is not None and self._stop.is_set()
            if is_ending and self._start_soon not in self.process.at_end:
                self.process.at_end.append(self._start_soon)
            return
        conf = self.cluster.conf(**{"storm.local.hostname": self.host.name})
        home = self.cluster.home(self.host)
        process = self.process = self.cluster.process(f"nimbus-{self.host.name}", self.host)
        stop = self._stop = Event()
        process.at_end.append(self._ended)

        def main() -> None:
            process.kill(daemon.run(conf, home, self.host.name, stop))  # type: ignore[arg-type]

        process.spawn(main)

    def _start_soon(self) -> None:
        self.cluster.kernel.after(0.1, self.cluster.start_missing)

    def _ended(self) -> None:
        """Whoever supervises it starts a daemon again that ended by an error; a fault that ends it
        does that itself.
        """
        if self.process is not None and (self.process.status or 0) > 0:
            self.cluster.kernel.after(2.0, self.cluster.start_missing)

    def stop(self) -> None:
        """An ordered end."""
        if self.process is not None and self._stop is not None:
            self.process.deliver(self._stop.set)


def use(cluster: Cluster) -> None:
    """From now on nimbuses belong to that cluster."""
    _cluster[:] = [cluster]
