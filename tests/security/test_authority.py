"""Certificates of the embedded ZooKeeper: for whom, for which end, and for how long."""

from __future__ import annotations

import os
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from storm_dagster.model.errors import Corrupt, InvalidRequest
from storm_dagster.security.authority import LOOPBACK_NAMES, CertificateFolder, new_authority
from storm_dagster.zk.embedded import zookeeper_command

NOW = datetime.now(timezone.utc)
DAY = timedelta(days=1)


def folder_of(home: Path, now: datetime = NOW) -> CertificateFolder:
    home.mkdir(exist_ok=True)
    folder = CertificateFolder.of(home)
    folder.prepare(now=now)
    return folder


def contexts(
    server: CertificateFolder, client: CertificateFolder, *, swapped: bool = False
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of both ends; ``swapped``: each has the other's certificate."""
    for_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for_server.verify_mode = ssl.CERT_REQUIRED
    for_server.load_verify_locations(server.authority_file)
    for_server.load_cert_chain(server.client_file if swapped else server.server_file)
    for_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for_client.load_verify_locations(client.authority_file)
    for_client.load_cert_chain(client.server_file if swapped else client.client_file)
    return for_server, for_client


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str = "127.0.0.1"
) -> tuple[str, str]:
    """The failure of the client and of the server; empty without one."""
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    failures = ["", ""]
    for _ in range(6):
        for index, end in enumerate(ends):
            try:
                if not failures[index]:
                    end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                failures[index] = str(getattr(error, "verify_message", "") or error)
    return failures[0], failures[1]


@pytest.mark.parametrize("name", LOOPBACK_NAMES)
def test_both_ends_of_one_home_know_each_other(tmp_path: Path, name: str) -> None:
    own = folder_of(tmp_path)
    assert shake_hands(*contexts(own, own), name) == ("", "")


def test_the_server_has_no_name_beyond_loopback_unless_it_is_given(tmp_path: Path) -> None:
    own = folder_of(tmp_path)
    for name in ("zk1.example", "192.0.2.1"):
        failure, _ = shake_hands(*contexts(own, own), name)
        assert "mismatch" in failure
    own.prepare([*LOOPBACK_NAMES, "zk1.example", "192.0.2.1"])
    for name in ("zk1.example", "192.0.2.1", "localhost"):
        assert shake_hands(*contexts(own, own), name) == ("", "")


def test_a_certificate_serves_one_end_only(tmp_path: Path) -> None:
    """A worker, which has a client's, cannot pose as the server."""
    own = folder_of(tmp_path)
    for_server, for_client = contexts(own, own)
    as_server, as_client = contexts(own, own, swapped=True)
    for_client.check_hostname = False
    failure, _ = shake_hands(as_server, for_client)
    assert "unsuitable certificate purpose" in failure or "unsupported" in failure
    _, failure = shake_hands(for_server, as_client)
    assert "unsuitable certificate purpose" in failure or "unsupported" in failure


def test_certificates_of_another_home_are_refused(tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own")
    other = folder_of(tmp_path / "other")
    failure, _ = shake_hands(*contexts(other, own))
    assert failure, "the client trusts its own authority alone"
    _, trusting = contexts(own, other)
    trusting.load_verify_locations(own.authority_file)
    failure, refusal = shake_hands(contexts(own, own)[0], trusting)
    assert failure == "" and refusal, "so does the server"


@pytest.mark.parametrize(
    ("made", "failure"),
    [
        (NOW - 3651 * DAY, "certificate has expired"),
        (NOW + 8 * DAY, "certificate is not yet valid"),
        (NOW + DAY, ""),
        (NOW - DAY, ""),
    ],
)
def test_the_clock_may_be_off_by_days_and_not_by_years(
    tmp_path: Path, made: datetime, failure: str
) -> None:
    own = folder_of(tmp_path, made)
    assert shake_hands(*contexts(own, own))[0] == failure


def test_a_start_renews_certificates_and_keeps_the_authority(tmp_path: Path) -> None:
    own = folder_of(tmp_path, NOW - 3000 * DAY)
    authority = own.authority_file.read_bytes()
    former = [path.read_bytes() for path in (own.server_file, own.client_file)]
    own.prepare(now=NOW - 2900 * DAY)
    assert own.authority_file.read_bytes() == authority
    assert [path.read_bytes() for path in (own.server_file, own.client_file)] != former


@pytest.mark.parametrize("made", [NOW - 3400 * DAY, NOW - 4000 * DAY, NOW + 30 * DAY])
def test_an_authority_that_expires_or_is_not_valid_yet_is_replaced(
    tmp_path: Path, made: datetime
) -> None:
    own = folder_of(tmp_path, made)
    authority = own.authority_file.read_bytes()
    own.prepare(now=NOW)
    assert own.authority_file.read_bytes() != authority
    assert shake_hands(*contexts(own, own)) == ("", "")


def test_no_other_user_reads_a_key(tmp_path: Path) -> None:
    own = folder_of(tmp_path)
    assert own.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in own.path.iterdir()} == {0o600}
    (own.path / "authority.key").chmod(0o644)
    with pytest.raises(InvalidRequest, match=r"authority\.key can be read .*chmod 600"):
        own.prepare()


def test_each_start_of_an_ensemble_has_certificates_of_its_own(tmp_path: Path) -> None:
    own = folder_of(tmp_path)
    before = {path.name for path in own.path.iterdir()}
    own.prepare_members()
    files = (own.members_file, own.members_authority_file)
    assert {path.name for path in own.path.iterdir()} - before == {path.name for path in files}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert b"PRIVATE KEY" not in own.members_authority_file.read_bytes()
    former = [path.read_bytes() for path in files]
    own.prepare_members()
    assert all(path.read_bytes() != content for path, content in zip(files, former, strict=True))


def test_a_members_certificate_serves_both_ends_and_no_other_is_accepted(tmp_path: Path) -> None:
    own = folder_of(tmp_path)
    own.prepare_members()

    def ends(identity: Path, trusted: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for end in made:
            end.check_hostname = False
            end.verify_mode = ssl.CERT_REQUIRED
            end.load_verify_locations(trusted)
            end.load_cert_chain(identity)
        return made

    server, client = ends(own.members_file, own.members_authority_file)
    assert shake_hands(server, client) == ("", "")
    for identity in (own.client_file, own.server_file):
        strange_server, strange_client = ends(identity, own.members_authority_file)
        assert shake_hands(strange_server, client)[0]
        assert shake_hands(server, strange_client)[1]


def test_files_that_do_not_belong_together_are_refused_with_the_remedy(tmp_path: Path) -> None:
    own = folder_of(tmp_path)
    key = own.path / "authority.key"
    key.write_text(new_authority("another", NOW).key_pem)
    with pytest.raises(Corrupt, match=r"belongs to another certificate.*remove the folder"):
        own.prepare()
    key.write_text("no key")
    with pytest.raises(Corrupt, match="remove the folder"):
        own.prepare()
    key.unlink()
    with pytest.raises(InvalidRequest, match="cannot be read"):
        own.prepare()


def test_a_folder_that_another_user_made_first_is_refused(tmp_path: Path) -> None:
    """In a HOME that others may write, such as a shared folder."""
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    for name in ("zookeeper.tls", "zookeeper"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        os.chown(folder, 65534, 65534)
    target = tmp_path / "a file of root"
    target.write_text("kept")
    (tmp_path / "zookeeper" / "zoo.cfg").symlink_to(target)
    with pytest.raises(InvalidRequest, match="belongs to user 65534"):
        CertificateFolder.of(tmp_path).prepare()
    with pytest.raises(InvalidRequest, match="belongs to user 65534"):
        zookeeper_command(tmp_path / "zookeeper", 2181)
    assert target.read_text() == "kept"
    assert not list((tmp_path / "zookeeper.tls").iterdir())
