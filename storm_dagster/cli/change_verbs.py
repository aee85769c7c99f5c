"""``submit``, ``jar``, and a command for each verb that changes a topology."""

import importlib.util
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from storm_dagster.cli.code_arguments import code_arguments
from storm_dagster.cli.options import (
    Function,
    Invocation,
    add_options,
    change_options,
    code_options,
    verb,
)
from storm_dagster.cli.output import Steps, notify, plain, print_answer, print_json, print_table
from storm_dagster.client.changes import Change, change_topology
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.model.conf import Conf, validate_conf
from storm_dagster.model.conf_layers import merge_conf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.requests import Flag, RequestModel, SubmitRequest, bounds_of
from storm_dagster.model.verbs import VERBS, Verb

_BUSY = ("STARTED", "STARTING", "IN_PROGRESS")


def _dry_run(
    invocation: Invocation,
    target: str,
    args: tuple[str, ...],
    name: str | None,
    requirements: Path | None,
    conf: Conf,
) -> None:
    from storm_dagster.core.submission.spark_keys import check_spark_keys
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
    own_conf = merge_conf({"author": bundle.topology.conf, "submission": conf})
    check_spark_keys(invocation.conf.values, own_conf, bundle.topology)
    topology_name = check_topology_name(name or bundle.name)
    components = [
        {"id": component, "type": kind, "parallelism": spec.parallelism}
        for component, kind, spec in bundle.topology.components()
    ]
    archive = bundle.archive
    document = {
        "name": topology_name,
        "dry_run": True,
        "components": components,
        "archive": {"sha256": archive.sha256, "size": archive.size, "files": archive.files},
    }
    title = (
        f"would submit {topology_name} with an archive of {archive.size} bytes"
        f" ({archive.sha256[:12]})"
    )
    columns = "component=id type parallelism"
    print_answer(invocation.json, document, columns, components, title=title)


def request_options(request: type[RequestModel]) -> Callable[[Function], Function]:
    """Decorator that adds an option for each field with a :class:`Flag`.

    The value of an option that is not given is ``None``, or empty.
    """
    options = []
    for name, field in request.model_fields.items():
        flag = _flag_of(field)
        if flag is not None:
            options.append(_option_of(name, field, flag))

    def decorate(function: Function) -> Function:
        return add_options(options, function)

    return decorate


def _flag_of(field: FieldInfo) -> Flag | None:
    for annotation in field.metadata:
        if isinstance(annotation, Flag):
            return annotation
    return None


def _option_of(name: str, field: FieldInfo, flag: Flag) -> Callable[[Function], Function]:
    settings: dict[str, Any] = {"help": field.description, "metavar": flag.metavar}
    if field.annotation is bool:
        settings["is_flag"] = True
    elif get_origin(field.annotation) is dict:
        settings["multiple"] = True
    elif int in (field.annotation, *get_args(field.annotation)):
        bounds = bounds_of(field)
        settings["type"] = click.IntRange(bounds.get("ge"), bounds.get("le"))
    return click.option(flag.name, name, **settings)


@verb("submit")
@change_options
@click.argument("target")
@click.argument("args", nargs=-1)
@click.option("--name", help="Name of the topology. [default: its own]")
@code_options
@request_options(SubmitRequest)
def submit(
    invocation: Invocation, target: str, args: tuple[str, ...], name: str | None, **options: Any
) -> None:
    """Submit TARGET, a topology in code or in an archive.

    TARGET is file.py[:Name], package.module[:Name], or archive.zip::module[:Name]. ARGS after -- go
    to a callable target.
    """
    code = code_arguments(invocation, options)
    if invocation.dry_run:
        conf, _ = validate_conf(code["conf"], source="the conf", submitted=True)
        _dry_run(invocation, target, args, name, code["requirements"], conf)
        return
    from storm_dagster.client.submission import submit_target

    with (
        invocation.nimbus() as nimbus,
        Steps(f"submitting {target}", quiet=invocation.json) as steps,
    ):
        if invocation.wait:
            _await_dagster(invocation, steps, options["timeout"])

        def on_step(step: str, state: str) -> None:
            steps.on_step(step, state)
            cluster = ClusterFile.read(invocation.home) if step == "assignment" else None
            if state in _BUSY and cluster is not None and cluster.spark and cluster.spark.starting:
                steps.note(step, "waits for Spark, which dev is starting")

        submission = submit_target(
            nimbus,
            target,
            args,
            name=name,
            wait=invocation.wait,
            progress=on_step,
            **code,
            **options,
        )
        if invocation.wait:
            steps.done("tasks", "all run")
    if invocation.json:
        print_json(submission.to_document())
    elif invocation.wait:
        seconds = f"{submission.seconds:.1f} s"
        click.echo(f"{submission.id} is {submission.status}: all tasks run, {seconds}")
        _print_warnings(submission)
    else:
        run = f"run {submission.run_id} (token {submission.token})"
        click.echo(f"{submission.name} is being submitted by {run}")


def _await_dagster(invocation: Invocation, steps: Steps, timeout: float) -> None:
    """Wait until a Dagster that ``dev`` did not start has the cluster's code location.

    Without effect in another cluster: its Dagster is not waited for. After ``timeout`` seconds the
    reason of the wait is raised.
    """
    cluster = ClusterFile.read(invocation.home) if invocation.conf_dir is None else None
    if cluster is None or cluster.dagster is None or cluster.dagster.own:
        return
    from storm_dagster.cli.dev.existing_dagster import await_location

    steps.begin("Dagster")
    await_location(
        invocation.conf, invocation.home, timeout, lambda reason: steps.note("Dagster", reason)
    )
    steps.done("Dagster")


@verb("jar", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("archive")
@click.argument("module")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def jar(invocation: Invocation, archive: str, module: str, args: tuple[str, ...]) -> None:
    """Run MODULE of ARCHIVE as a program that submits topologies.

    Its calls of submit_topology upload ARCHIVE. The program is run in this process, as
    ``python -m MODULE ARGS`` would run it, with the unpacked archive first on the path and
    STORM_JAR naming the archive.
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
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            raise InvalidRequest(f"archive {archive} holds no module {module!r}")
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            os.chdir(started_in)


def command_of(row: Verb) -> click.Command:
    """The command of a verb."""

    def change(
        invocation: Invocation, name: str, target: str | None = None, **options: Any
    ) -> None:
        code = code_arguments(invocation, options) if row.brings_code else {}
        if row.brings_code and target is None and (code["conf"] or code["requirements"]):
            raise InvalidRequest(
                "--conf, --conf-file and --requirements belong to new code: give TARGET"
            )
        executors = _parse_executors(options.pop("executors", ()))
        with (
            invocation.nimbus() as nimbus,
            Steps(f"{row.name} {name}", quiet=invocation.json) as steps,
        ):
            outcome = change_topology(
                nimbus,
                name,
                target,
                verb=row.name,
                wait=invocation.wait,
                dry_run=invocation.dry_run,
                executors=executors,
                progress=steps.on_step,
                **options,
                **code,
            )
        _print_change(invocation, outcome)

    change.__doc__ = row.summary.replace("a topology", "topology NAME", 1)
    function = request_options(row.request)(change)
    if row.brings_code:
        function = code_options(function)
        function = click.argument("args", nargs=-1)(function)
        function = click.argument("target", required=not row.batches)(function)
    function = click.argument("name")(function)
    return verb(row.name)(change_options(function))


def _parse_executors(pairs: tuple[str, ...]) -> dict[str, int]:
    executors: dict[str, int] = {}
    for pair in pairs:
        component, equals, number = pair.rpartition("=")
        if not equals or not component or not number.isdecimal() or int(number) < 1:
            raise InvalidRequest(f"-e {pair!r} is not of the form COMPONENT=N with N of 1 or more")
        executors[component] = int(number)
    return executors


def _print_change(invocation: Invocation, change: Change) -> None:
    if invocation.json:
        print_json(change.to_document())
        return
    for key, values in (change.conf or {}).items():
        old = json.dumps(values["old"], default=str)
        new = json.dumps(values["new"], default=str)
        click.echo(plain(f"{key}: {old} -> {new}"))
    if change.planned:
        click.echo(f"would {change.planned['would']} {change.id} ({change.status})")
        _print_plan(change.planned.get("plan"))
        return
    if change.cancelled:
        click.echo(f"cancelled the submission of {change.cancelled}")
        return
    topology = change.id or change.name
    status = change.status or "being changed"
    run = f" (run {change.run_id})" if change.run_id else ""
    click.echo(f"{topology} is {status}{run}, {change.seconds:.1f} s")
    if change.result.summary:
        click.echo(plain(f"  {change.result.summary}"))
    _print_warnings(change)
    for worker, state in sorted((change.upgrade or {}).get("workers", {}).items()):
        click.echo(f"  {worker}  {state}")


def _print_warnings(change: Change) -> None:
    """Print the warnings about the submitted conf on standard error."""
    for warning in change.result.warnings:
        notify(f"warning: {warning}")


def _print_plan(plan: dict[str, Any] | None) -> None:
    if plan is None:
        return
    added = len(plan["tasks_added"])
    removed = len(plan["tasks_removed"])
    click.echo(
        f"plan: {plan['outcome']}, {plan['moved']} tasks move, {added} are added,"
        f" {removed} are removed"
    )
    print_table("moves", "task component from to why", plan["moves"])
    print_table("workers", "node host:port tasks kept", plan["workers"])
    for warning in plan["warnings"]:
        click.echo(plain(f"warning: {warning}"), err=True)


COMMANDS: Mapping[str, click.Command] = {
    "submit": submit,
    "jar": jar,
    **{row.name: command_of(row) for row in VERBS.values()},
}
