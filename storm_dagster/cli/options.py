"""Decorators of verbs, and the invocation that the common options make."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
import httpx

from storm_dagster.cli.log_setup import configure_logging
from storm_dagster.cli.output import notify
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.leader import is_nimbus
from storm_dagster.host.endpoints import cluster_conf, home_dir
from storm_dagster.host.processes import RunFile
from storm_dagster.model.conf import ClusterConf, parse_assignments, seed_urls
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.settings import Security, zookeeper_tls

_PROBE_SECS = 1.0
"""Time in which a nimbus or a ZooKeeper server must accept a connection."""


@dataclass
class Invocation:
    """One call of a verb: its cluster, and the form of its output."""

    home: Path
    """HOME: ``--home``, else ``STORM_DAGSTER_HOME``, else ``./.storm-dagster``."""
    conf_dir: Path | None = None
    """``--conf-dir``: the cluster is that of its storm.yaml, and not that of HOME."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values of ``-c``."""
    json: bool = False
    """True if the output is one JSON document."""
    dry_run: bool = False
    wait: bool = True

    @functools.cached_property
    def conf(self) -> ClusterConf:
        """The cluster conf as clients see it, merged at first use."""
        return cluster_conf(self.home, self.conf_dir, self.overrides)

    def nimbus(self, patience: float = 30.0) -> NimbusClient:
        """Client of the cluster; the caller closes it.

        With ``patience``, in seconds, a call waits for a leader. The first call still raises
        :class:`Unavailable` at once if no process of HOME lives and neither a nimbus nor ZooKeeper
        responds at an address that the conf names.
        """
        require = self._require_cluster if patience > 0 else None
        return NimbusClient.of_cluster(
            self.conf,
            self.home,
            conf_dir=self.conf_dir,
            patience=patience,
            waiting=notify,
            require=require,
        )

    def _require_cluster(self) -> None:
        """Raise :class:`Unavailable` if no cluster exists to wait for: see :meth:`nimbus`."""
        if self.conf_dir is None and any(record.alive() for record in RunFile.read_all(self.home)):
            return
        seeds = seed_urls(self.conf)
        if self._is_reachable(seeds):
            return
        place = f"the storm.yaml of {self.conf_dir}" if self.conf_dir else f"{self.home} (HOME)"
        raise Unavailable(
            f"no cluster is there: looked in {place}, and for a nimbus at {', '.join(seeds)} "
            "(nimbus.seeds, "
            f"{self.conf.origins['nimbus.seeds']}): start one with `storm-dagster dev`, or name "
            "it: --home or "
            "STORM_DAGSTER_HOME for a local one, --conf-dir with the folder of its storm.yaml, or "
            "-c nimbus.seeds=[host:port]"
        )

    def _is_reachable(self, seeds: Sequence[str]) -> bool:
        """True if a nimbus or a ZooKeeper server of the conf responds."""
        from storm_dagster.zk.embedded import server_address, server_answers

        conf = self.conf
        servers: list[str] = []
        # The default address may be another cluster's ZooKeeper.
        if conf.origins["storm.zookeeper.servers"] != "default":
            servers = conf["storm.zookeeper.servers"]
        tls = zookeeper_tls(conf)
        with (
            httpx.Client(**Security.of(conf).client_options()) as http,
            ThreadPoolExecutor(len(seeds) + len(servers) + 1) as pool,
        ):
            probes = [pool.submit(is_nimbus, http, url, _PROBE_SECS) for url in seeds]
            for server in servers:
                host, port = server_address(server, conf)
                probes.append(pool.submit(server_answers, host, port, _PROBE_SECS, tls))
            return any(probe.result() for probe in probes)


Function = TypeVar("Function", bound=Callable[..., Any])


def _common_options(function: Function) -> Function:
    """Add the options of every verb."""
    options = (
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="Print one JSON document on standard output.",
        ),
        click.option(
            "--home",
            metavar="DIR",
            help=(
                "State folder of a local cluster. [default: STORM_DAGSTER_HOME, else"
                " ./.storm-dagster]"
            ),
        ),
        click.option(
            "--conf-dir",
            metavar="DIR",
            help="Folder of storm.yaml and storm.d/*.yaml; their nimbus.seeds name the cluster.",
        ),
        click.option(
            "-c",
            "cluster_pairs",
            metavar="KEY=VALUE",
            multiple=True,
            help="Cluster conf; VALUE is YAML.",
        ),
        click.option("-v", "--verbose", is_flag=True, help="Debug log on standard error."),
    )
    return add_options(options, function)


def change_options(function: Function) -> Function:
    """Add ``--dry-run`` and ``--wait/--no-wait``, which the invocation has."""
    options = (
        click.option("--dry-run", is_flag=True, help="Show the effect without changing anything."),
        click.option("--wait/--no-wait", default=True, help="Wait for the effect. [default: wait]"),
    )
    return add_options(options, function)


def topology_options(function: Function) -> Function:
    """Add the options of a topology's conf and packages."""
    options = (
        click.option(
            "--conf",
            "pairs",
            metavar="KEY=VALUE",
            multiple=True,
            help="Topology conf; VALUE is YAML.",
        ),
        click.option("--conf-file", metavar="FILE", help="Topology conf as YAML or JSON."),
        click.option(
            "--requirements", metavar="FILE", help="Vendor these packages into the archive."
        ),
    )
    return add_options(options, function)


def code_options(function: Function) -> Function:
    """Add the options of new code."""
    timeout = click.option(
        "--timeout",
        type=float,
        default=300.0,
        show_default=True,
        help="Longest wait, seconds.",
    )
    return timeout(topology_options(function))


def add_options(options: Sequence[Callable[[Function], Function]], function: Function) -> Function:
    """Add options to a command's function, in the order of its help."""
    # Like decorators, the last one is applied first.
    for option in reversed(options):
        function = option(function)
    return function


def verb(name: str, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a click command of a function of an :class:`Invocation`.

    Decorators below this one add its arguments and options. ``settings`` are those of
    :func:`click.command`.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        @functools.wraps(function)
        def call(**options: Any) -> Any:
            home = options.pop("home")
            conf_dir = options.pop("conf_dir")
            configure_logging(verbose=options.pop("verbose"))
            invocation = Invocation(
                home=home_dir(home),
                conf_dir=Path(conf_dir).expanduser().absolute() if conf_dir else None,
                overrides=parse_assignments(options.pop("cluster_pairs"), source="-c"),
                json=options.pop("as_json"),
                dry_run=options.pop("dry_run", False),
                wait=options.pop("wait", True),
            )
            return function(invocation, **options)

        return click.command(name, **settings)(_common_options(call))

    return decorate


class _Verbs(click.Group):
    """Group of the verbs of one thing, such as ``blob``.

    The common options may also stand before the verb: ``blob --json list``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Moves the options before the verb after it, where its own parser takes them.
        common: list[str] = []
        words = list(args)
        while words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
            option = words.pop(0)
            common.append(option)
            if option in ("--home", "--conf-dir", "-c") and words:
                value = words.pop(0)
                common.append(value)
        verb_word = words[:1]
        return super().parse_args(ctx, [*verb_word, *common, *words[1:]])


def verb_group(name: str, text: str, *commands: click.Command) -> click.Group:
    """Make a command whose verbs are ``commands``."""
    return _Verbs(name, {str(command.name): command for command in commands}, help=text)
