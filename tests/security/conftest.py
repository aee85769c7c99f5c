"""A certificate authority and a secret for the tests of a secured cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(tmp_path: Path, authority: trustme.CA) -> Callable[..., dict[str, str]]:
    """Makes the ``storm.tls.*`` keys of a user; of another authority with ``by``, with other dates
    with ``dates``.
    """
    made = 0

    def make(user: str = "daemon", *, by: trustme.CA | None = None, **dates: Any) -> dict[str, str]:
        nonlocal made
        made += 1
        issued = (by or authority).issue_cert("127.0.0.1", "localhost", common_name=user, **dates)
        folder = tmp_path / f"tls-{made}"
        folder.mkdir()
        (folder / "ca.pem").write_bytes(authority.cert_pem.bytes())
        (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key = folder / "key.pem"
        os.close(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600))
        key.write_bytes(issued.private_key_pem.bytes())
        return {
            "storm.tls.cert": str(folder / "cert.pem"),
            "storm.tls.key": str(key),
            "storm.tls.ca": str(folder / "ca.pem"),
        }

    return make
