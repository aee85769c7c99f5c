"""The grammar of the command line, ``verbs.yaml``, and how a verb's outcome becomes output and an
exit code.

Verbs are imported when they are used: ``submit`` must not pay for what ``dev`` needs.
"""

import copy
import functools
import importlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import click

from storm_dagster.host.requirements import needs
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.tables import load_table
from storm_dagster.model.verbs import VERBS as CHANGES
from storm_dagster.model.version import __version__


@functools.cache
def grammar() -> dict[str, dict[str, Any]]:
    """``verbs.yaml``, which says what it holds."""
    return load_table(__name__, "verbs")


_KINDS: dict[str, Any] = {
    "int": int,
    "float": float,
    "as it is": click.UNPROCESSED,
    "file": click.Path(exists=True, dir_okay=False, path_type=Path),
    "new file": click.Path(dir_okay=False, path_type=Path),
    "new file or -": click.Path(allow_dash=True, dir_okay=False, path_type=Path),
    "file to write": click.File("w", encoding="utf-8", lazy=True),
}


def parameters(rows: Mapping[str, Any] | None, function: Any) -> Any:
    """Add arguments and options of the grammar to a command's function."""
    for names, given in reversed(list((rows or {}).items())):
        settings = dict(given or {})
        if choice := settings.pop("choice", None):
            settings["type"] = click.Choice(choice)
        kind = settings.pop("kind", None)
        if between := settings.pop("between", None):
            settings["type"] = (click.FloatRange if kind == "float" else click.IntRange)(*between)
        elif kind is not None:
            settings["type"] = _KINDS[kind]
        if names.startswith("-"):
            settings.setdefault("show_default", "default" in settings and "/" not in names)
            function = click.option(*names.split(), **settings)(function)
        else:
            function = click.argument(names, **settings)(function)
    return function


def _verbs() -> Iterator[tuple[str, tuple[str, str]]]:
    for name, row in grammar()["verbs"].items():
        if name == "change_verbs":
            for verb in CHANGES.values():
                yield verb.name, (name, verb.summary.partition(". ")[0].rstrip("."))
        elif " " not in name:
            yield name, (row["module"], row["summary"])


VERBS: dict[str, tuple[str, str]] = dict(_verbs())
"""Verb -> module of this package, and line in the list."""

FORMER_VERBS: dict[str, tuple[str, str]] = {
    name: (row["module"], row["instead"]) for name, row in grammar()["former"].items()
}
"""Verb of the release before -> module of this package, and the verb to use instead.

It is not listed. Options, output and exit codes are those of the release before.
"""


def _command_of(module_name: str, name: str) -> click.Command:
    """The command of that name in a module of this package."""
    module = importlib.import_module(f"storm_dagster.cli.{module_name}")
    for value in vars(module).values():
        if isinstance(value, click.Command) and value.name == name:
            return value
    raise LookupError(f"verbs.yaml names the verb {name!r}, which {module.__name__} lacks")


def _former_command(command: click.Command, name: str, instead: str) -> click.Command:
    """A hidden copy of a command that names the verb to use instead, on standard error."""
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


def _verb_in(arguments: list[str]) -> str:
    """The verb that a command line names, for messages; a daemon's with its role."""
    verbs = [word for word in arguments if word in VERBS or word in FORMER_VERBS]
    if not verbs:
        return ""
    verb = verbs[0]
    if verb != "daemon":
        return verb
    roles = [name.partition(" ")[2] for name in grammar()["verbs"] if name.startswith("daemon ")]
    role = next((word for word in arguments if word in roles), "")
    return f"daemon {role}".rstrip()


class _LazyGroup(click.Group):
    """Command group that imports a command at first use; the table has the help lines."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in VERBS:
            return _command_of(VERBS[cmd_name][0], cmd_name)
        if cmd_name in FORMER_VERBS:
            module, instead = FORMER_VERBS[cmd_name]
            return _former_command(_command_of(module, cmd_name), cmd_name, instead)
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="storm-dagster")
def cli() -> None:
    """Run Storm topologies in Python, from Dagster."""


def _fail(kind: str, message: str, code: int, as_json: bool) -> NoReturn:
    """Print an error, as JSON on standard output when that was asked for, and exit."""
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


def run() -> NoReturn:
    """Run the verb of ``sys.argv``. Exit codes: 0, the error's branch (2 to 6), 130 after Ctrl-C,
    else 1.
    """
    # Asked for now: `jar` hands its program another argv. What follows ``--`` belongs to somebody
    # else.
    as_json = "--json" in takewhile(lambda word: word != "--", sys.argv[1:])
    try:
        with needs(f"`storm-dagster {_verb_in(sys.argv[1:])}`"):
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
        # The reader of our output went away.
        sys.stdout = None
        sys.exit(0)
    except Exception as error:
        # Daemons log from INFO up, client verbs only with --verbose.
        logging.getLogger(__name__).info("unexpected", exc_info=True)
        _fail(
            type(error).__name__,
            f"unexpected: {error!r}; run with --verbose for the trace",
            1,
            as_json,
        )
    _flush()
    sys.exit(code if isinstance(code, int) else 0)
