"""The ports of a local cluster.

They are chosen before the first daemon starts, so that a restarted daemon uses the same ports.
"""

import random
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from storm_dagster.cli.dev.options import DevOptions
from storm_dagster.host.endpoints import DevFile
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Corrupt, InvalidRequest, Unavailable

_AUTO = range(20_000, 32_000)
"""Ports of ``--ports auto``.

They are below the ranges from which systems take ports for outgoing connections (Linux: from 32768
on). So a client does not take the port of a daemon that is being restarted.
"""
_WEB_PORT = 3000
"""Dagster's own default for its webserver."""


@dataclass(frozen=True)
class DevPorts:
    """Every port of one local cluster."""

    zookeeper: int
    spark: int
    webserver: int
    """0 if the cluster has no Dagster of its own."""
    thrift: tuple[int, ...]
    """One for each nimbus."""
    http: tuple[int, ...]
    """One for each nimbus."""
    supervisor_http: tuple[int, ...]
    """Log service of each supervisor."""
    slots: tuple[tuple[int, ...], ...]
    """Worker ports of each supervisor."""
    ensemble: tuple[tuple[int, int, int], ...] = ()
    """(client, peer, election) of each ZooKeeper server; empty for a single one."""
    spark_master: int = 0
    """Of Spark's standalone master; 0 without one."""

    def to_document(self) -> dict[str, Any]:
        """The ports as a map of JSON, as ``HOME/dev.json`` has them."""
        return msgspec.to_builtins(self)

    def all(self) -> list[int]:
        """Every port of the cluster."""
        ports = [self.zookeeper, self.spark]
        if self.webserver:
            ports.append(self.webserver)
        ports += [*self.thrift, *self.http, *self.supervisor_http]
        for slots in self.slots:
            ports += slots
        for server in self.ensemble:
            ports += [port for port in server if port != self.zookeeper]
        if self.spark_master:
            ports.append(self.spark_master)
        return ports


def is_free(port: int) -> bool:
    """True if a server can listen on the port of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _default_ports(conf: ClusterConf, options: DevOptions) -> DevPorts:
    """Return the ports of the conf, which must be free and differ.

    :class:`Unavailable` names those that are taken, :class:`InvalidRequest` says that two coincide.
    """
    ports = _ports_of_conf(conf, options)
    busy_ports = _busy(ports.all())
    if busy_ports:
        hint = ""
        if _WEB_PORT in busy_ports:
            hint = f"; if a Dagster of yours has {_WEB_PORT}, --no-dagster uses it"
        raise Unavailable(
            f"ports {', '.join(map(str, busy_ports))} are taken on this machine: end the processes "
            f"that listen there, or use `storm-dagster dev --ports auto`{hint}"
        )
    if len(set(ports.all())) != len(ports.all()):
        raise InvalidRequest(
            "some default ports coincide: use --ports auto, or set them in HOME/storm.yaml"
        )
    return ports


def _ports_of_conf(conf: ClusterConf, options: DevOptions) -> DevPorts:
    """The ports of the conf for the first daemon of each role, and others after them."""
    supervisors, slots, nimbuses, zookeepers = options.size
    conf_slots = sorted(conf["supervisor.slots.ports"])
    # The conf has the ports of the first supervisor; those of the others follow above them.
    next_port = conf_slots[-1] + 1
    slot_ports = [*conf_slots, *range(next_port, next_port + supervisors * slots)]
    client = conf["storm.zookeeper.port"]
    ensemble: tuple[tuple[int, int, int], ...] = ()
    if zookeepers > 1:
        # 2888 and 3888 are ZooKeeper's defaults.
        ensemble = tuple((client + i, 2888 + i, 3888 + i) for i in range(zookeepers))
    return DevPorts(
        zookeeper=client,
        spark=conf["spark.connect.port"],
        webserver=_WEB_PORT if options.own_dagster else 0,
        thrift=tuple(conf["nimbus.thrift.port"] + index for index in range(nimbuses)),
        # By default 7621 + 10 n are ports of nimbuses, and the nine between two of them ports of
        # supervisors.
        http=tuple(conf["nimbus.http.port"] + 10 * index for index in range(nimbuses)),
        supervisor_http=tuple(
            conf["supervisor.http.port"] + index + (index // 9) for index in range(supervisors)
        ),
        slots=tuple(
            tuple(slot_ports[index * slots : (index + 1) * slots]) for index in range(supervisors)
        ),
        ensemble=ensemble,
        spark_master=7077 if options.spark_workers else 0,
    )


def _auto_ports(options: DevOptions) -> DevPorts:
    """Free ports for a cluster of this size, chosen at random.

    :class:`InvalidRequest` for a size that needs too many, :class:`Unavailable` if too few are
    free.
    """
    supervisors, slots, nimbuses, zookeepers = options.size
    # Spark, the webserver and a spare one; a nimbus has two ports, a supervisor one beside its
    # slots, a ZooKeeper server three.
    number = 3 + 2 * nimbuses + supervisors * (1 + slots) + 3 * zookeepers
    if options.spark_workers:
        number += 1
    if number > len(_AUTO) // 2:
        raise InvalidRequest(
            f"{number} ports are too many for one machine: ask for fewer supervisors or slots"
        )
    ports = iter(free_ports(number))
    servers = [(next(ports), next(ports), next(ports)) for _ in range(zookeepers)]
    spark = next(ports)
    webserver = next(ports)
    thrift = _take(ports, nimbuses)
    http = _take(ports, nimbuses)
    supervisor_http = _take(ports, supervisors)
    slot_ports = [tuple(sorted(_take(ports, slots))) for _ in range(supervisors)]
    return DevPorts(
        zookeeper=servers[0][0],
        spark=spark,
        webserver=webserver if options.own_dagster else 0,
        thrift=thrift,
        http=http,
        supervisor_http=supervisor_http,
        slots=tuple(slot_ports),
        ensemble=tuple(servers) if zookeepers > 1 else (),
        spark_master=next(ports) if options.spark_workers else 0,
    )


def free_ports(number: int) -> list[int]:
    """That many free ports of the range, chosen at random.

    :class:`Unavailable` if there are fewer.
    """
    ports: list[int] = []
    for port in random.sample(_AUTO, len(_AUTO)):
        if is_free(port):
            ports.append(port)
        if len(ports) == number:
            return ports
    raise Unavailable(
        f"fewer than {number} ports from {_AUTO.start} to {_AUTO.stop} are free: end what uses them"
    )


def _take(ports: Iterator[int], number: int) -> tuple[int, ...]:
    return tuple(next(ports) for _ in range(number))


def _shape(ports: DevPorts) -> tuple[int, int, int, bool, set[int]]:
    """Numbers of supervisors, nimbuses, ensemble servers, Spark masters, and slots.

    Ports of the same shape serve the same cluster.
    """
    sizes = {len(slots) for slots in ports.slots}
    return len(ports.slots), len(ports.http), len(ports.ensemble), ports.spark_master > 0, sizes


def _busy(ports: Iterable[int]) -> list[int]:
    """Those of the ports at which no server can listen now, sorted."""
    return sorted({port for port in ports if not is_free(port)})


def choose_ports(options: DevOptions, conf: ClusterConf, home: Path) -> DevPorts:
    """Choose the ports of a cluster with these options.

    ``default``: the ports of the conf; :class:`Unavailable` names those that are taken. ``auto``:
    free ports. They are the ports of the last cluster in this HOME
    (:class:`~storm_dagster.host.endpoints.DevFile`) if these are still free, so that assignments
    stay true.
    """
    if options.ports == "default":
        return _default_ports(conf, options)
    ports = _auto_ports(options)
    former = _ports_of(home)
    if former is None or _shape(former) != _shape(ports):
        return ports
    # A HOME whose Dagster is now another one keeps its slots, which assignments name.
    webserver = 0
    if options.own_dagster:
        webserver = former.webserver or ports.webserver
    former = replace(former, webserver=webserver)
    return ports if _busy(former.all()) else former


def _ports_of(home: Path) -> DevPorts | None:
    """The ports of the last cluster in ``home``.

    ``None`` if there was none, or the file is damaged.
    """
    try:
        return msgspec.convert(DevFile.read(home).ports, DevPorts)
    except (OSError, Corrupt, msgspec.MsgspecError):
        return None
