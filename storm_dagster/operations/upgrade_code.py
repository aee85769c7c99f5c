"""Code of a gray upgrade: read from an upload, and stored beside the former code."""

from dataclasses import dataclass
from typing import Any

from storm_dagster.core.reassignment import Runnable
from storm_dagster.core.submission.conf import (
    UPGRADE_KEYS,
    base_conf,
    stored_document,
    submitted_keys,
    total_conf,
)
from storm_dagster.core.submission.kept_sizes import (
    describe_unapplied,
    describe_unapplied_resources,
    sizes_of,
    unapplied_sizes,
)
from storm_dagster.core.submission.validation import normalize_submission
from storm_dagster.model.conf import Conf
from storm_dagster.model.names import make_code_dir
from storm_dagster.model.records import GrayUpgrade, StormBase
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.submit.code_storage import next_version_number, store_code
from storm_dagster.operations.submit.spark_conf import check_session_keys
from storm_dagster.operations.submit.sweeping import sweep_upgrade_lists
from storm_dagster.operations.submit.uploaded_source import read_source


@dataclass(frozen=True)
class NewCode:
    """Code of an upload for a running topology, checked and normalized."""

    conf: dict[str, Any]
    total: Conf
    """The conf with all layers below it."""
    spec: TopologySpec
    archive: str
    """Blob key of the archive."""
    submitted_keys: tuple[str, ...]
    warnings: tuple[str, ...]


def read_new_code(ctx: OperationsContext, topology: TopologyView, handle: str) -> NewCode:
    """Read the upload; raises the errors of :func:`read_source`."""
    uploaded = read_source(ctx, handle, topology)
    spec = uploaded.spec.model_copy(update={"name": topology.base.name})
    conf, spec = normalize_submission(ctx.values(), uploaded.conf, spec, topology.id)
    total = total_conf(ctx.values(), conf)
    return NewCode(
        conf,
        total,
        spec,
        archive=uploaded.archive,
        submitted_keys=submitted_keys(uploaded.conf),
        warnings=uploaded.warnings + check_session_keys(ctx, total, spec),
    )


def unapplied_by_upgrade(
    base: StormBase, former: Runnable, code: NewCode
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the sizes of the new code that a gray upgrade does not apply, and warnings.

    The warnings also name memory and CPU of workers.
    """
    sizes = unapplied_sizes(
        base, sizes_of(former.spec, former.conf), sizes_of(code.spec, code.total)
    )
    warnings = describe_unapplied(base.name, sizes)
    resource_warnings = describe_unapplied_resources(base.name, former.conf, code.total)
    return tuple(sizes), (*warnings, *resource_warnings)


def store_new_code(
    ctx: OperationsContext,
    epoch: int,
    topology: TopologyView,
    code: NewCode,
    token: str,
    allow_degraded: bool,
) -> GrayUpgrade:
    """Store the code beside the former, and return the record of its upgrade."""
    # The key is in milliseconds, by default a day.
    ttl_secs = int(code.total.get("topology.upgrade.ttl") or 86_400_000) / 1000
    ttl = max(1, round(ttl_secs))
    # The keys are for this request only: a restart of the topology is not an upgrade.
    conf = {key: value for key, value in code.conf.items() if key not in UPGRADE_KEYS}
    sweep_upgrade_lists(ctx, epoch, topology.id)
    code_dir = make_code_dir(topology.id, next_version_number(ctx, epoch))
    stored = store_code(
        ctx,
        code_dir,
        name=topology.base.name,
        archive=code.archive,
        conf=stored_document(conf, code.submitted_keys),
        spec=code.spec,
        keep=False,
        allow_degraded=allow_degraded,
    )
    return GrayUpgrade(
        expires=ctx.now_secs() + ttl,
        ttl_secs=ttl,
        code_dir=code_dir,
        token=token,
        code=stored.hashes,
        base_conf=base_conf(code.total),
    )
