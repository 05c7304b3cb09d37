"""The seal of a bundle that nobody vouches for: is every file as the manifest lists it, and whose signature is it?

Nothing outside the folder is ever opened: names come from the folder and are compared with the manifest's, links are
not followed, and only regular files are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from server.bundle import files
from server.bundle.signing import fingerprint, is_signed_by, public_key

MOST_BYTES = 64 << 20
"""Of a file that is read whole; that of a study with all the codes there may be is a tenth."""

Signature = Literal["trusted", "own", "none", "wrong"]
"""trusted: by the key that was given. own: by the key in the bundle, which may be anybody's."""

_T = TypeVar("_T")


class Problem(Exception):
    """What isn't as it should be, in a sentence."""


@dataclass(frozen=True)
class Seal:
    """Whose signature a bundle bears, and what is wrong with its files.

    Attributes
    ----------
    signing_key
        Fingerprint of the key that signed; empty if none did, or it isn't known which.
    problems
        Empty if every file is as it was sealed.
    """

    signature: Signature
    signing_key: str
    problems: tuple[str, ...]


def check_seal(folder: Path, trusted: Ed25519PublicKey | None) -> Seal:
    """Check the manifest, every file by it, and the signature; whatever is in the folder, this returns."""
    try:
        manifest = content_of(folder, files.MANIFEST)
        listed = parsed(files.MANIFEST, lambda: files.read_manifest(manifest.decode("ascii")))
        found, strange = files.found_files(folder)
        signature, signer = _signature(folder, manifest, found, trusted)
        found -= {files.MANIFEST, files.SIGNATURE}
        problems = [f"{name} is no regular file" for name in strange]
        problems += [f"{name} is missing" for name in sorted(listed.keys() - found)]
        problems += [f"{name} was added" for name in sorted(found - listed.keys())]
        problems += [
            f"{name} was changed" for name in sorted(found & listed.keys()) if digest_of(folder, name) != listed[name]
        ]
    except Problem as problem:
        return Seal("wrong", "", (str(problem),))
    if signature == "wrong":
        problems.append(f"{files.SIGNATURE} isn't of this manifest by the key that it should be of")
    if trusted and signature == "none":
        problems.append("it isn't signed, so nothing shows that it is by the key that was given")
    return Seal(signature, signer, tuple(problems))


def content_of(folder: Path, name: str) -> bytes:
    """A file, whole.

    Raises
    ------
    Problem
        If it is missing, no regular file, too large or can't be read.
    """
    path = folder / name
    try:
        if path.is_symlink() or not path.is_file():
            raise Problem(f"{name} is missing")
        if path.stat().st_size > MOST_BYTES:
            raise Problem(f"{name} has more than {MOST_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as cause:
        raise Problem(f"{name} can't be read: {cause.strerror}") from cause


def digest_of(folder: Path, name: str) -> str:
    """SHA-256 of a file; a `Problem` if it can't be read."""
    try:
        return files.sha256_of(folder / name)
    except OSError as cause:
        raise Problem(f"{name} can't be read: {cause.strerror}") from cause


def parsed(name: str, parse: Callable[[], _T]) -> _T:
    """What ``parse`` returns; a `Problem` if the file isn't what it takes."""
    try:
        return parse()
    except (ValueError, RecursionError) as cause:
        raise Problem(f"{name} can't be read; it isn't one that this version of fedcorpus writes") from cause


def _signature(
    folder: Path, manifest: bytes, found: set[str], trusted: Ed25519PublicKey | None
) -> tuple[Signature, str]:
    if not found & {files.SIGNATURE, files.PUBLIC_KEY}:
        return "none", ""
    pem = content_of(folder, files.PUBLIC_KEY)
    key = trusted or parsed(files.PUBLIC_KEY, lambda: public_key(pem))
    if not is_signed_by(key, content_of(folder, files.SIGNATURE), manifest):
        return "wrong", ""
    return "trusted" if trusted else "own", fingerprint(key)
