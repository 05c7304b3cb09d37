"""Certificates: a chain that verifies, and private keys that only their owner reads."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from common.errors import FederationError
from deploy.certificates import make_certificates


def test_private_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, ["east", "west"], ["localhost"])
    for key in (files.server_key, files.node_key("east"), files.node_key("west")):
        assert key.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob("ca.key")), "nobody can sign a second server certificate"


def test_the_server_certificate_is_signed_by_the_authority_for_its_hosts(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, [], ["localhost", "127.0.0.1"])
    authority = x509.load_pem_x509_certificate(files.authority.read_bytes())
    server = x509.load_pem_x509_certificate(files.server.read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.server, files.server_key)


def test_every_site_has_a_key_of_its_own(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, ["east", "west"], ["localhost"])
    public = {files.node_public_key(site).read_bytes() for site in ("east", "west")}
    assert len(public) == 2
    key = load_ssh_private_key(files.node_key("east").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert load_ssh_public_key(files.node_public_key("east").read_bytes()) == key.public_key()


def test_the_chain_verifies_for_its_host_now_and_for_no_other(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, [], ["localhost"])
    authority = x509.load_pem_x509_certificate(files.authority.read_bytes())
    server = x509.load_pem_x509_certificate(files.server.read_bytes())
    policy = PolicyBuilder().store(Store([authority])).time(datetime.datetime.now(datetime.UTC))
    chain = policy.build_server_verifier(x509.DNSName("localhost")).verify(server, [])
    assert chain == [server, authority]
    with pytest.raises(VerificationError):
        policy.build_server_verifier(x509.DNSName("elsewhere.org")).verify(server, [])


def test_a_key_that_others_could_read_is_closed_before_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "east.key").write_text("old")
    (tmp_path / "east.key").chmod(0o644)
    files = make_certificates(tmp_path, ["east"], ["localhost"])
    assert files.node_key("east").stat().st_mode & 0o777 == 0o600


def test_a_site_does_not_take_the_superlinks_key(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="named 'server'"):
        make_certificates(tmp_path, ["server"], ["localhost"])
    with pytest.raises(FederationError, match="hosts is empty"):
        make_certificates(tmp_path, ["east"], [])
    assert not list(tmp_path.iterdir())
