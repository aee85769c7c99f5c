"""The grammar of the command line, ``verbs.yaml``, and how a verb's outcome becomes output and an
exit code.

Verbs are imported when they are used: ``submit`` must not pay for what ``dev`` needs.
"""

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

from storm_dagster import __version__
from storm_dagster.host.requirements import needs
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.tables import load_table
from storm_dagster.model.verbs import VERBS as CHANGES


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


class _LazyGroup(click.Group):
    """Command group that imports a command at first use; the table has the help lines."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"storm_dagster.cli.{VERBS[cmd_name][0]}")
        return next(
            each
            for each in vars(module).values()
            if isinstance(each, click.Command) and each.name == cmd_name
        )

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
        asked = next((word for word in sys.argv[1:] if word in VERBS), "")
        with needs(f"`storm-dagster {asked}`"):
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
