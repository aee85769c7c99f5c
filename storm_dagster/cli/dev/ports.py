"""The ports of a local cluster, chosen before anything starts, so that a restarted daemon finds its
own.
"""

import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from storm_dagster.cli.dev.options import DevOptions
from storm_dagster.host.endpoints import DevFile
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Corrupt, InvalidRequest, Unavailable

# Below the ranges from which systems take ports for outgoing connections (Linux: from 32768), so
# that a daemon that is being restarted does not find its port taken by some client.
_AUTO = range(20_000, 32_000)
_WEB_PORT = 3000


@dataclass(frozen=True)
class DevPorts:
    """Every port of one local cluster."""

    zookeeper: int
    spark: int
    webserver: int
    thrift: tuple[int, ...]
    """One for each nimbus."""
    http: tuple[int, ...]
    supervisor_http: tuple[int, ...]
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
        """All of them."""
        single = [self.zookeeper, self.spark, self.webserver]
        flat = [port for ports in self.slots for port in ports]
        flat += [port for ports in self.ensemble for port in ports if port != self.zookeeper]
        flat += [self.spark_master] if self.spark_master else []
        return [*single, *self.thrift, *self.http, *self.supervisor_http, *flat]


def is_free(port: int) -> bool:
    """Whether a server could listen on the port of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _default(conf: ClusterConf, options: DevOptions) -> DevPorts:
    supervisors, slots, nimbuses, zookeepers = options.size
    first = sorted(conf["supervisor.slots.ports"])
    # The conf's ports are those of the first supervisor; further ones on this host follow above
    # them.
    own = [*first, *range(first[-1] + 1, first[-1] + 1 + supervisors * slots)]
    client = conf["storm.zookeeper.port"]
    return DevPorts(
        zookeeper=client,
        spark=conf["spark.connect.port"],
        webserver=_WEB_PORT,
        thrift=tuple(conf["nimbus.thrift.port"] + index for index in range(nimbuses)),
        http=tuple(conf["nimbus.http.port"] + 10 * index for index in range(nimbuses)),
        supervisor_http=tuple(
            conf["supervisor.http.port"] + index + (index // 9) for index in range(supervisors)
        ),
        slots=tuple(
            tuple(own[index * slots : (index + 1) * slots]) for index in range(supervisors)
        ),
        # ZooKeeper's own defaults for the other two.
        ensemble=tuple((client + i, 2888 + i, 3888 + i) for i in range(zookeepers))
        if zookeepers > 1
        else (),
        spark_master=7077 if options.spark_workers else 0,
    )


def _auto(options: DevOptions) -> DevPorts:
    supervisors, slots, nimbuses, zookeepers = options.size
    wanted = (
        3 + 2 * nimbuses + supervisors * (1 + slots) + 3 * zookeepers + bool(options.spark_workers)
    )
    if wanted > len(_AUTO) // 2:
        raise InvalidRequest(
            f"{wanted} ports are too many for one machine: ask for fewer supervisors or slots"
        )
    picked = list(islice(filter(is_free, random.sample(_AUTO, len(_AUTO))), wanted))
    if len(picked) < wanted:
        raise Unavailable(
            f"fewer than {wanted} ports from {_AUTO.start} to {_AUTO.stop} are free: end what uses them"
        )
    take = iter(picked)
    servers = [(next(take), next(take), next(take)) for _ in range(zookeepers)]
    return DevPorts(
        zookeeper=servers[0][0],
        spark=next(take),
        webserver=next(take),
        thrift=tuple(next(take) for _ in range(nimbuses)),
        http=tuple(next(take) for _ in range(nimbuses)),
        supervisor_http=tuple(next(take) for _ in range(supervisors)),
        slots=tuple(tuple(sorted(next(take) for _ in range(slots))) for _ in range(supervisors)),
        ensemble=tuple(servers) if zookeepers > 1 else (),
        spark_master=next(take) if options.spark_workers else 0,
    )


def _shape(ports: DevPorts) -> tuple[int, int, int, bool, set[int]]:
    sizes = {len(slots) for slots in ports.slots}
    return len(ports.slots), len(ports.http), len(ports.ensemble), ports.spark_master > 0, sizes


def _busy(ports: Iterable[int]) -> list[int]:
    return sorted({port for port in ports if not is_free(port)})


def choose_ports(options: DevOptions, conf: ClusterConf, home: Path) -> DevPorts:
    """The ports of a cluster with these options.

    ``default``: those of the conf; :class:`Unavailable` names the ones that are taken. ``auto``:
    free ones, the same as last time in this HOME (:class:`~storm_dagster.host.endpoints.DevFile`)
    where they are free still, so that assignments stay true.
    """
    if options.ports == "default":
        ports = _default(conf, options)
        if taken := _busy(ports.all()):
            raise Unavailable(
                f"ports {', '.join(map(str, taken))} are taken on this machine: end what listens there, or use "
                "`storm-dagster dev --ports auto`"
            )
        if len(set(ports.all())) != len(ports.all()):
            raise InvalidRequest(
                "some default ports coincide: use --ports auto, or set them in HOME/storm.yaml"
            )
    else:
        ports = _auto(options)
        former = _ports_of(home)
        if former is not None and _shape(former) == _shape(ports) and not _busy(former.all()):
            ports = former
    return ports


def _ports_of(home: Path) -> DevPorts | None:
    """The ports of the newest cluster in ``home``; ``None`` when it has had none, or the file is
    damaged.
    """
    try:
        return msgspec.convert(DevFile.read(home).ports, DevPorts)
    except (OSError, Corrupt, msgspec.MsgspecError):
        return None
