"""``submit``, ``jar``, and the verbs that change a topology, each made of its row in
:data:`~storm_dagster.model.verbs.VERBS`.
"""

import functools
import importlib.util
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args, get_origin

import click
import yaml

from storm_dagster.cli.app import grammar, parameters
from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import Steps, plain, print_answer, print_json, print_table
from storm_dagster.client.changes import Change, change_topology
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.model.conf import Conf, parse_assignments, validate_conf, yaml_problem
from storm_dagster.model.conf_layers import LayerName, overlay
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.requests import Flag, RequestModel, SubmitRequest, bounds_of
from storm_dagster.model.verbs import VERBS, Verb

_BUSY = ("STARTED", "STARTING", "IN_PROGRESS")


def _conf_file(path: Path) -> dict[str, Any]:
    """The map in a YAML or JSON file."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise InvalidRequest(
            f"--conf-file {path} is not valid YAML: {yaml_problem(error)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--conf-file {path} cannot be read: {error}") from None
    if not isinstance(loaded, dict | None):
        raise InvalidRequest(
            f"{path}: the conf must be a map of keys to values, got {type(loaded).__name__}"
        )
    return loaded or {}


def _dry_run(
    invocation: Invocation,
    target: str,
    args: tuple[str, ...],
    name: str | None,
    requirements: Path | None,
) -> None:
    from storm_dagster.packaging.archive import bundle_target

    with (
        tempfile.TemporaryDirectory(prefix="storm-dagster-submit-") as folder,
        Steps("dry run") as steps,
    ):
        steps.begin("describe and pack")
        bundle = bundle_target(
            target, args, folder=Path(folder), home=invocation.home, requirements=requirements
        )
        steps.done("describe and pack")
    shown = check_topology_name(name or bundle.name)
    parts = bundle.topology.components()
    components = [
        {"id": name, "type": kind, "parallelism": spec.parallelism} for name, kind, spec in parts
    ]
    archive = {
        "sha256": bundle.archive.sha256,
        "size": bundle.archive.size,
        "files": bundle.archive.files,
    }
    print_answer(
        invocation.json,
        {"name": shown, "dry_run": True, "components": components, "archive": archive},
        "component=id type parallelism",
        components,
        title=f"would submit {shown} with an archive of {archive['size']} bytes ({archive['sha256'][:12]})",
    )


def field_options(request: type[RequestModel], function: Any) -> Any:
    """Add the options of a request's fields; what is not given is ``None`` or empty."""
    rows: dict[str, dict[str, Any]] = {}
    for field, info in request.model_fields.items():
        flag = next((each for each in info.metadata if isinstance(each, Flag)), None)
        if flag is None:
            continue
        settings = rows[f"{flag.name} {field}"] = {
            "help": info.description,
            "metavar": flag.metavar,
        }
        if info.annotation is bool:
            settings["is_flag"] = True
        elif get_origin(info.annotation) is dict:
            settings["multiple"] = True
        elif int in (info.annotation, *get_args(info.annotation)):
            bounds = bounds_of(info)
            settings["between"] = (bounds.get("ge"), bounds.get("le"))
    return parameters(rows, function)


def code_of(invocation: Invocation, given: dict[str, Any]) -> dict[str, Any]:
    """Take the options of code out of what was ``given``, as arguments of the client's functions.
    The conf is ``-c topology.*``, then the file, then ``--conf``.
    """
    file = given.pop("conf_file")
    pairs = given.pop("pairs")
    requirements = given.pop("requirements")
    options = {
        key: value for key, value in invocation.overrides.items() if key.startswith("topology.")
    }
    layers: dict[LayerName, Conf] = {"option": options, "pair": parse_assignments(pairs)}
    if file is not None:
        layers["file"] = _conf_file(Path(file))
    return {
        "conf": overlay(layers),
        "home": invocation.home,
        "requirements": Path(requirements) if requirements else None,
    }


@verb("submit")
@functools.partial(parameters, grammar()["shared"]["code"])
@functools.partial(field_options, SubmitRequest)
def submit(
    invocation: Invocation, target: str, args: tuple[str, ...], name: str | None, **given: Any
) -> None:
    """Submit TARGET: file.py[:Name], package.module[:Name], or archive.zip::module[:Name].

    ARGS after -- go to a callable target.
    """
    code = code_of(invocation, given)
    if invocation.dry_run:
        validate_conf(code["conf"], source="the conf", submitted=True)
        _dry_run(invocation, target, args, name, code["requirements"])
        return
    from storm_dagster.client.submission import submit_target

    with (
        invocation.nimbus() as nimbus,
        Steps(f"submitting {target}", quiet=invocation.json) as steps,
    ):

        def on_step(step: str, state: str) -> None:
            steps.on_step(step, state)
            cluster = ClusterFile.read(invocation.home) if step == "assignment" else None
            if state in _BUSY and cluster is not None and cluster.spark and cluster.spark.starting:
                steps.note(step, "waits for Spark, which dev is starting")

        done = submit_target(
            nimbus, target, args, name=name, wait=invocation.wait, progress=on_step, **code, **given
        )
        if invocation.wait:
            steps.done("tasks", "all run")
    if invocation.json:
        print_json(done.to_document())
    elif invocation.wait:
        click.echo(f"{done.id} is {done.status}: all tasks run, {done.seconds:.1f} s")
    else:
        click.echo(f"{done.name} is being submitted by run {done.run_id} (token {done.token})")


@verb("jar", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def jar(invocation: Invocation, archive: str, module: str, args: tuple[str, ...]) -> None:
    """Run MODULE of ARCHIVE as a program; its calls of submit_topology upload ARCHIVE.

    The program is run in this process as ``python -m MODULE ARGS`` would, with the unpacked archive
    first on the path and STORM_JAR naming the archive.
    """
    from storm_dagster.client.submission import STORM_JAR
    from storm_dagster.packaging.unpack import unpack_archive

    path = Path(archive).absolute()
    if not path.is_file():
        raise InvalidRequest(f"archive {archive} does not exist")
    with tempfile.TemporaryDirectory(prefix="storm-dagster-jar-") as folder:
        root = Path(folder, "code")
        unpack_archive(path, root)
        os.environ[STORM_JAR] = str(path)
        os.environ["STORM_DAGSTER_HOME"] = str(invocation.home)
        sys.path.insert(0, str(root))
        sys.argv = [module, *args]
        started_in = os.getcwd()
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise InvalidRequest(f"archive {archive} holds no module {module!r}")
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            os.chdir(started_in)


def command_of(row: Verb) -> click.Command:
    """The command of a verb."""

    def call(invocation: Invocation, name: str, target: str | None = None, **given: Any) -> None:
        code = code_of(invocation, given) if row.brings_code else {}
        if row.brings_code and target is None and (code["conf"] or code["requirements"]):
            raise InvalidRequest(
                "--conf, --conf-file and --requirements belong to new code: give TARGET"
            )
        given["executors"] = _executors(given.pop("executors", ()))
        given |= {"wait": invocation.wait, "dry_run": invocation.dry_run, **code}
        with (
            invocation.nimbus() as nimbus,
            Steps(f"{row.name} {name}", quiet=invocation.json) as steps,
        ):
            done = change_topology(
                nimbus, name, target, verb=row.name, progress=steps.on_step, **given
            )
        _print(invocation, done)

    call.__doc__ = row.summary.replace("a topology", "topology NAME", 1)
    made: Any = field_options(row.request, call)
    if row.brings_code:
        target = {"target": {"required": not row.batches}, "args": {"nargs": -1}}
        made = parameters({**target, **grammar()["shared"]["code"]}, made)
    return verb(row.name, changes=True)(click.argument("name")(made))


def _executors(pairs: tuple[str, ...]) -> dict[str, int]:
    executors: dict[str, int] = {}
    for pair in pairs:
        component, equals, number = pair.rpartition("=")
        if not equals or not component or not number.isdigit() or int(number) < 1:
            raise InvalidRequest(f"-e {pair!r} is not of the form COMPONENT=N with N of 1 or more")
        executors[component] = int(number)
    return executors


def _print(invocation: Invocation, done: Change) -> None:
    if invocation.json:
        print_json(done.to_document())
        return
    for key, value in (done.conf or {}).items():
        old, new = (json.dumps(value[side], default=str) for side in ("old", "new"))
        click.echo(plain(f"{key}: {old} -> {new}"))
    if done.planned:
        click.echo(f"would {done.planned['would']} {done.id} ({done.status})")
        _print_plan(done.planned.get("plan"))
        return
    run = f" (run {done.run_id})" if done.run_id else ""
    click.echo(
        f"{done.id or done.name} is {done.status or 'being changed'}{run}, {done.seconds:.1f} s"
    )
    for worker, state in sorted((done.upgrade or {}).get("workers", {}).items()):
        click.echo(f"  {worker}  {state}")


def _print_plan(plan: dict[str, Any] | None) -> None:
    if plan is None:
        return
    added, removed = len(plan["tasks_added"]), len(plan["tasks_removed"])
    click.echo(
        f"plan: {plan['outcome']}, {plan['moved']} tasks move, {added} are added, {removed} are removed"
    )
    print_table("moves", "task component from to why", plan["moves"])
    print_table("workers", "node host:port tasks kept", plan["workers"])
    for warning in plan["warnings"]:
        click.echo(plain(f"warning: {warning}"), err=True)


globals().update({row.name: command_of(row) for row in VERBS.values()})
