"""Changes of a running topology by an update, and the numbers that the update keeps.

The preview of an update and its run list the same changes.
"""

from collections.abc import Mapping

from storm_dagster.core.reassignment import Runnable
from storm_dagster.core.submission.conf import conf_differences
from storm_dagster.core.submission.kept_sizes import (
    WORKERS_KEY,
    KeptSizes,
    executor_limits,
    kept_sizes,
    sizes_of,
)
from storm_dagster.model.conf import Conf, mask
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import TopologyView
from storm_dagster.operations.results import UpdateChange


def kept_of_former(
    replaced: TopologyView,
    former: Runnable,
    spec: TopologySpec,
    total: Conf,
    named: tuple[str, ...],
) -> KeptSizes:
    """Sizes of the replaced topology that a rebalance set and the update does not name.

    ``former`` is the code of the ``replaced`` topology, ``spec`` the new topology, normalized,
    ``total`` its total conf.
    """
    return kept_sizes(
        replaced.base,
        sizes_of(former.spec, former.conf),
        sizes_of(spec, total),
        named=named,
        limits=executor_limits(spec, total),
    )


def describe_kept(kept: KeptSizes) -> list[str]:
    """Describe the kept numbers, for the log."""
    texts = [f"{count} executors of {name!r}" for name, count in sorted(kept.executors.items())]
    if kept.workers is not None:
        texts.append(f"{kept.workers} workers")
    return texts


def update_changes(
    replaced: TopologyView,
    former: Runnable,
    total: Conf,
    executors: Mapping[str, int],
) -> tuple[UpdateChange, ...]:
    """Values of the replaced topology that become others, sorted by key; secrets are masked.

    ``total`` is the new total conf, with the number of workers that the new topology gets, and
    ``executors`` are the numbers that it gets (component -> number). A component that only one of
    the two topologies has is omitted; without ``executors`` so are all.
    """
    old = {**former.conf, WORKERS_KEY: replaced.base.workers}
    new = dict(total)
    for component in replaced.base.executors.keys() & executors.keys():
        old[f"parallelism.{component}"] = replaced.base.executors[component]
        new[f"parallelism.{component}"] = executors[component]
    return changed_values(old, new)


def changed_values(old: Conf, new: Conf) -> tuple[UpdateChange, ...]:
    """Values that differ in two total confs with sizes, sorted by key.

    Secrets are masked.
    """
    differences = conf_differences(old, new)
    before = mask({key: old_value for key, (old_value, _) in differences.items()})
    after = mask({key: new_value for key, (_, new_value) in differences.items()})
    return tuple(UpdateChange(key, before[key], after[key]) for key in differences)
