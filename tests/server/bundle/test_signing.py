"""Signing keys: for their owner's eyes only, of one kind, and never overwritten."""

from __future__ import annotations

import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from common.errors import UserError
from server.bundle.signing import fingerprint, is_signed_by, load_key, load_public_key, new_key, public_pem


def _pem(key: Ed25519PrivateKey | X25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def test_a_new_key_is_for_its_owners_eyes_and_can_be_loaded(tmp_path: Path) -> None:
    key = new_key(tmp_path / "key.pem")
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
    assert fingerprint(load_key(tmp_path / "key.pem").public_key()) == fingerprint(key.public_key())


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("mine")
    with pytest.raises(UserError, match=r"key\.pem: exists already"):
        new_key(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").read_text() == "mine"
    (tmp_path / "link.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"link\.pem: exists already"):
        new_key(tmp_path / "link.pem")
    with pytest.raises(UserError, match=r"can't be written"):
        new_key(tmp_path / "no folder" / "key.pem")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o660, 0o666])
def test_a_key_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    new_key(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(UserError, match=rf"key\.pem: mode {mode:o} lets others at"):
        load_key(tmp_path / "key.pem")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a private key"),
        (b"\xff\x00 not PEM", "not a private key"),
        (_pem(X25519PrivateKey.generate()), "a key of another kind; Ed25519 is accepted"),
        (_pem(ec.generate_private_key(ec.SECP256R1())), "a key of another kind; Ed25519 is accepted"),
        (_pem(Ed25519PrivateKey.generate(), b"secret"), "has a password"),
        (public_pem(Ed25519PrivateKey.generate().public_key()), "not a private key"),
    ],
    ids=["empty", "no PEM", "X25519", "ECDSA", "password", "public"],
)
def test_a_file_that_is_no_signing_key_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "key.pem").write_bytes(content)
    (tmp_path / "key.pem").chmod(0o600)
    with pytest.raises(UserError, match=rf"key\.pem: .*{said}"):
        load_key(tmp_path / "key.pem")


@pytest.mark.parametrize("load", [load_key, load_public_key])
def test_a_key_that_is_missing_or_a_folder_is_named(tmp_path: Path, load: Callable[[Path], object]) -> None:
    for file in (tmp_path / "no-such.pem", tmp_path):
        with pytest.raises(UserError, match=rf"{file.name}: can't be read"):
            load(file)


def test_a_public_key_of_another_kind_is_named(tmp_path: Path) -> None:
    other = X25519PrivateKey.generate().public_key()
    (tmp_path / "a.pub").write_bytes(other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    (tmp_path / "b.pub").write_bytes(_pem(Ed25519PrivateKey.generate()))
    with pytest.raises(UserError, match=r"a\.pub: a key of another kind; Ed25519"):
        load_public_key(tmp_path / "a.pub")
    with pytest.raises(UserError, match=r"b\.pub: not a public key"):
        load_public_key(tmp_path / "b.pub")


def test_a_signature_is_of_one_key_and_one_content() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    signature = key.sign(b"content")
    assert is_signed_by(key.public_key(), signature, b"content")
    assert not is_signed_by(key.public_key(), signature, b"Content")
    assert not is_signed_by(other.public_key(), signature, b"content")
    assert not is_signed_by(key.public_key(), b"", b"content")


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
def test_openssl_takes_our_signature_and_we_its_keys(bundle: Path, tmp_path: Path) -> None:
    verify = ["openssl", "pkeyutl", "-verify", "-pubin", "-rawin", "-inkey", bundle / "signing_key.pub"]
    signed = [*verify, "-sigfile", bundle / "MANIFEST.sha256.sig", "-in"]
    assert subprocess.run([*signed, bundle / "MANIFEST.sha256"], check=False, capture_output=True).returncode == 0
    assert subprocess.run([*signed, bundle / "README.md"], check=False, capture_output=True).returncode == 1
    made = tmp_path / "openssl.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", made], check=True)
    made.chmod(0o600)
    load_key(made)
