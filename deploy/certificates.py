"""Certificates and node keys of a federation: one CA, the SuperLink's server certificate, one key pair per site.

Flower identifies a SuperNode by a signed header, not by mutual TLS; so TLS is what keeps the header secret, and the CA
certificate is all that a site needs besides its own key.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import FederationError

LIFETIME = datetime.timedelta(days=90)
_BACKDATED = datetime.timedelta(hours=1)
"""Clocks of two machines differ; a certificate that starts now may not have started there yet."""


@dataclass(frozen=True)
class Certificates:
    """Where the files of a federation's identity lie."""

    folder: Path

    @property
    def authority(self) -> Path:
        """CA certificate (PEM): what every site and command line gets."""
        return self.folder / "ca.crt"

    @property
    def server(self) -> Path:
        """The SuperLink's certificate (PEM)."""
        return self.folder / "server.pem"

    @property
    def server_key(self) -> Path:
        """The SuperLink's private key (PEM, mode 0600)."""
        return self.folder / "server.key"

    def node_key(self, site: str) -> Path:
        """A site's private key (OpenSSH, mode 0600). It belongs at the site alone."""
        return self.folder / f"{site}.key"

    def node_public_key(self, site: str) -> Path:
        """A site's public key (OpenSSH), which the coordinator registers."""
        return self.folder / f"{site}.pub"


def make_certificates(folder: Path, sites: Sequence[str], hosts: Sequence[str]) -> Certificates:
    """Make everything at once, for a federation on one machine. The CA's private key isn't kept.

    Parameters
    ----------
    hosts
        DNS names and IP addresses of the SuperLink.

    Raises
    ------
    FederationError
        If there is no host, or a site's key would take the place of another file.
    """
    if not hosts:
        raise FederationError("hosts is empty; at least one DNS name or IP address of the SuperLink is needed")
    if Certificates(folder).server_key in {Certificates(folder).node_key(site) for site in sites}:
        raise FederationError("a site is named 'server', as the SuperLink's own key file is; give it another name")
    folder.mkdir(parents=True, exist_ok=True)
    files = Certificates(folder)
    authority_key = ec.generate_private_key(ec.SECP384R1())
    authority = _authority(authority_key)
    server_key = ec.generate_private_key(ec.SECP384R1())
    server = _server(server_key, hosts, authority, authority_key)
    _write(files.authority, authority.public_bytes(serialization.Encoding.PEM), private=False)
    _write(files.server, server.public_bytes(serialization.Encoding.PEM), private=False)
    _write(files.server_key, _private(server_key, serialization.PrivateFormat.PKCS8), private=True)
    for site in sites:
        key = ec.generate_private_key(ec.SECP384R1())
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        _write(files.node_key(site), _private(key, serialization.PrivateFormat.OpenSSH), private=True)
        _write(files.node_public_key(site), public, private=False)
    return files


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name("fedcorpus local CA")
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        _dated(x509.CertificateBuilder())
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        _dated(x509.CertificateBuilder())
        .subject_name(_name(hosts[0]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )


def _dated(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + LIFETIME)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, layout: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, layout, serialization.NoEncryption())


def _write(path: Path, data: bytes, *, private: bool) -> None:
    # Created with its final mode: a private key is never readable by others, not even for a moment.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        # A file that was there keeps its mode when it is opened.
        os.fchmod(descriptor, 0o600 if private else 0o644)
        file.write(data)
