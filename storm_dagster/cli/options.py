"""Options that every verb takes, and the invocation that they make."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from storm_dagster.cli.log_setup import configure_logging
from storm_dagster.cli.output import say
from storm_dagster.client.http import NimbusClient
from storm_dagster.model.conf import ClusterConf, parse_assignments
from storm_dagster.model.endpoints import home_dir
from storm_dagster.model.home_conf import cluster_conf

__all__ = ["Invocation", "verb"]


@dataclass
class Invocation:
    """One call of a verb: where its cluster is, and how it answers."""

    home: Path
    conf_dir: Path | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    json: bool = False
    verbose: bool = False
    dry_run: bool = False
    wait: bool = True
    _conf: ClusterConf | None = None

    @property
    def conf(self) -> ClusterConf:
        """The cluster conf as clients see it, merged at first use."""
        if self._conf is None:
            self._conf = cluster_conf(self.home, self.conf_dir, self.overrides)
        return self._conf

    def nimbus(self, patience: float = 30.0) -> NimbusClient:
        """A client of the cluster; the caller closes it."""
        return NimbusClient.of_cluster(
            self.conf, self.home, conf_dir=self.conf_dir, patience=patience, waiting=say
        )


def verb(
    name: str, *, changes: bool = False, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """A click command whose function takes an :class:`Invocation` first.

    ``changes`` adds ``--dry-run`` and ``--wait/--no-wait``.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        @functools.wraps(function)
        def call(
            as_json: bool,
            home: str | None,
            conf_dir: str | None,
            cluster_pairs: tuple[str, ...],
            verbose: bool,
            dry_run: bool = False,
            wait: bool = True,
            **rest: Any,
        ) -> Any:
            configure_logging(verbose=verbose)
            invocation = Invocation(
                home=home_dir(home),
                conf_dir=Path(conf_dir).expanduser().absolute() if conf_dir else None,
                overrides=parse_assignments(cluster_pairs, source="-c"),
                json=as_json,
                verbose=verbose,
                dry_run=dry_run,
                wait=wait,
            )
            return function(invocation, **rest)

        options = [
            click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output."),
            click.option(
                "--home",
                metavar="DIR",
                help="State folder of a local cluster. [default: STORM_DAGSTER_HOME, else ./.storm-dagster]",
            ),
            click.option(
                "--conf-dir", metavar="DIR", help="Folder of storm.yaml; its nimbus.seeds name the cluster."
            ),
            click.option(
                "-c", "cluster_pairs", metavar="KEY=VALUE", multiple=True, help="Cluster conf; VALUE is YAML."
            ),
            click.option("-v", "--verbose", is_flag=True, help="Debug log on standard error."),
        ]
        if changes:
            options += [
                click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
                click.option("--wait/--no-wait", default=True, help="Wait for the effect. [default: wait]"),
            ]
        wrapped: Any = call
        for option in reversed(options):
            wrapped = option(wrapped)
        return click.command(name, **settings)(wrapped)

    return decorate
