"""Certificates of the embedded ZooKeeper, issued by an authority that belongs to one HOME.

Server and clients prove to each other that this authority has issued their certificates, before any
credential is sent. A certificate is for one end only: with a client's no process can pose as the
server. The servers of an ensemble know each other by another authority, which issues nothing else.
``cryptography`` is imported by the processes that issue certificates, never by workers.
"""

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from storm_dagster.host.files import make_own_folder, read_private_file, write_atomically
from storm_dagster.model.errors import Corrupt

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

FOLDER = "zookeeper.tls"
"""Folder of HOME with the authority and the certificates."""
AUTHORITY_FILE = "authority.pem"
"""Certificate of the authority, which is not secret."""
_AUTHORITY_KEY_FILE = "authority.key"
SERVER_FILE = "server.pem"
"""Key and certificate of the server."""
CLIENT_FILE = "client.pem"
"""Key and certificate of this user's clients: daemons, runs, commands, workers of the same user."""
MEMBERS_AUTHORITY_FILE = "members.authority.pem"
"""Certificate of the authority of an ensemble's members."""
MEMBERS_FILE = "members.pem"
"""Key and certificate with which the members of an ensemble connect to each other."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names under which the embedded server is reached on its machine."""

_VALID = timedelta(days=3650)
"""Validity of the authority, and of all that it issues."""
_CLOCK_ERROR = timedelta(days=7)
"""Time by which the begin of a certificate's validity lies in the past: other clocks, or this one
later, may be late.
"""
_RENEWED_BEFORE = timedelta(days=365)
"""Rest of the authority's validity below which a start makes another authority."""


@dataclass(frozen=True)
class Authority:
    """An authority: its certificate, and the key with which it issues others."""

    certificate: "x509.Certificate"
    key: "EllipticCurvePrivateKey"

    @property
    def pem(self) -> str:
        """The certificate as PEM, by which both ends know the certificates that it has issued."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return self.certificate.public_bytes(Encoding.PEM).decode("ascii")

    @property
    def key_pem(self) -> str:
        """The private key as PEM."""
        return _key_pem(self.key)

    def is_usable(self, now: datetime) -> bool:
        """True if certificates that are issued ``now`` are valid for a year at least."""
        begin = self.certificate.not_valid_before_utc
        end = self.certificate.not_valid_after_utc
        return begin <= now <= end - _RENEWED_BEFORE

    def issue_server(self, names: Iterable[str], now: datetime) -> str:
        """Key and certificate of a server that is reached under these names, as PEM.

        Names that are addresses are certified as such.
        """
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        alternatives: list[x509.GeneralName] = [_general_name(name) for name in names]
        return self._issue("server", [ExtendedKeyUsageOID.SERVER_AUTH], alternatives, now)

    def issue_client(self, name: str, now: datetime) -> str:
        """Key and certificate of a client, as PEM; ``name`` tells it from others."""
        from cryptography.x509.oid import ExtendedKeyUsageOID

        return self._issue(name, [ExtendedKeyUsageOID.CLIENT_AUTH], [], now)

    def issue_member(self, now: datetime) -> str:
        """Key and certificate of the members of an ensemble, as PEM.

        Members call each other, so that it is for both ends of a connection.
        """
        from cryptography.x509.oid import ExtendedKeyUsageOID

        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._issue("member", usages, [], now)

    def _issue(
        self,
        name: str,
        usages: "list[x509.ObjectIdentifier]",
        alternatives: "list[x509.GeneralName]",
        now: datetime,
    ) -> str:
        """Key and certificate for these usages, as PEM, valid as long as the authority is."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.serialization import Encoding

        key = _new_key()
        builder = (
            _builder(name, self.certificate.subject, key, now)
            .not_valid_after(self.certificate.not_valid_after_utc)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=True)
            .add_extension(_authority_key_identifier(self.key), critical=False)
        )
        if alternatives:
            names = x509.SubjectAlternativeName(alternatives)
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return _key_pem(key) + certificate.public_bytes(Encoding.PEM).decode("ascii")


def new_authority(name: str, now: datetime) -> Authority:
    """Make an authority that issues certificates of servers and clients, and no authorities."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _new_key()
    subject = _subject(name)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(name, subject, key, now)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def read_authority(certificate_pem: str, key_pem: str) -> Authority:
    """The authority of two PEM texts. Raises ``ValueError`` if they do not belong together."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    key = load_pem_private_key(key_pem.encode(), None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError("its key is not one of an elliptic curve")
    if key.public_key() != certificate.public_key():
        raise ValueError("its key belongs to another certificate")
    return Authority(certificate, key)


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    # Java, OpenSSL and LibreSSL know this curve; a key takes no time to make.
    return ec.generate_private_key(ec.SECP256R1())


def _key_pem(key: "EllipticCurvePrivateKey") -> str:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    # ZooKeeper reads keys in this format alone.
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return text.decode("ascii")


def _subject(name: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "storm-dagster")
    return x509.Name([organization, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    name: str, issuer: "x509.Name", key: "EllipticCurvePrivateKey", now: datetime
) -> "x509.CertificateBuilder":
    """Beginning of each certificate: all but its end and its usage."""
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_ERROR)
    )


def _authority_key_identifier(key: "EllipticCurvePrivateKey") -> "x509.AuthorityKeyIdentifier":
    from cryptography import x509

    # Of authorities with the same name, clients choose the issuer by it.
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _general_name(name: str) -> "x509.GeneralName":
    """A name in a server's certificate: an address, or the name of a host."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)


@dataclass(frozen=True)
class CertificateFolder:
    """Folder with an authority and the certificates that it has issued; closed to other users."""

    path: Path

    @staticmethod
    def of(home: Path) -> "CertificateFolder":
        """The folder in ``home``, which need not exist."""
        return CertificateFolder(home / FOLDER)

    @property
    def authority_file(self) -> Path:
        """Certificate of the authority."""
        return self.path / AUTHORITY_FILE

    @property
    def server_file(self) -> Path:
        """Key and certificate of the server."""
        return self.path / SERVER_FILE

    @property
    def client_file(self) -> Path:
        """Key and certificate of this user's clients."""
        return self.path / CLIENT_FILE

    @property
    def members_authority_file(self) -> Path:
        """Certificate of the authority of an ensemble's members."""
        return self.path / MEMBERS_AUTHORITY_FILE

    @property
    def members_file(self) -> Path:
        """Key and certificate of an ensemble's members."""
        return self.path / MEMBERS_FILE

    def prepare(self, names: Iterable[str] = LOOPBACK_NAMES, now: datetime | None = None) -> None:
        """Make or renew server's and clients' certificates; called at each start of a server.

        The authority stays, unless it has expired, expires within a year, or is not valid yet.
        ``names`` are those of the server. Raises as :meth:`authority`.
        """
        moment = now or utc_now()
        make_own_folder(self.path)
        authority = self.authority() if self.authority_file.exists() else None
        if authority is None or not authority.is_usable(moment):
            authority = new_authority(f"authority of {self.path.parent}"[:64], moment)
            # The certificate is last: it says that the authority is complete.
            self._write(_AUTHORITY_KEY_FILE, authority.key_pem)
            self._write(AUTHORITY_FILE, authority.pem)
        self._write(SERVER_FILE, authority.issue_server(names, moment))
        self._write(CLIENT_FILE, authority.issue_client(f"user {os.geteuid()}", moment))

    def prepare_members(self, now: datetime | None = None) -> None:
        """Make another authority and certificate of an ensemble's members.

        Called at each start of an ensemble, before the first member. The authority's key is not
        stored, so that no second certificate can be issued that the members would accept.
        """
        moment = now or utc_now()
        make_own_folder(self.path)
        authority = new_authority(f"members of {self.path.parent}"[:64], moment)
        self._write(MEMBERS_FILE, authority.issue_member(moment))
        self._write(MEMBERS_AUTHORITY_FILE, authority.pem)

    def authority(self) -> Authority:
        """Read the authority.

        Raises :class:`Corrupt` if its files do not belong together, and :class:`InvalidRequest` if
        they are missing or other users may read the key.
        """
        key = read_private_file(self.path / _AUTHORITY_KEY_FILE, "the key of the authority")
        certificate = read_private_file(self.authority_file, "the certificate of the authority")
        try:
            return read_authority(certificate, key)
        except ValueError as error:
            raise Corrupt(
                f"the authority in {self.path} is damaged ({error}): stop the cluster, and remove "
                "the folder; the next start makes another one"
            ) from None

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.path / name, text, mode=0o600, sync=True)


def utc_now() -> datetime:
    """The time, as certificates have it."""
    return datetime.now(timezone.utc)
