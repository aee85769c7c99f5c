"""Reading of an upload: its conf and its topology, checked."""

from typing import Any, NamedTuple

from storm_dagster.core.submission.conf import kept_conf, limited_conf, removed_owner_keys
from storm_dagster.core.submission.kept_sizes import named_sizes
from storm_dagster.core.submission.setters import check_setters
from storm_dagster.core.submission.validation import check_confs
from storm_dagster.model.access_tokens import is_unowned_caller
from storm_dagster.model.conf_layers import LayerName, merge_conf, overlay
from storm_dagster.model.errors import InvalidTopology, NotAlive
from storm_dagster.model.topology import TopologySpec, decode_topology
from storm_dagster.model.view import TopologyView
from storm_dagster.operations.context import (
    OperationsContext,
    decode_json,
    load_runnable,
    load_stored_conf,
)
from storm_dagster.operations.submit.staging import upload_key


class UploadedSource(NamedTuple):
    """Content of an upload, checked."""

    conf: dict[str, Any]
    """Submitted conf, with the kept keys of a replaced topology."""
    spec: TopologySpec
    warnings: tuple[str, ...]
    archive: str
    """Blob key of the archive."""


def read_source(ctx: OperationsContext, handle: str, former: TopologyView | None) -> UploadedSource:
    """Read an upload, and check its conf and topology.

    ``former`` is the running topology that the upload replaces or upgrades, if any. Conf and
    topology are checked here and not later. The conf keeps the submitted keys of the code that
    ``former`` runs if the upload does not have them; not for an upload by Thrift, because a Storm
    client sends the complete conf each time. :class:`NotAlive` without the upload,
    :class:`InvalidTopology` for an invalid one; :class:`NotAuthorized` if a user who is not an
    administrator changes the owner's lists, or sets a key that it must not set.
    """
    uploaded = ctx.find_blob(upload_key(handle, "topology"))
    raw_conf = ctx.find_blob(upload_key(handle, "conf"))
    # A finished upload has both. A nimbus that leads since a moment may have one of them.
    if uploaded is None or raw_conf is None:
        raise no_upload(handle)
    is_thrift = ctx.find_blob(upload_key(handle, "source")) == b"thrift"
    source = "the uploaded conf"
    spec = decode_topology(uploaded)
    try:
        document = decode_json(raw_conf, source)
    except Exception as error:
        raise InvalidTopology(f"{source} is not valid JSON: {error}") from None
    conf, spec, warnings = check_confs(document, spec, source, "warn" if is_thrift else "error")
    # The blob exists only for a user who is not an administrator.
    submitter = ctx.find_blob(upload_key(handle, "submitter"))
    old = None if former is None else load_runnable(ctx, former)
    layers: dict[LayerName, dict[str, Any]] = {"submission": conf}
    if submitter is not None:
        user = submitter.decode()
        current = ctx.values() if old is None else old.conf
        if old is None:
            warnings.extend(_unowned_warnings(user, conf, spec))
        conf, spec, setter_warnings = check_setters(
            user, conf, spec, current, ignores_cluster_keys=is_thrift
        )
        warnings.extend(setter_warnings)
        layers["submission"] = conf
        lists = merge_conf({"author": spec.conf, "submission": conf})
        layers["owner"] = limited_conf(user, lists, None if old is None else old.conf)
    if former is not None and old is not None and not is_thrift:
        stored_conf = load_stored_conf(ctx, former.code_dir)
        layers["former"] = kept_conf(ctx.values(), stored_conf, old.submitted_keys, document)
    archive = upload_key(handle, "archive")
    return UploadedSource(overlay(layers), spec, tuple(warnings), archive)


def _unowned_warnings(user: str, conf: dict[str, Any], spec: TopologySpec) -> list[str]:
    """Warning if keys of the owner are removed: the token belongs to no user."""
    if not is_unowned_caller(user):
        return []
    removed_keys = removed_owner_keys(merge_conf({"author": spec.conf, "submission": conf}))
    if not removed_keys:
        return []
    return [
        f"removed from the conf, since the access token belongs to no user: "
        f"{', '.join(removed_keys)}; make one with `storm-dagster token create --user NAME`"
    ]


def read_named_sizes(ctx: OperationsContext, handle: str) -> tuple[str, ...]:
    """Read the sizes that the uploaded conf itself names; the upload was read before."""
    raw_conf = ctx.find_blob(upload_key(handle, "conf")) or b"{}"
    return named_sizes(decode_json(raw_conf, "the uploaded conf"))


def no_upload(handle: str) -> NotAlive:
    """Return the error of a request whose upload does not exist."""
    return NotAlive(
        f"upload {handle!r} does not exist, it has expired, was never finished, or was removed "
        "when its command ended with an error: submit or upload again"
    )
