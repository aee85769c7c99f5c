"""The forms of the Launchpad: one typed config for each job, every field described and defaulted.

Those of verbs are made of their requests. A map of conf is plain ``dict``: Dagster's typed maps
refuse null values, which conf maps may hold.
"""

import functools
from typing import Any, get_type_hints

import dagster as dg
from pydantic import Field, create_model

from storm_dagster.defs.keys import described
from storm_dagster.model.requests import CodeRequest, RequestModel, SubmitRequest, bounds_of
from storm_dagster.model.verbs import VERBS, Verb


class NameConfig(dg.Config):
    """Config: the topology."""

    name: str = described("name_form.name")


class CodeConfig(dg.Config):
    """Config: new code."""

    target: str = described("code.target", default="")
    conf: dict = described("code.conf", default={})


def _config_of(request: type[RequestModel], *bases: type[dg.Config], **more: Any) -> Any:
    """The config with the fields of a request, after those of ``bases``; types and bounds are the
    request's.
    """
    # Dagster makes its form of plain types.
    hints = get_type_hints(request)
    plain = {
        name: (
            hints[name],
            Field(default=info.default, description=info.description, **bounds_of(info)),
        )
        for name, info in request.model_fields.items()
        if name not in ("name", "dry_run")
    }
    code = (CodeConfig,) if issubclass(request, CodeRequest) else ()
    return create_model(
        f"{request.__name__}Config", __base__=(*code, *bases) or dg.Config, **plain, **more
    )


_WAIT_SECS = Field(
    default=300,
    ge=0,
    description="Longest wait for workers; afterwards it goes on without this run.",
)


@functools.lru_cache(maxsize=64)
def verb_config(verb: Verb) -> Any:
    """The config of a verb's job."""
    return _config_of(
        verb.request, NameConfig, **({"wait_secs": (int, _WAIT_SECS)} if verb.batches else {})
    )


class SubmitConfig(_config_of(SubmitRequest)):
    """Config of a submission. The topology's name is the partition key of the run, not a field."""


class RebalanceConfig(_config_of(VERBS["rebalance"].request)):
    """Config of `rebalance_topology` for the topology of its partition; it stands on
    `storm/assignment`.
    """


class ReassignConfig(dg.Config):
    """Config of a reassignment: its causes. The healing sensor fills it; if empty, the run finds
    them itself.
    """

    causes: list[dict[str, Any]] = described("reassign.causes", default_factory=list)
