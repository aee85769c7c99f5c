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
# Hashes that this process has uploaded or found stored: an archive is uploaded once per process.
_stored: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Uploaded:
    """A finished upload: what a submission refers to."""

    handle: str
    name: str
    """The topology's own name, used when the submission gives none."""
    sha256: str
    size: int
    """Bytes of the archive."""
    sent: bool
    """Whether the archive's bytes traveled (not when its hash was stored already)."""


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield from iter(lambda: stream.read(_CHUNK), b"")


def _put_archive(nimbus: NimbusClient, handle: str, archive: Archive) -> bool:
    """Put the archive, by hash when the cluster has it; whether its bytes were sent."""
    base = f"/v1/uploads/{handle}/archive"
    key = (nimbus.leader(), archive.sha256)
    if key in _stored or nimbus.exists(f"/v1/archives/{archive.sha256}"):
        try:
            nimbus.request("PUT", base, params={"sha256": archive.sha256}, content=b"")
            _stored.add(key)
            return False
        except Unavailable:
            raise
        except StormDagsterError as error:
            # Removed in between: send it.
            log.info("archive %s is no longer stored (%s)", archive.sha256[:12], error.message)
    headers = {"X-Content-SHA256": archive.sha256, "Content-Length": str(archive.size)}
    nimbus.request("PUT", base, content=lambda: _chunks(archive.path), headers=headers)
    _stored.add(key)
    return True


def _encode_conf(conf: Mapping[str, Any]) -> bytes:
    """The conf as JSON; what its keys and values mean is checked by the cluster."""
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
    """Upload the three parts; on any failure the handle is cancelled and the error raised."""
    handle = str(nimbus.post("/v1/uploads")["handle"])
    try:
        sent = _put_archive(nimbus, handle, archive)
        for part, body in (("conf", _encode_conf(conf)), ("topology", topology.to_json())):
            digest = hashlib.sha256(body).hexdigest()
            nimbus.request(
                "PUT",
                f"/v1/uploads/{handle}/{part}",
                content=body,
                headers={"X-Content-SHA256": digest},
            )
        nimbus.post(f"/v1/uploads/{handle}/finish")
    except BaseException:
        try:
            nimbus.request("DELETE", f"/v1/uploads/{handle}")
        except StormDagsterError:
            log.debug("upload %s could not be cancelled; the inbox cleaner will", handle)
        raise
    return Uploaded(handle, name or topology.name, archive.sha256, archive.size, sent)


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
    """Describe TARGET in a child process, build its archive and upload it with ``conf``.

    ``home`` (the cluster's folder) stays out of the archive. ``progress`` is called with the steps
    ``describe`` and ``upload``, each ``STARTED`` and ``SUCCESS``. Errors as :func:`bundle_target`
    and :class:`NimbusClient` raise them.
    """
    on_step = progress or (lambda step, state: None)
    with tempfile.TemporaryDirectory(prefix="storm-dagster-submit-") as folder:
        on_step("describe", "STARTED")
        bundle = bundle_target(
            target, args, folder=Path(folder), home=home, requirements=requirements
        )
        on_step("describe", "SUCCESS")
        on_step("upload", "STARTED")
        done = upload(
            nimbus,
            archive=bundle.archive,
            conf=conf or {},
            topology=bundle.topology,
            name=bundle.name,
        )
        on_step("upload", "SUCCESS")
        return done
