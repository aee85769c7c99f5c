"""Code and conf of a topology that runs in this process: as a submission would have them."""

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.core.submission.conf import total_conf
from storm_dagster.core.submission.validation import check_confs, normalize_submission
from storm_dagster.host.java import java_command
from storm_dagster.host.references import resolve_references
from storm_dagster.host.requirements import install_command, requirements_of
from storm_dagster.model.conf import Conf
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.fusion import is_spark_component
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.topology import TopologySpec
from storm_dagster.packaging.target import describe_target
from storm_dagster.packaging.unpack import unpack_archive

_SPARK_KEYS = ("topology.spark.remote", "spark.remote", "spark.master")
_LOCAL_SPARK = "local[*]"
"""Spark in this process, on all cores."""
_QUIET_SPARK = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
"""Conf with which Spark does not write into the display of the run."""


@dataclass(frozen=True)
class TopologyCode:
    """A described topology, and the folder of its code."""

    name: str
    spec: TopologySpec
    root: Path
    """Folder that is on the import path."""


@dataclass(frozen=True)
class PreparedTopology:
    """A checked topology with its total conf, ready to run."""

    spec: TopologySpec
    conf: dict[str, Any]
    """The total conf, with resolved references."""
    submitted: dict[str, Any]
    """Values that the topology's author and the caller set."""
    warnings: Sequence[str]


def load_code(
    target: str,
    args: Sequence[str],
    *,
    folder: Path,
    home: Path | None = None,
    requirements: Path | None = None,
) -> TopologyCode:
    """Describe TARGET in a child process, and return its code.

    The code of a file or module is used where it lies. An archive, and code with ``requirements``
    or Spark components (Spark gets the archive), is packed and unpacked in ``folder``, as a worker
    has it. Errors are those of ``bundle_target``.
    """
    description = describe_target(target, args, unpacked=folder / "described")
    parts = [part for _, _, part in description.topology.components()]
    has_spark = any(is_spark_component(part) for part in parts)
    if description.target.kind != "archive" and requirements is None and not has_spark:
        return TopologyCode(description.name, description.topology, description.root)
    # Packing needs a package that a slim host lacks; code that is used in place does not.
    from storm_dagster.packaging.archive import bundle_target

    build = folder / "build"
    build.mkdir()
    bundle = bundle_target(target, args, folder=build, home=home, requirements=requirements)
    # A worker has both side by side: Spark components read the packed one.
    packed = folder / "stormjar.jar"
    shutil.copyfile(bundle.archive.path, packed)
    unpacked = folder / "code"
    unpack_archive(packed, unpacked)
    return TopologyCode(bundle.name, bundle.topology, unpacked)


def make_importable(root: Path) -> None:
    """Put the folder of the code first on the import path of this process."""
    if str(root) in sys.path:
        sys.path.remove(str(root))
    sys.path.insert(0, str(root))


def prepare_topology(
    cluster: Conf, code: TopologyCode, conf: Mapping[str, Any], name: str | None = None
) -> PreparedTopology:
    """Check topology and conf as a submission does, and return what runs.

    ``cluster`` is the cluster's conf, ``conf`` the caller's. Raises :class:`InvalidTopology` for a
    topology that no cluster would accept, and :class:`InvalidRequest` for a reference to a missing
    variable or file.
    """
    topology_name = check_topology_name(name or code.name)
    named = code.spec.model_copy(update={"name": topology_name})
    submitted, checked, warnings = check_confs(dict(conf), named, "the conf", "error")
    author_and_caller = {**checked.conf, **submitted}
    stored, normal = normalize_submission(cluster, submitted, checked)
    total = total_conf(cluster, resolve_references(stored))
    return PreparedTopology(normal, _with_spark(normal, total), author_and_caller, warnings)


def _with_spark(spec: TopologySpec, conf: dict[str, Any]) -> dict[str, Any]:
    """Return the conf, with a Spark in this process if Spark components need one.

    The conf may name another: it is then unchanged. Raises :class:`InvalidRequest` if none is named
    and Spark cannot run here.
    """
    spark = [name for name, _, part in spec.components() if is_spark_component(part)]
    if not spark or any(conf.get(key) for key in _SPARK_KEYS):
        return conf
    remedy = "name a server: --conf topology.spark.remote=sc://HOST:PORT"
    if importlib.util.find_spec("pyspark") is None:
        requirement = requirements_of(["pyspark"])[0]
        raise InvalidRequest(
            f"component {spark[0]!r} runs on Spark, and pyspark is not installed: "
            f"{install_command([requirement])}, or {remedy}"
        )
    try:
        java_command()
    except Unavailable as error:
        raise InvalidRequest(
            f"component {spark[0]!r} runs on Spark, which needs Java: {error.message}; or {remedy}"
        ) from None
    spark_conf = {**_QUIET_SPARK, **(conf.get("topology.spark.conf") or {})}
    return {**conf, "spark.master": _LOCAL_SPARK, "topology.spark.conf": spark_conf}
