"""Keys that a coordinator signs bundles with: Ed25519, in PEM files that openssl reads too.

openssl pkeyutl -verify -pubin -inkey signing_key.pub -rawin -in MANIFEST.sha256 -sigfile MANIFEST.sha256.sig
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from common.errors import UserError


def new_key(file: Path) -> Ed25519PrivateKey:
    """Make a key and write it, for its owner's eyes only (PKCS#8, mode 600).

    Raises
    ------
    UserError
        If the file exists, or can't be written.
    """
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        # With this mode from the start: there is no moment in which others could read it.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as cause:
        raise UserError(f"{file}: exists already; a key is never overwritten, name a new file") from cause
    except OSError as cause:
        raise UserError(f"{file}: can't be written: {cause.strerror}") from cause
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(pem)
        opened.flush()
        os.fsync(opened.fileno())
    return key


def load_key(file: Path) -> Ed25519PrivateKey:
    """Read a key of `new_key`, or of ``openssl genpkey -algorithm ed25519``.

    Raises
    ------
    UserError
        If it can't be read, is of another kind, or others may read it.
    """
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        pem = file.read_bytes()
    except OSError as cause:
        raise UserError(f"{file}: can't be read: {cause.strerror}") from cause
    if mode & 0o077:
        raise UserError(f"{file}: mode {mode:03o} lets others at this signing key; use chmod 600, or a new key")
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError as cause:
        raise UserError(f"{file}: the key has a password; one without is needed") from cause
    except (ValueError, UnsupportedAlgorithm) as cause:
        raise UserError(f"{file}: not a private key in PEM format") from cause
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{file}: a key of another kind; Ed25519 is accepted")
    return key


def load_public_key(file: Path) -> Ed25519PublicKey:
    """Read a public key file.

    Raises
    ------
    UserError
        If it can't be read or is of another kind.
    """
    try:
        return public_key(file.read_bytes())
    except OSError as cause:
        raise UserError(f"{file}: can't be read: {cause.strerror}") from cause
    except ValueError as cause:
        raise UserError(f"{file}: {cause}") from cause


def public_key(pem: bytes) -> Ed25519PublicKey:
    """A public key from PEM; anything else is a ValueError."""
    try:
        key = load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as cause:
        raise ValueError("not a public key in PEM format") from cause
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("a key of another kind; Ed25519 is accepted")
    return key


def public_pem(key: Ed25519PublicKey) -> bytes:
    """A public key as a file."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: Ed25519PublicKey) -> str:
    """SHA-256 of the public key (DER), in hexadecimal: short enough to read out on the phone."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def is_signed_by(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    """Whether ``signature`` is the key's, of this content."""
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True
