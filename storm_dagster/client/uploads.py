"""Upload sessions: an archive, a conf and a topology, under one opaque handle."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.client.http import NimbusClient
from storm_dagster.model.errors import InvalidRequest, StormDagsterError, Unavailable
from storm_dagster.model.topology import TopologySpec
from storm_dagster.packaging.archive import Archive, bundle_target

log: logging.Logger = logging.getLogger(__name__)
_CHUNK = 1 << 20
"""Bytes of an archive that are read and sent at once."""
_stored: set[tuple[str, str]] = set()
"""(URL of the leader, hash) of archives that this process has uploaded or found stored.

Each is uploaded once.
"""


@dataclass(frozen=True)
class Uploaded:
    """Finished upload, to which a submission refers."""

    handle: str
    name: str
    """Name of the topology itself, for a submission without a name."""
    sha256: str
    size: int
    """Number of bytes of the archive."""
    sent: bool
    """True if the archive was transferred, False if its hash was stored already."""


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield from iter(lambda: stream.read(_CHUNK), b"")


def _put_archive(nimbus: NimbusClient, handle: str, archive: Archive) -> bool:
    """Put the archive, by its hash if the cluster has it; return True if it was sent."""
    path = f"/v1/uploads/{handle}/archive"
    key = (nimbus.leader(), archive.sha256)
    if key in _stored or nimbus.exists(f"/v1/archives/{archive.sha256}"):
        try:
            nimbus.request("PUT", path, params={"sha256": archive.sha256}, content=b"")
            _stored.add(key)
            return False
        except Unavailable:
            raise
        except StormDagsterError as error:
            # It was removed since it was found: send it.
            log.info("archive %s is no longer stored (%s)", archive.sha256[:12], error.message)
    headers = {"X-Content-SHA256": archive.sha256, "Content-Length": str(archive.size)}
    nimbus.request("PUT", path, content=lambda: _chunks(archive.path), headers=headers)
    _stored.add(key)
    return True


def _encode_conf(conf: Mapping[str, Any]) -> bytes:
    """Encode the conf as JSON; the cluster checks its keys and values."""
    try:
        return json.dumps(dict(conf), sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"the conf of the submission is not JSON ({error}): use plain values"
        ) from None


def upload(
    nimbus: NimbusClient,
    *,
    archive: Archive,
    conf: Mapping[str, Any],
    topology: TopologySpec,
    name: str = "",
) -> Uploaded:
    """Upload the three parts.

    ``name`` is that of the topology for a submission without one, by default its own. On any
    failure the handle is cancelled, and the error is raised.
    """
    handle = str(nimbus.post("/v1/uploads")["handle"])
    try:
        is_sent = _put_archive(nimbus, handle, archive)
        _put_part(nimbus, f"/v1/uploads/{handle}/conf", _encode_conf(conf))
        _put_part(nimbus, f"/v1/uploads/{handle}/topology", topology.to_json())
        nimbus.post(f"/v1/uploads/{handle}/finish")
    except BaseException:
        try:
            nimbus.request("DELETE", f"/v1/uploads/{handle}")
        except StormDagsterError:
            log.debug("upload %s could not be cancelled; the inbox cleaner will", handle)
        raise
    return Uploaded(
        handle=handle,
        name=name or topology.name,
        sha256=archive.sha256,
        size=archive.size,
        sent=is_sent,
    )


def _put_part(nimbus: NimbusClient, path: str, body: bytes) -> None:
    digest = hashlib.sha256(body).hexdigest()
    nimbus.request("PUT", path, content=body, headers={"X-Content-SHA256": digest})


def upload_target(
    nimbus: NimbusClient,
    target: str,
    args: Sequence[str] = (),
    *,
    conf: Mapping[str, Any] | None = None,
    home: Path | None = None,
    requirements: Path | None = None,
    progress: Callable[[str, str], None] | None = None,
) -> Uploaded:
    """Describe TARGET in a child process, build its archive, and upload both.

    ``home`` (the cluster's folder) is left out of the archive. ``requirements`` is a file with
    packages for it. ``progress`` is called with the
    steps ``describe`` and ``upload``, each ``STARTED`` and ``SUCCESS``. Errors are those of
    :func:`bundle_target` and :class:`NimbusClient`.
    """
    on_step = progress or (lambda step, state: None)
    with tempfile.TemporaryDirectory(prefix="storm-dagster-submit-") as folder:
        on_step("describe", "STARTED")
        bundle = bundle_target(
            target, args, folder=Path(folder), home=home, requirements=requirements
        )
        on_step("describe", "SUCCESS")
        on_step("upload", "STARTED")
        uploaded = upload(
            nimbus,
            archive=bundle.archive,
            conf=conf or {},
            topology=bundle.topology,
            name=bundle.name,
        )
        on_step("upload", "SUCCESS")
        return uploaded
