"""Forms of the Launchpad: one typed config with descriptions per job.

The forms of verbs are made from their requests. A map of conf is a plain ``dict``, because
Dagster's typed maps refuse null values, which conf maps may contain.
"""

import functools
from typing import Any, get_type_hints

import dagster as dg
from pydantic import Field, create_model

from storm_dagster.defs.keys import catalog_field
from storm_dagster.model.requests import CodeRequest, RequestModel, SubmitRequest, bounds_of
from storm_dagster.model.verbs import VERBS, Verb

_WAIT_SECS = Field(
    default=300,
    ge=0,
    description="Longest wait for workers; afterwards the upgrade continues without this run.",
)


class NameConfig(dg.Config):
    """Config: the topology."""

    name: str = catalog_field("name_form.name")


class CodeConfig(dg.Config):
    """Config: new code."""

    target: str = catalog_field("code.target", default="")
    conf: dict = catalog_field("code.conf", default={})


def _config_of(request: type[RequestModel], *bases: type[dg.Config], **more: Any) -> Any:
    """The config with the fields of a request, after those of ``bases``.

    Types and bounds are those of the request; ``more`` are further fields.
    """
    # Dagster makes its form of plain types.
    hints = get_type_hints(request)
    fields: dict[str, Any] = {}
    for name, info in request.model_fields.items():
        if name not in ("name", "dry_run"):
            bounds = bounds_of(info)
            field = Field(default=info.default, description=info.description, **bounds)
            fields[name] = (hints[name], field)
    fields.update(more)
    if issubclass(request, CodeRequest):
        bases = (CodeConfig, *bases)
    return create_model(f"{request.__name__}Config", __base__=bases or dg.Config, **fields)


@functools.lru_cache(maxsize=64)
def verb_config(verb: Verb) -> Any:
    """The config of a verb's job."""
    if verb.batches:
        return _config_of(verb.request, NameConfig, wait_secs=(int, _WAIT_SECS))
    return _config_of(verb.request, NameConfig)


class SubmitConfig(_config_of(SubmitRequest)):
    """Config of a submission; the topology's name is the partition key of the run."""


class RebalanceConfig(_config_of(VERBS["rebalance"].request)):
    """Config of `rebalance_topology`, at its asset `storm/assignment`.

    The partition of the run is the topology.
    """


class ReassignConfig(dg.Config):
    """Config of a reassignment: its causes.

    The healing sensor fills it; if it is empty, the run finds the causes.
    """

    causes: list[dict[str, Any]] = catalog_field("reassign.causes", default_factory=list)
