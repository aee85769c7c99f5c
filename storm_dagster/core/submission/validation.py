"""Validation of a topology, before a part of it is stored.

Every message names the component, the reason and the remedy, with the closest existing name if a
name is wrong.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

from storm_dagster.core.dataplane.window_state import window_shape
from storm_dagster.core.scheduling.build import user_workers
from storm_dagster.core.submission.conf import normalize_conf, submitted_keys, total_conf
from storm_dagster.core.submission.spark_keys import check_spark_keys
from storm_dagster.core.submission.tasks import (
    normalize_topology,
    number_tasks,
    task_count,
    with_system_components,
)
from storm_dagster.model.conf import Conf, check_value, validate_conf
from storm_dagster.model.conf_layers import merge_conf
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.groupings import GROUPINGS
from storm_dagster.model.names import (
    check_component_id,
    check_importable,
    check_stream_id,
    check_topology_name,
)
from storm_dagster.model.records import encode_record
from storm_dagster.model.topology import (
    ComponentSpec,
    InputSpec,
    StreamSpec,
    TopologySpec,
    check_inputs,
)

MAX_SUBMITTED_KEYS_BYTES = 30 * 1024
"""Room for the names of submitted conf keys in a topology's record.

The release before accepts 64 KiB of unknown fields, and the record may hold the keys of two
versions of the code.
"""
_MAX_ISOLATION_BYTES = 16 * 1024
"""Room for the hosts of ``isolation.scheduler.machines`` in a topology's record.

A record that has ended a gray upgrade holds them twice, the second time as an unknown field of the
release before.
"""
_IDENTIFIER = r"[^\W\d]\w*"
"""Pattern of a Python identifier."""
_CODE_NAME = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}(\.{_IDENTIFIER})*")


def check_confs(
    document: Any, spec: TopologySpec, source: str, unknown: Literal["error", "warn"]
) -> tuple[dict[str, Any], TopologySpec, list[str]]:
    """Check every conf of a submission; return (conf, topology, warnings).

    ``document`` is the submission's conf, ``source`` its name in messages, ``unknown`` that of
    :func:`validate_conf`, which also cleans the returned conf, the topology's own and those of its
    components. Raises :class:`InvalidTopology` for a wrong conf.
    """
    conf, warnings = validate_conf(document, source=source, unknown=unknown, submitted=True)
    topology_conf, topology_warnings = validate_conf(
        spec.conf, source="the topology's own conf", unknown=unknown, submitted=True
    )
    warnings.extend(topology_warnings)
    parts: dict[str, dict[str, ComponentSpec]] = {"bolt": {}, "spout": {}}
    for component_id, kind, part in spec.components():
        part_source = f"conf of {kind} {component_id!r}"
        part_conf, part_warnings = validate_conf(
            part.conf, source=part_source, unknown=unknown, submitted=True
        )
        warnings.extend(part_warnings)
        parts[kind][component_id] = part.model_copy(update={"conf": part_conf})
    changes = {"conf": topology_conf, "bolts": parts["bolt"], "spouts": parts["spout"]}
    return conf, spec.model_copy(update=changes), warnings


def normalize_submission(
    cluster: Conf, submitted: Conf, spec: TopologySpec, topology_id: str = ""
) -> tuple[dict[str, Any], TopologySpec]:
    """Return conf and topology in their stored form, after all checks.

    Raises :class:`InvalidTopology` for a topology that cannot run.
    """
    conf = normalize_conf(cluster, submitted, spec, topology_id)
    total = total_conf(cluster, conf)
    normal = normalize_topology(total, spec).model_copy(update={"conf": {}})
    validate_topology(normal, total)
    check_spark_keys(cluster, conf, normal)
    _check_limits(cluster, normal, total)
    _check_submitted_keys(submitted)
    _check_isolation(normal.name, total)
    # Raises if the table is too large for a node of ZooKeeper.
    encode_record(number_tasks(with_system_components(normal, total), total))
    return conf, normal


def _check_submitted_keys(submitted: Conf) -> None:
    """Check that the names of the submitted keys fit into the topology's record."""
    size = len(json.dumps(submitted_keys(submitted)))
    if size > MAX_SUBMITTED_KEYS_BYTES:
        raise InvalidTopology(
            f"the names of the {len(submitted)} submitted conf keys take {size} bytes, a "
            "topology's "
            f"record has room for {MAX_SUBMITTED_KEYS_BYTES}: use fewer keys, such as one map"
        )


def _check_isolation(name: str, conf: Conf) -> None:
    """Check that the isolation hosts are names, and that they fit into the topology's record."""
    hosts: list[str] = list(conf.get("isolation.scheduler.machines") or ())
    size = len(json.dumps(hosts))
    if size > _MAX_ISOLATION_BYTES:
        raise InvalidTopology(
            f"topology {name!r}: the {len(hosts)} hosts of isolation.scheduler.machines take "
            f"{size} bytes, a topology's record has room for {_MAX_ISOLATION_BYTES}: list fewer "
            "hosts"
        )
    for host in hosts:
        if not host or host != "".join(host.split()) or not host.isprintable():
            raise InvalidTopology(
                f"topology {name!r}: isolation.scheduler.machines lists {host!r:.60}, which is no "
                "host name: use the hosts that `storm-dagster status` shows"
            )


def validate_topology(spec: TopologySpec, conf: Conf) -> None:
    """Check the rules of a normalized topology.

    Raises :class:`InvalidTopology` for the first rule that it breaks. ``conf`` is the total conf.
    The topology is the user's, without system components.
    """
    # The submission of a new topology checks its name in full.
    check_topology_name(spec.name, is_new=False)
    if conf.get("topology.workers") is None:
        raise InvalidTopology("topology.workers is not set: give a whole number of at least 1")
    _check_values(
        conf, ("topology.workers", "topology.acker.executors", "topology.max.task.parallelism")
    )
    try:
        user_workers(conf.get("use.userdefine.assignment"))
    except InvalidRequest as error:
        raise InvalidTopology(error.message) from None
    for component_id in spec.bolts:
        if component_id in spec.spouts:
            raise InvalidTopology(
                f"component id {component_id!r} names a spout and a bolt: component ids are "
                "unique, rename one"
            )
    if not spec.spouts:
        raise InvalidTopology(
            f"topology {spec.name!r} has no spout, so that no tuple ever enters it: add one"
        )
    for component_id, kind, part in spec.components():
        check_component_id(component_id)
        _check_component(component_id, kind, part)
        if _has_windows(part):
            component_conf = merge_conf({"total": conf, "component": part.conf})
            window_shape(component_conf, f"{kind} {component_id!r}")
    for component_id, part in spec.bolts.items():
        streams = check_inputs(spec, component_id)
        for source in part.inputs:
            _check_grouping(component_id, source, streams[source.component, source.stream])


def _has_windows(part: ComponentSpec) -> bool:
    """True if the component's conf has a window key."""
    for key, value in part.conf.items():
        if key.startswith("topology.bolts.") and value is not None:
            return True
    return False


def check_task_limit(cluster: Conf, name: str, tasks: int) -> None:
    """Check ``nimbus.tasks.perTopology`` for the topology of that name."""
    limit = cluster.get("nimbus.tasks.perTopology")
    if limit is not None and tasks > limit:
        raise InvalidTopology(
            f"topology {name!r} asks for {tasks} tasks, nimbus.tasks.perTopology allows {limit}: "
            "ask for fewer"
        )


def check_size_limits(cluster: Conf, name: str, *, executors: int = 0, workers: int = 0) -> None:
    """Check ``nimbus.executors.perTopology`` and ``nimbus.slots.perTopology``.

    ``executors`` are those of the topology's own components.
    """
    for unit, number in (("executors", executors), ("slots", workers)):
        key = f"nimbus.{unit}.perTopology"
        limit = cluster.get(key)
        if limit is not None and number > limit:
            raise InvalidTopology(
                f"topology {name!r} asks for {number} {unit}, {key} allows {limit}: ask for fewer"
            )


def _check_limits(cluster: Conf, spec: TopologySpec, conf: Conf) -> None:
    """Check the cluster's limits for one topology, without system components."""
    tasks = sum(task_count(part, conf) for _, _, part in spec.components())
    check_task_limit(cluster, spec.name, tasks)
    executors = sum(part.parallelism for _, _, part in spec.components())
    check_size_limits(cluster, spec.name, executors=executors, workers=conf["topology.workers"])


def _check_values(conf: Conf, keys: Iterable[str], owner: str = "") -> None:
    """Check the values of these keys; errors begin with ``owner``."""
    for key in keys:
        value = conf.get(key)
        if value is None:
            continue
        problem = check_value(key, value)
        if problem:
            raise InvalidTopology(f"{owner}{problem}")


def _check_component(component_id: str, kind: str, part: ComponentSpec) -> None:
    """Check the parallelism, conf, code and output streams of one component."""
    if kind == "spout" and part.inputs:
        raise InvalidTopology(
            f"spout {component_id!r} has inputs (from {part.inputs[0].component!r}): spouts only "
            "emit, make it a bolt"
        )
    if part.parallelism < 1:
        raise InvalidTopology(
            f"{kind} {component_id!r} has parallelism {part.parallelism}: give at least 1, or "
            f"remove the {kind}"
        )
    keys = ("topology.tasks", "topology.max.task.parallelism", "task.on.differ.node")
    _check_values(part.conf, keys, f"{kind} {component_id!r}: ")
    if part.object.python is not None:
        check_code_name(part.object.python, f"{kind} {component_id!r}")
    elif any("\x00" in word for word in part.object.shell or ()):
        raise InvalidTopology(
            f"{kind} {component_id!r} has a NUL character in its shell command: remove it"
        )
    for stream_id, stream in part.outputs.items():
        check_stream_id(stream_id)
        for name in sorted(stream.fields):
            if stream.fields.count(name) > 1:
                raise InvalidTopology(
                    f"{kind} {component_id!r} declares field {name!r} twice in stream "
                    f"{stream_id!r}: rename one"
                )


def check_code_name(name: str, owner: str) -> None:
    """Require that ``name`` is ``"module:QualName"`` that any process can import.

    Raises :class:`InvalidTopology`.
    """
    if not _CODE_NAME.fullmatch(check_importable(name, owner)):
        raise InvalidTopology(f"{owner} runs {name!r}, which is not of the form 'module:name'")


def _check_grouping(component_id: str, source: InputSpec, stream: StreamSpec) -> None:
    """Check the fields of an input's grouping; ``stream`` is the one that it reads."""
    grouping = source.grouping
    place = (
        f"bolt {component_id!r}: {grouping.type} grouping on stream {source.stream!r} of "
        f"{source.component!r}"
    )
    needs = GROUPINGS[grouping.type].needs
    if needs == "fields" and not grouping.fields:
        raise InvalidTopology(
            f"{place} names no field: name at least one, or use the global grouping"
        )
    if needs == "direct" and not stream.direct:
        raise InvalidTopology(
            f"{place}, which is not a direct stream: declare it direct, or group otherwise"
        )
    if needs == "object":
        if not grouping.object:
            raise InvalidTopology(f"{place} names no function: give 'module:function'")
        check_code_name(grouping.object, place)
