"""End of a rebalance whose tasks have moved: the spouts resume."""

from dataclasses import replace

from storm_dagster.core.transitions import apply_event
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, NotAlive, StormDagsterError
from storm_dagster.model.records import TopologyStatus, encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.rebalance_request import pending_path
from storm_dagster.operations.live.spout_pause import killed_meanwhile, wait_until_applied
from storm_dagster.operations.results import RebalanceResult
from storm_dagster.operations.steps import shared_steps
from storm_dagster.operations.transactions import commit, retry_on_conflict

END_REBALANCE = shared_steps("end_rebalance", "end_rebalance")


def end_rebalance(ctx: OperationsContext, result: RebalanceResult) -> RebalanceResult:
    """Give a topology whose tasks have moved its former status, when its workers know the places.

    If that fails, the spouts resume a few seconds later: the rebalance is due then.
    :class:`NotAlive` if the topology was killed; :class:`Fenced` if another nimbus leads.
    """
    if result.status != "REBALANCING":
        return result
    epoch = ctx.current_epoch()
    topology_id = result.topology_id

    def attempt(view: ClusterView) -> TopologyStatus:
        topology = view.topologies.get(topology_id)
        if topology is None or topology.base.status == "KILLED":
            raise killed_meanwhile(topology_id)
        base = topology.base
        # With a stored request it is a later rebalance, whose tasks have not moved yet.
        is_later = ctx.cluster.state.exists(pending_path(topology_id))
        if base.status != "REBALANCING" or is_later:
            return base.status
        after = apply_event(base, "finish_rebalance")
        transaction = ctx.cluster.fenced(epoch)
        transaction.set(paths.topology(topology_id), encode_record(after), topology.base_at.version)
        commit(ctx, transaction, "end_rebalance")
        return after.status

    try:
        if result.version is not None:
            wait_until_applied(ctx, topology_id, result.version)
        status = retry_on_conflict(ctx, f"resuming {topology_id}", attempt)
    except (NotAlive, Fenced):
        raise
    except StormDagsterError as error:
        ctx.log.warning("the spouts of %s resume later: %s", topology_id, error.message)
        return result
    return replace(result, status=status)
