"""Writes the reference pages from the code, whenever the site is built (conf.py)."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

import click

import storm_dagster
import storm_dagster.api
import storm_dagster.client
import storm_dagster.connectors
import storm_dagster.testing
from storm_dagster.cli.app import FORMER_VERBS, VERBS, cli
from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.build import build_storm_resources
from storm_dagster.model import records, verbs
from storm_dagster.model.conf import CONF_KEYS, default_conf, keys_without_meaning
from storm_dagster.model.removed_keys import REMOVED_KEYS


def cell(text: object) -> str:
    """Text that may stand between two bars of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def rows(head: Iterable[str], body: Iterable[Iterable[object]]) -> list[str]:
    """One table of markdown."""
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(str(value) for value in row) + " |" for row in body), ""]


def command_page() -> list[str]:
    """Every verb with its arguments and options, from click."""
    lines = [
        "# Command line",
        "",
        "`storm-dagster VERB`. Exit codes: 0 done; 2 the request is wrong; 3 a conflict; 4 unavailable now; "
        "5 fenced; 6 damaged state; 130 after Ctrl-C. With `--json` exactly one JSON document is printed on "
        'standard output; an error is `{"error": {"type", "message"}}`.',
        "",
    ]
    context = click.Context(cli, info_name="storm-dagster")
    for verb in VERBS:
        command = cli.get_command(context, verb)
        assert command is not None
        lines += _verb(command, click.Context(command, info_name=f"storm-dagster {verb}"), "##")
    lines += ["## Former verbs", ""]
    lines += ["These are accepted in this release, with the same options. They are not listed.", ""]
    pairs = ((f"`{name}`", f"`storm-dagster {new}`") for name, (_, new) in FORMER_VERBS.items())
    lines += rows(["former verb", "use instead"], pairs)
    return lines


def _verb(command: click.Command, context: click.Context, level: str) -> list[str]:
    name = (context.info_name or "").removeprefix("storm-dagster ")
    usage = " ".join([context.info_name or "", *command.collect_usage_pieces(context)])
    lines = [f"{level} {name}", "", f"```text\n{usage}\n```", ""]
    if command.help:
        lines += [command.help.replace("\b\n", "").strip(), ""]
    options = [
        item for item in command.params if isinstance(item, click.Option) and not item.hidden
    ]
    if options:
        lines += rows(
            ["option", "means"],
            (
                ("`" + ", ".join([*item.opts, *item.secondary_opts]) + "`", cell(item.help or ""))
                for item in options
            ),
        )
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            if found.hidden:
                continue
            lines += _verb(
                found, click.Context(found, info_name=f"{context.info_name} {inner}"), level + "#"
            )
    return lines


def configuration_page() -> list[str]:
    """Every conf key that the system reads, from the schema and the shipped defaults."""
    defaults = default_conf()
    lines = [
        "# Configuration",
        "",
        "Shipped defaults, then `HOME/storm.yaml` (or the `storm.yaml` of `--conf-dir`), then the files "
        "`storm.d/*.yaml` beside it in the order of their names, then `-c KEY=VALUE`; a topology's own conf "
        "lies over the `topology.` keys. `storm-dagster conf` prints each value and the file that sets it. "
        "An unknown key below one of these prefixes is refused with the nearest known one. *Set by* "
        "says who may set a key: the cluster's conf alone, also the topologies of administrators, or those of "
        "all users. Workers get the cluster's value of the keys that have a yes under *workers*.",
        "",
    ]
    groups: dict[str, list[str]] = {}
    for key in CONF_KEYS:
        groups.setdefault(key.split(".")[0], []).append(key)
    for prefix, keys in groups.items():
        lines += [f"## {prefix}", ""]
        lines += rows(
            ["key", "default", "kind", "set by", "workers", "means"],
            (_key_row(key, defaults.get(key)) for key in keys),
        )
    lines += ["## Removed keys", ""]
    lines += ["Keys of earlier releases. They are accepted with a warning.", ""]
    lines += rows(
        ["key", "what to do"], ((f"`{key}`", cell(text)) for key, text in REMOVED_KEYS.items())
    )
    reasons: dict[str, list[str]] = {}
    for key, reason in keys_without_meaning().items():
        reasons.setdefault(reason, []).append(f"`{key}`")
    lines += ["## Keys of Storm and JStorm that mean nothing here", ""]
    lines += [
        "They are accepted with a warning, so that a `storm.yaml` written for Storm loads.",
        "",
    ]
    lines += rows(
        ["why", "keys"], ((cell(reason), ", ".join(keys)) for reason, keys in reasons.items())
    )
    lines += ["## Keys of earlier releases", ""]
    lines += ["They have no effect. A conf that still has one loads, with a warning.", ""]
    lines += rows(
        ["key", "instead"], ((f"`{key}`", cell(remedy)) for key, remedy in REMOVED_KEYS.items())
    )
    return lines


def link_pages(text: str) -> str:
    """Text of a reference page in which ``docs/NAME.md`` is a link to that page."""

    def link(match: re.Match[str]) -> str:
        page = Path(__file__).with_name(match[1])
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        return f"[{title}](../{page.name})"

    return re.sub(r"\bdocs/([\w-]+\.md)\b", link, text)


def _key_row(key: str, default: Any) -> tuple[str, ...]:
    spec = CONF_KEYS[key]
    bounds = [
        *([f"at least {spec.minimum:g}"] if spec.minimum is not None else []),
        *([f"at most {spec.maximum:g}"] if spec.maximum is not None else []),
        *([f"one of {', '.join(spec.choices)}"] if spec.choices else []),
    ]
    meaning = spec.doc + (f" ({'; '.join(bounds)})" if bounds else "")
    workers = "yes" if spec.worker else ""
    text = link_pages(cell(meaning))
    return f"`{key}`", f"`{json.dumps(default)}`", spec.kind, spec.setter, workers, text


def autodoc(kind: str, target: str) -> list[str]:
    """One object's signature and docstring, by Sphinx."""
    members = ["   :members:", "   :show-inheritance:"] if kind == "class" else []
    return ["```{eval-rst}", f".. auto{kind}:: {target}", *members, "```", ""]


def api_page() -> list[str]:
    """What an author of topologies imports."""
    lines = ["# Authoring API", "", "All of it is importable from `storm_dagster.api`.", ""]
    for name in sorted(storm_dagster.api.__all__):
        value = getattr(storm_dagster.api, name)
        lines += [f"## {name}", "", *autodoc(_kind(value), f"storm_dagster.api.{name}")]
    lines += [
        "## Sources and sinks",
        "",
        "All of it is importable from `storm_dagster.connectors`.",
        "",
    ]
    for name in sorted(storm_dagster.connectors.__all__):
        lines += autodoc(
            _kind(getattr(storm_dagster.connectors, name)), f"storm_dagster.connectors.{name}"
        )
    lines += ["## Client", "", "All of it is importable from `storm_dagster.client`.", ""]
    for name in sorted(storm_dagster.client.__all__):
        lines += autodoc(_kind(getattr(storm_dagster.client, name)), f"storm_dagster.client.{name}")
    lines += [
        "Every verb that changes a topology has a function:",
        "",
    ]
    lines += rows(
        ["verb", "function"], ((f"`{verb}`", f"`{_function_of(verb)}`") for verb in verbs.VERBS)
    )
    lines += ["## Testing", "", "All of it is importable from `storm_dagster.testing`.", ""]
    for name in sorted(storm_dagster.testing.__all__):
        lines += autodoc(
            _kind(getattr(storm_dagster.testing, name)), f"storm_dagster.testing.{name}"
        )
    return lines


def _function_of(verb: str) -> str:
    """Name in `storm_dagster.client` of the function for a verb."""
    name = verb.replace("-", "_").replace("rollback", "roll_back")
    return name if "_" in name else f"{name}_topology"


def _kind(value: object) -> str:
    if isinstance(value, type):
        return "class"
    return "function" if callable(value) else "data"


def dagster_page() -> list[str]:
    """Assets, jobs with their forms, sensors, schedules and resources, from the definitions
    themselves.
    """
    defs = build_storm_defs()
    repository = defs.get_repository_def()
    lines = ["# Dagster", "", "What `storm_dagster.build_storm_defs()` gives.", "", "## Assets", ""]
    specs = sorted(defs.resolve_all_asset_specs(), key=lambda spec: spec.key.to_user_string())
    lines += rows(
        ["key", "group", "what"],
        (
            (f"`{s.key.to_user_string()}`", s.group_name or "", cell(s.description or ""))
            for s in specs
        ),
    )
    lines += ["## Jobs", ""]
    for job in sorted(repository.get_all_jobs(), key=lambda job: job.name):
        if job.name.startswith("__"):
            continue
        lines += [f"### {job.name}", "", (job.description or "").strip(), ""]
        fields = [field for node in job.nodes for field in _fields(node.definition)]
        if fields:
            lines += rows(["field", "means"], fields)
    lines += ["## Sensors and schedules", ""]
    ticking = [*repository.sensor_defs, *repository.schedule_defs]
    lines += rows(
        ["name", "what"], ((f"`{item.name}`", cell(item.description or "")) for item in ticking)
    )
    lines += ["## Asset checks", ""]
    keys = (
        sorted(repository.asset_graph.asset_check_keys, key=str)
        if hasattr(repository, "asset_graph")
        else []
    )
    lines += rows(
        ["asset", "check"], ((f"`{k.asset_key.to_user_string()}`", f"`{k.name}`") for k in keys)
    )
    lines += [
        "## In your own code location",
        "",
        "All of it is importable from `storm_dagster`.",
        "",
    ]
    for name in sorted(
        set(storm_dagster.__all__) - set(storm_dagster.api.__all__) - {"__version__"}
    ):
        lines += autodoc(_kind(getattr(storm_dagster, name)), f"storm_dagster.{name}")
    lines += [
        "`storm_dagster.defs.defs` is a whole code location with these definitions (`dagster dev -m storm_dagster.defs`); "
    ]
    lines += ["`storm_dagster.defs.build_storm_defs` is the function above.", ""]
    lines += ["## Resources", ""]
    for resource in build_storm_resources().values():
        lines += autodoc("class", f"{type(resource).__module__}.{type(resource).__name__}")
    return [
        *lines,
        "## Run launcher",
        "",
        *autodoc("class", "storm_dagster.launcher.WarmRunLauncher"),
    ]


def _fields(node: Any) -> list[tuple[str, str]]:
    schema = getattr(node, "config_schema", None)
    inner = getattr(getattr(schema, "config_type", None), "fields", None) or {}
    return [(f"`{name}`", cell(field.description or "")) for name, field in inner.items()]


def records_page() -> list[str]:
    """The records in ZooKeeper, from their models."""
    lines = [
        "# ZooKeeper records",
        "",
        "UTF-8 JSON. A daemon ignores unknown fields, and keeps them when it changes the record.",
        "",
    ]
    for name in sorted(vars(records)):
        model = getattr(records, name)
        if not (
            isinstance(model, type)
            and issubclass(model, records.Record)
            and model is not records.Record
        ):
            continue
        lines += [f"## {name}", "", " ".join((model.__doc__ or "").split()), ""]
        # Without validators, whose text has an address in memory.
        types = get_type_hints(model)
        cells: list[tuple[str, str]] = []
        for key, field in model.model_fields.items():
            type_text = cell(inspect.formatannotation(types[key]).replace("typing.", ""))
            cells.append((f"`{field.alias or key}`", f"`{type_text}`"))
        lines += rows(["field", "type"], cells)
    return lines


PAGES = {
    "cli": command_page,
    "configuration": configuration_page,
    "api": api_page,
    "dagster": dagster_page,
    "records": records_page,
}


def write_pages(folder: Path) -> None:
    """Write every page; one that did not change is left as it is, so that Sphinx does not read it
    again.
    """
    folder.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        file, text = folder / f"{name}.md", "\n".join(page()) + "\n"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
