"""The verbs of the command line, and the exit codes of their outcomes.

The module of a verb is imported when the verb is used: ``submit`` must not pay for the imports of
``dev``. Arguments and options stand beside the function of each verb.
"""

import copy
import functools
import importlib
import json
import logging
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import click

from storm_dagster.host.requirements import needs
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.verbs import VERBS as CHANGES
from storm_dagster.model.version import __version__


class ListedVerb(NamedTuple):
    """A verb in the list of ``storm-dagster --help``."""

    module: str
    """Module of this package whose ``COMMANDS`` have its command."""
    summary: str


class FormerVerb(NamedTuple):
    """A verb of the release before, which this release still accepts."""

    module: str
    """Module of this package whose ``COMMANDS`` have its command."""
    instead: str
    """The verb to use instead."""


def _change_verbs() -> dict[str, ListedVerb]:
    """The verbs that change a topology, with short summaries."""
    verbs: dict[str, ListedVerb] = {}
    for row in CHANGES.values():
        first_sentence = row.summary.partition(". ")[0].rstrip(".")
        verbs[row.name] = ListedVerb("change_verbs", first_sentence)
    return verbs


VERBS: dict[str, ListedVerb] = {
    "run": ListedVerb("run_verb", "Run a topology in this process, without a cluster"),
    "dev": ListedVerb("cluster_verbs", "Start a whole local cluster"),
    "stop": ListedVerb("cluster_verbs", "Stop a local cluster"),
    "status": ListedVerb("cluster_verbs", "Processes, nimbuses, supervisors and topologies"),
    "doctor": ListedVerb("doctor", "Check this machine and the cluster, and print fixes"),
    "submit": ListedVerb("change_verbs", "Submit a topology"),
    "jar": ListedVerb("change_verbs", "Run a program that submits topologies"),
    "list": ListedVerb("read_commands", "List topologies"),
    "show": ListedVerb("read_commands", "One topology: tasks, slots, stats, errors"),
    "visualize": ListedVerb("read_commands", "Picture of a topology with what flows in it now"),
    **_change_verbs(),
    "blacklist": ListedVerb("operate_verbs", "Hosts that get no new work"),
    "pause-healing": ListedVerb("healing_verbs", "Stop moving tasks of dead workers for a while"),
    "resume-healing": ListedVerb("healing_verbs", "End the pause of healing"),
    "blob": ListedVerb("operate_verbs", "Blobs: list, read, store, delete"),
    "token": ListedVerb("token_verbs", "Tokens for clients that cannot sign requests"),
    "explain": ListedVerb("read_commands", "Reasons for the placement of tasks"),
    "plan": ListedVerb("read_commands", "Plan a placement without a cluster"),
    "conf": ListedVerb("read_commands", "The cluster conf and where each value comes from"),
    "errors": ListedVerb("read_commands", "Errors of a topology's tasks"),
    "state": ListedVerb("paged_verbs", "State of a stateful bolt, key by key"),
    "dead-letters": ListedVerb(
        "paged_verbs", "Tuples that failed too often: list, export, replay, delete"
    ),
    "logs": ListedVerb("log_verbs", "Logs of a topology's workers"),
    "tail": ListedVerb("log_verbs", "Follow all logs of a local cluster"),
    "daemon": ListedVerb(
        "daemon_verbs", "Run a daemon: zookeeper, spark, nimbus, supervisor, worker, web or code"
    ),
}
"""Verb -> its module and its line, in the order of the list."""

FORMER_VERBS: dict[str, FormerVerb] = {
    "supervisors": FormerVerb("read_commands", "status"),
    "nimbuses": FormerVerb("read_commands", "status"),
    "zookeeper": FormerVerb("daemon_verbs", "daemon zookeeper"),
    "spark": FormerVerb("daemon_verbs", "daemon spark"),
    "nimbus": FormerVerb("daemon_verbs", "daemon nimbus"),
    "supervisor": FormerVerb("daemon_verbs", "daemon supervisor"),
    "worker": FormerVerb("daemon_verbs", "daemon worker"),
    "web": FormerVerb("daemon_verbs", "daemon web"),
    "warm-runs": FormerVerb("daemon_verbs", "daemon code"),
}
"""Verb of the release before -> its module, and the verb to use instead.

It is not listed. Options, output and exit codes are those of the release before.
"""

_ROLES = ("zookeeper", "spark", "nimbus", "supervisor", "worker", "web", "code", "warm-runs")
"""Roles of ``daemon``."""


def _command_of(module_name: str, name: str) -> click.Command:
    """The command of that name in a module of this package."""
    module = importlib.import_module(f"storm_dagster.cli.{module_name}")
    commands: Mapping[str, click.Command] = module.COMMANDS
    return commands[name]


def _former_command(command: click.Command, name: str, instead: str) -> click.Command:
    """A hidden copy of a command, which prints a notice.

    The notice, on standard error, names the verb to use instead.
    """
    notice = f"`storm-dagster {name}` is deprecated: use `storm-dagster {instead}`"
    function = command.callback
    assert function is not None

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        click.echo(notice, err=True)
        return function(*args, **options)

    former = copy.copy(command)
    former.callback = call
    former.hidden = True
    former.epilog = f"Deprecated: use `storm-dagster {instead}`."
    return former


def _verb_in(words: list[str]) -> str:
    """The verb that a command line names, for messages.

    Of ``daemon`` also the role.
    """
    verb = _first_of(words, (*VERBS, *FORMER_VERBS))
    if verb != "daemon":
        return verb
    role = _first_of(words, _ROLES)
    return f"daemon {role}".rstrip()


def _first_of(words: list[str], names: Collection[str]) -> str:
    """The first word that is one of the names; empty if none is."""
    for word in words:
        if word in names:
            return word
    return ""


class _LazyGroup(click.Group):
    """Command group that imports a command at its first use.

    The table has the help lines.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in VERBS:
            return _command_of(VERBS[cmd_name].module, cmd_name)
        if cmd_name in FORMER_VERBS:
            former = FORMER_VERBS[cmd_name]
            command = _command_of(former.module, cmd_name)
            return _former_command(command, cmd_name, former.instead)
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="storm-dagster")
def cli() -> None:
    """Run Storm topologies in Python, from Dagster."""


def _fail(kind: str, message: str, code: int, as_json: bool) -> NoReturn:
    """Print an error, as JSON on standard output if ``as_json``, and exit."""
    if as_json:
        sys.stdout.write(json.dumps({"error": {"type": kind, "message": message}}) + "\n")
    else:
        from storm_dagster.cli.output import plain

        sys.stderr.write(plain(f"{kind}: {message}") + "\n")
    _flush()
    sys.exit(code)


def _flush() -> None:
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()


def _wants_json(words: list[str]) -> bool:
    """True if ``--json`` is among the words before ``--``.

    Those after it are a program's.
    """
    own_words = words[: words.index("--")] if "--" in words else words
    return "--json" in own_words


def run() -> NoReturn:
    """Run the verb of ``sys.argv``.

    Exit codes: 0, the error's branch (2 to 6), 130 after Ctrl-C, else 1.
    """
    # Read before the verb runs: `jar` replaces sys.argv by the arguments of its program.
    words = sys.argv[1:]
    as_json = _wants_json(words)
    try:
        with needs(f"`storm-dagster {_verb_in(words)}`"):
            code = cli.main(standalone_mode=False, prog_name="storm-dagster")
    except StormDagsterError as error:
        _fail(error.kind, error.message, error.exit_code, as_json)
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(error.format_message() + "\n")
        sys.exit(2)
    except click.ClickException as error:
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f" (see `{error.ctx.command_path} --help`)"
        _fail("InvalidRequest", error.format_message() + hint, 2, as_json)
    except (click.Abort, KeyboardInterrupt):
        _fail("Interrupted", "interrupted", 130, as_json)
    except BrokenPipeError:
        # The reader of the output has closed it.
        sys.stdout = None
        sys.exit(0)
    except Exception as error:
        # Daemons log from INFO up, client verbs only with --verbose.
        logging.getLogger(__name__).info("unexpected", exc_info=True)
        text = f"unexpected: {error!r}"
        exit_code = 1
        # Errors of connections are of this type, too; they name no file.
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}: check its disk and permissions"
            exit_code = 4
        _fail(type(error).__name__, f"{text}; run with --verbose for the trace", exit_code, as_json)
    _flush()
    sys.exit(code if isinstance(code, int) else 0)
