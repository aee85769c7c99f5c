"""Names that leave a process, taken from the objects that carry them: ``python -m
storm_rigs.product.public_names`` prints them.

Each collector gives, for one kind of names, subject -> names. Other programs rely on them: clusters
of another release, clients, dashboards, confs, code of users. Names in Dagster are in
``tests/dagster/stable_names.json``; here are only tags, and the fields that people fill in there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import io
import itertools
import json
import re
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import click
import msgspec
from dagster.components.testing import create_defs_folder_sandbox
from pydantic import BaseModel

import storm_dagster
import storm_dagster.api
import storm_dagster.testing

Names = dict[str, list[str]]
"""Subject -> its names, sorted."""

DOCUMENT_MODULES = (
    "blobstore.store",
    "cli.dev.ports",
    "core.dataplane.keyed_state",
    "host.endpoints",
    "model.groupings",
    "model.log_levels",
    "model.metric_ids",
    "model.operation_record",
    "model.plan_document",
    "model.records",
    "host.processes",
    "model.token_records",
    "model.topology",
    "model.unreported",
    "model.wire",
    "host.worker_spec",
    "nimbus.blobs.registry",
    "nimbus.thrift.pending",
    "operations.transactions",
    "operations.live.rebalance_request",
    "operations.submit.staging",
    "supervisor.local_state",
    "zk.shards",
)
"""Modules whose classes are stored in ZooKeeper, blobs or files, or travel between processes."""
_DOCUMENT_DATACLASSES = ("BlobMeta", "DevPorts", "PendingSubmission")

_SAMPLES = {
    "topology_id": "wc-1-1700000000",
    "code_dir": "wc-1-1700000000",
    "name": "wc",
    "supervisor_id": "node",
    "node": "node",
    "port": 6800,
    "number": 2,
    "count": 1,
    "epoch_secs": 1700000000,
    "component": "a/b%c",
    "key": "wc-1-1700000000-stormjar.jar",
    "holder": "host:8000-1",
    "first": 1,
    "part": "part",
    "client_token": "token",
    "token": "token",
    "token_id": "0123456789abcdef",
    "handle": "handle",
    "request": "wc-1-1700000000",
    "use": "placement",
    "sensor": "sensor",
    "record": "0",
}
_ENVIRONMENT = re.compile(
    r"""["'](STORM_JAR|(?:STORM_DAGSTER|DAGSTER|SPARK|PYSPARK|JAVA|XDG)_[A-Z_]+)["']"""
)


def public_names() -> dict[str, Names]:
    """All of them: kind -> subject -> names."""
    collected = {
        "zookeeper": _zookeeper_paths(),
        "blobs": _blob_keys(),
        "documents": _documents(),
        "conf": _conf_keys(),
        "cli": _command_line(),
        "exits": _exits(),
        "errors": _errors(),
        "nimbus http": _http(_nimbus_app()),
        "supervisor http": _http(_supervisor_app()),
        "metrics": _metrics(),
        "thrift": _thrift(),
        "dagster": _dagster(),
        "environment": {"variables": sorted(_literals(_ENVIRONMENT))},
        "python": _python(),
    }
    return {
        kind: {key: sorted(set(names[key])) for key in sorted(names)}
        for kind, names in collected.items()
    }


# -- cluster state ---------------------------------------------------------------------------------


def _sampled(function: Callable[..., str]) -> Iterator[str]:
    """Results for the sample arguments, with each optional one given and left out."""
    parameters = inspect.signature(function).parameters.values()
    choices = [
        [_SAMPLES[one.name]]
        if one.default is inspect.Parameter.empty
        else [_SAMPLES[one.name], one.default]
        for one in parameters
    ]
    for arguments in itertools.product(*choices):
        yield function(*arguments)


def _zookeeper_paths() -> Names:
    from storm_dagster.model import paths

    fixed = [
        value for name, value in vars(paths).items() if name.isupper() and isinstance(value, str)
    ]
    makers = {
        name: value
        for name, value in vars(paths).items()
        if inspect.isfunction(value) and name[0] != "_"
    }
    made = [path for maker in makers.values() for path in _sampled(maker)]
    return {"first level": list(paths.FIRST_LEVEL), "fixed": fixed, "made": made}


def _blob_keys() -> Names:
    from storm_dagster.model import names
    from storm_dagster.operations.submit import staging

    makers = [
        names.jar_key,
        names.conf_key,
        names.code_key,
        names.placement_key,
        names.make_code_dir,
    ]
    makers += [staging.staging_key, staging.newest_token_key, staging.upload_key]
    keys = [key for maker in makers for key in _sampled(maker)]
    # Of the release before, which keeps submissions that wait for their run there.
    keys.append(staging.upload_key("handle", "pending"))
    ids = [
        names.make_topology_id("wc", 1, 1700000000),
        names.ACKER,
        names.TOPOLOGY_MASTER,
        names.SYSTEM,
    ]
    return {"keys": keys, "ids": ids}


def _documents() -> Names:
    found: Names = {}
    for module_name in DOCUMENT_MODULES:
        module = importlib.import_module(f"storm_dagster.{module_name}")
        for name, cls in vars(module).items():
            if not isinstance(cls, type) or cls.__module__ != module.__name__ or name == "Record":
                continue
            if (fields := _fields(cls)) is not None and fields:
                found[name.lstrip("_")] = fields
    return found


def _fields(cls: type) -> list[str] | None:
    """Fields as they are written, and the words of a field that holds one of some; ``None`` for
    another class.
    """
    if issubclass(cls, BaseModel):
        kinds = {
            field.alias or name: field.annotation
            for name, field in cls.model_fields.items()
            if not field.exclude
        }
    elif issubclass(cls, msgspec.Struct):
        order = cls.__struct_config__.array_like
        hints = typing.get_type_hints(cls)
        pairs = zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True)
        kinds = {
            f"{place}: {wire}" if order else wire: hints[name]
            for place, (name, wire) in enumerate(pairs)
        }
    elif cls.__name__ in _DOCUMENT_DATACLASSES:
        kinds = typing.get_type_hints(cls)
    else:
        return None
    return [
        line
        for name, kind in kinds.items()
        for line in (name, *(f"{name}={word}" for word in _words(kind)))
    ]


def _words(kind: Any) -> Iterator[str]:
    if typing.get_origin(kind) is typing.Literal:
        yield from (word for word in typing.get_args(kind) if isinstance(word, str))
    else:
        for part in typing.get_args(kind):
            yield from _words(part)


# -- people and clients ----------------------------------------------------------------------------


def _conf_keys() -> Names:
    from storm_dagster.model.conf import CONF_KEYS, OWNED_PREFIXES, default_conf

    words = [f"{key}={word}" for key, spec in CONF_KEYS.items() for word in spec.choices]
    return {
        "keys": list(CONF_KEYS),
        "defaults": list(default_conf()),
        "prefixes": list(OWNED_PREFIXES),
        "words": words,
    }


def _command_line() -> Names:
    from storm_dagster.cli.app import FORMER_VERBS, VERBS, cli

    verbs = [*VERBS, *FORMER_VERBS]
    context = click.Context(cli, info_name="storm-dagster")
    found: Names = {"storm-dagster": [*_options(cli), *verbs]}

    def add(command: click.Command | None, name: str) -> None:
        assert command is not None
        found[name] = _options(command)
        if isinstance(command, click.Group):
            inner = command.list_commands(context)
            found[name] += inner
            for one in inner:
                add(command.get_command(context, one), f"{name} {one}")

    for verb in verbs:
        add(cli.get_command(context, verb), verb)
    return found


def _options(command: click.Command) -> list[str]:
    found: list[str] = []
    for item in command.params:
        if isinstance(item, click.Option):
            found += [*item.opts, *item.secondary_opts]
        else:
            found.append(item.make_metavar(click.Context(command)))
        if isinstance(item.type, click.Choice):
            found += [f"{item.opts[0]}={word}" for word in item.type.choices]
    return found


def _exits() -> Names:
    """What ends the command line, and the code that it exits with."""
    from storm_dagster.cli import app
    from storm_dagster.model import errors, exit_codes

    ends: dict[str, Any] = {
        "a good end": {"return_value": None},
        "a wrong command line": {"side_effect": click.UsageError("wrong")},
        "Ctrl-C": {"side_effect": KeyboardInterrupt},
        "anything else": {"side_effect": ValueError("unexpected")},
    }
    for name, cls in errors._BY_NAME.items():  # pyright: ignore[reportPrivateUsage]
        ends[name] = {"side_effect": cls("message")}
    codes: list[str] = []
    for what, behavior in ends.items():
        with (
            mock.patch.object(app.cli, "main", **behavior),
            mock.patch.object(sys, "argv", ["storm-dagster", "list", "--json"]),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                app.run()
            except SystemExit as end:
                codes.append(f"{what}: {end.code}")
    workers = [
        f"{name}: {value}" for name, value in vars(exit_codes).items() if name.startswith("EXIT_")
    ]
    return {"storm-dagster": codes, "worker": workers}


def _errors() -> Names:
    from storm_dagster.model import errors

    known = errors._BY_NAME  # pyright: ignore[reportPrivateUsage]
    document = errors.StormDagsterError("message").to_document()
    return {
        "types": [f"{name}: {cls.http_status}" for name, cls in known.items()],
        "document": list(_leaves(document)),
    }


def _leaves(document: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in document.items():
        yield before + key
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{key}.")


# -- HTTP ------------------------------------------------------------------------------------------


def _conf() -> Any:
    from storm_dagster.host.conf_files import load_cluster_conf

    return load_cluster_conf(overrides={"supervisor.http.port": 0})


class Handle(types.SimpleNamespace):
    """Has whatever it is asked for, which may be called and gives ``None``."""

    def __getattr__(self, name: str) -> Handle:
        if name.startswith("__"):
            raise AttributeError(name)
        return Handle()

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


def _handles() -> tuple[Any, Any]:
    """A nimbus and a reader that describe themselves and read an empty cluster; routes are never
    called on them.
    """
    reads = types.SimpleNamespace(
        metrics=types.SimpleNamespace(memory=0, disk=0, zookeeper=0, invalidated=0)
    )
    nimbus = Handle(
        conf=_conf(),
        identity=types.SimpleNamespace(host="localhost", version="0"),
        logs=Path(tempfile.gettempdir()),
        inbox=Path(tempfile.gettempdir()),
        uploads=(),
        unreported=(),
        blobs=types.SimpleNamespace(base=types.SimpleNamespace(keys=lambda: [])),
        cluster=types.SimpleNamespace(
            session=types.SimpleNamespace(connected=True), event_logs=dict
        ),
        reads=reads,
    )
    view = types.SimpleNamespace(epoch=1, topologies={}, supervisors={}, used_ports=lambda: {})
    reader = Handle(
        conf=lambda name: None,
        health=lambda: {"leader": True, "uptime_secs": 1, "missing": 0},
        healing=lambda: {"by": "sensor", "pause": None},
        view=lambda: view,
        snapshots=lambda secs: [],
    )
    return nimbus, reader


def _nimbus_app() -> Any:
    from storm_dagster.nimbus.http.service import build_app

    return build_app(*_handles(), submissions=Handle(), lifecycle=Handle())  # type: ignore[arg-type]


def _supervisor_app() -> Any:
    from storm_dagster.supervisor.log_service import LogService

    service = LogService(_conf(), Path(tempfile.gettempdir()), "node")
    try:
        return service._app("localhost")  # pyright: ignore[reportPrivateUsage]
    finally:
        service.stop()


def nimbus_openapi() -> dict[str, Any]:
    """``/openapi.json`` of a nimbus."""
    return _openapi(_nimbus_app())[1]


def _openapi(app: Any) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """(method, route) of everything served, and how ``/openapi.json`` describes it."""
    while not hasattr(app, "routes"):
        app = app._app
    served = [
        (method, route) for route in app.routes for method in sorted(route.methods - {"HEAD"})
    ]
    endpoint = next(route.endpoint for _, route in served if route.path == "/openapi.json")
    return served, json.loads(asyncio.run(endpoint(None)).body)


def _http(app: Any) -> Names:
    """Per method and path: parameters, and fields of requests and answers, as ``/openapi.json``
    describes them.
    """
    served, document = _openapi(app)
    schemas = document["components"].get("schemas", {})
    found: Names = {"errors": []}
    for method, route in served:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        if not route.include_in_schema:
            found[f"{method} {path}"] = []
            continue
        operation = document["paths"][path][method.lower()]
        found[f"{method} {path}"] = list(_described(operation, schemas))
        for status, answer in operation["responses"].items():
            if status >= "400":
                found["errors"] += _contents("", answer, schemas)
    found["errors"] = [name.strip() for name in found["errors"]]
    return found


def _described(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    for one in operation.get("parameters", ()):
        if one["in"] != "path":
            yield f"{one['in']} {one['name']}"
    if "requestBody" in operation:
        yield from _contents("body", operation["requestBody"], schemas)
    for status, answer in operation["responses"].items():
        yield status
        # Errors have two forms, of our own and of Storm's UI, which nobody needs to read for each
        # route.
        if status < "400":
            yield from _contents(status, answer, schemas)


def _contents(what: str, described: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    for media, content in described.get("content", {}).items():
        yield f"{what} {media}"
        yield from (f"{what} {name}" for name in _properties(content["schema"], schemas))


def _properties(schema: Any, schemas: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Dotted names of the fields of a schema: ``rows[].name``, ``by_id.*.name``."""
    if not isinstance(schema, Mapping) or before.count(".") > 8:
        return
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for way in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(way, ()):
            yield from _properties(one, schemas, before)
    for name, inner in schema.get("properties", {}).items():
        yield before + name
        yield from _properties(inner, schemas, f"{before}{name}.")
    yield from _properties(schema.get("additionalProperties"), schemas, f"{before}*.")
    yield from _properties(schema.get("items"), schemas, f"{before.removesuffix('.')}[].")


def _metrics() -> Names:
    from storm_dagster.nimbus.http.metrics import Metrics

    metrics = Metrics(*_handles())
    metrics.observe("GET", "/", 200, 0.1)
    registry = metrics._registry  # pyright: ignore[reportPrivateUsage]
    found: Names = {}
    for family in registry.collect():
        labels = {label for sample in family.samples for label in sample.labels}
        found[family.name] = [
            family.type,
            *sorted(labels | set(getattr(family, "_labelnames", ()))),
        ]
    return found


def _thrift() -> Names:
    from storm_dagster.nimbus.thrift.idl import load_idl
    from storm_dagster.nimbus.thrift.methods import METHODS, Method

    idl = load_idl()
    found: Names = {
        "served": [
            f"Nimbus.{name}"
            for name in idl.Nimbus.thrift_services
            if isinstance(METHODS[name], Method)
        ]
    }
    for name in idl.Nimbus.thrift_services:
        given, result = getattr(idl.Nimbus, f"{name}_args"), getattr(idl.Nimbus, f"{name}_result")
        found[f"Nimbus.{name}"] = [*_places(given), *(f"gives {one}" for one in _places(result))]
    for name, value in vars(idl).items():
        if hasattr(value, "thrift_spec"):
            found[name] = list(_places(value))
        elif hasattr(value, "_NAMES_TO_VALUES"):
            found[name] = [f"{number}: {word}" for word, number in value._NAMES_TO_VALUES.items()]
    return found


def _places(struct: Any) -> Iterator[str]:
    for place, spec in struct.thrift_spec.items():
        yield f"{place}: {spec[1]}"


# -- Dagster and Python ----------------------------------------------------------------------------


def _dagster() -> Names:
    from storm_dagster.defs import defs
    from storm_dagster.launcher import WarmRunLauncher

    definitions = defs()
    found: Names = {"tags": [*_literals(re.compile(r"""["'](storm/\w+)["']"""))]}
    for job in definitions.get_repository_def().get_all_jobs():
        if not job.name.startswith("__"):
            for node in job.nodes:
                found[f"fields of {job.name}.{node.name}"] = list(_config_fields(node.definition))
    for key, resource in (definitions.resources or {}).items():
        found[f"resource {key.removeprefix('storm_')}"] = list(type(resource).model_fields)
    component = storm_dagster.StormTopologyComponent
    found["component"] = sorted(_model_fields(component.get_model_cls() or component, set()))
    found["run launcher"] = list(WarmRunLauncher.config_type())
    found["of a declared topology"] = list(_declared())
    return found


def _declared() -> Iterator[str]:
    """Names that one topology in a ``defs.yaml`` has in Dagster; the ones of the package's own
    location stand elsewhere.
    """
    every_hour = "0 * * * *"
    attributes = {
        "name": "wc",
        "target": "nowhere.py:Nothing",
        "schedule": {"deploy": every_hour, "rebalance": every_hour},
        "freshness": {"fail_minutes": 40},
        "alerts": {"errors": 1, "failed_ratio": 0.1, "complete_ms": 5},
    }
    # That its target is not there is only logged.
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=storm_dagster.StormTopologyComponent,
            defs_yaml_contents={
                "type": "storm_dagster.StormTopologyComponent",
                "attributes": attributes,
            },
        )
        with sandbox.load_component_and_build_defs(defs_path=path) as (_, defs):
            repository = defs.get_repository_def()
            jobs = [job for job in repository.get_all_jobs() if not job.name.startswith("__")]
            yield from (f"job {job.name}" for job in jobs)
            yield from (f"op {node.name}" for job in jobs for node in job.nodes)
            yield from (f"sensor {sensor.name}" for sensor in repository.sensor_defs)
            yield from (f"schedule {schedule.name}" for schedule in repository.schedule_defs)
            yield from (
                f"asset {spec.key.to_user_string()}" for spec in defs.resolve_all_asset_specs()
            )
            for key in repository.asset_graph.asset_check_keys:
                yield f"check {key.asset_key.to_user_string()}:{key.name}"


def _config_fields(node: Any) -> Iterator[str]:
    schema = getattr(node, "config_schema", None)
    yield from _config_type_fields(getattr(schema, "config_type", None))


def _config_type_fields(config_type: Any, before: str = "") -> Iterator[str]:
    for name, field in (getattr(config_type, "fields", None) or {}).items():
        yield before + name
        yield from _config_type_fields(field.config_type, f"{before}{name}.")
    inner = getattr(config_type, "inner_type", None)
    if inner is not None:
        yield from _config_type_fields(inner, before)


def _model_fields(kind: Any, met: set[Any], before: str = "") -> Iterator[str]:
    """Dotted names of the fields of a model, and of the models in them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if kind in met:
            return
        for name, field in kind.model_fields.items():
            yield before + (field.alias or name)
            yield from _model_fields(
                field.annotation, met | {kind}, f"{before}{field.alias or name}."
            )
    for part in typing.get_args(kind):
        yield from _model_fields(part, met, before)


def _literals(pattern: re.Pattern[str]) -> set[str]:
    """Matches of a pattern in the sources, for names that no object lists."""
    folder = Path(storm_dagster.__file__).parent
    sources = (path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    return {match for text in sources for match in pattern.findall(text)}


def _python() -> Names:
    found: Names = {}
    listed: list[object] = []
    for module in (storm_dagster.api, storm_dagster.testing, storm_dagster):
        found[module.__name__] = list(module.__all__)
        for name in module.__all__:
            value = getattr(module, name)
            if any(value is one for one in listed):
                continue
            listed.append(value)
            if inspect.isfunction(value):
                found[f"{module.__name__}.{name}"] = list(_parameters(value))
            elif isinstance(value, type):
                found[f"{module.__name__}.{name}"] = list(_members(value))
    return found


def _members(cls: type) -> Iterator[str]:
    """What of ours a class has for its users: attributes, methods, and what they are called with.

    What it has from another public class is listed there.
    """
    yield from _parameters(cls)
    listed: set[type] = set()
    for base in cls.__mro__:
        if base in listed or not base.__module__.startswith("storm_dagster"):
            continue
        if base is not cls and base.__name__ in {
            *storm_dagster.__all__,
            *storm_dagster.api.__all__,
        }:
            yield f"is a {base.__name__}"
            listed.update(base.__mro__)
            continue
        for name in (*vars(base), *vars(base).get("__annotations__", ())):
            if name.startswith(("_", "model_")):
                continue
            yield name
            value = getattr(cls, name, None)
            if inspect.isfunction(value) or inspect.ismethod(value):
                yield from (f"{name}({one})" for one in _parameters(value))


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        f"{one.name}="
        for one in parameters.values()
        if one.kind in named and one.name not in ("self", "cls")
    ]


if __name__ == "__main__":
    # Dagster logs to standard output.
    with contextlib.redirect_stdout(sys.stderr):
        collected = public_names()
    print(json.dumps(collected, indent=1))
