"""Workers that write to a sink, and an S3 server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from storm_rigs.stage.builder import Stage
from storm_rigs.stage.sink_rig import SinkRig


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of an S3 server on loopback."""
    # Its import takes a second, and few tests need it.
    from moto.s3.exceptions import NoSuchUpload
    from moto.s3.models import MultipartDict
    from moto.server import ThreadedMotoServer

    def missing(uploads: Any, name: str) -> Any:
        raise NoSuchUpload(upload_id=name)

    # As S3 answers; this server answers 500 otherwise, which clients repeat.
    MultipartDict.__missing__ = missing  # type: ignore[attr-defined]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, tmp_path: Path) -> tuple[dict[str, Any], str, Any]:
    """(conf of the connectors, a bucket of the test, file system)."""
    import fsspec

    (tmp_path / "secret").write_text("test\n")
    conf = {
        "files.endpoint_url": s3_server,
        "files.key": "test",
        "files.secret.file": str(tmp_path / "secret"),
    }
    fs = fsspec.filesystem(
        "s3", endpoint_url=s3_server, key="test", secret="test", use_listings_cache=False
    )
    bucket = f"b-{abs(hash(tmp_path))}"
    fs.mkdir(bucket)
    return conf, bucket, fs


@pytest.fixture(params=["file", "s3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], str, Any]:
    """(conf, URL of a folder, file system), once on this machine and once in S3."""
    import fsspec

    if request.param == "file":
        return {}, str(tmp_path / "out"), fsspec.filesystem("file")
    conf, bucket, fs = request.getfixturevalue("s3")
    return conf, f"s3://{bucket}/out", fs


@pytest.fixture
def make_sink_rig(stage: Stage) -> Callable[[int, dict[str, Any], str], SinkRig]:
    """Make the rig of so many numbers, with a conf, and the class of the sink."""
    return partial(SinkRig, stage)
