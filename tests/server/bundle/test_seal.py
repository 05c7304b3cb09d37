"""The seal: a file that was changed, added, removed or swapped is named, and nothing outside the folder is read."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from server.bundle import files, seal
from server.bundle.signing import fingerprint
from server.bundle.verify import verify_bundle
from tests.server.bundle.finished import problems_of
from tests.server.bundle.finished import seal as seal_again

Change = Callable[[Path], Any]


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_anybody_can_check_the_manifest_with_sha256sum(copy: Path) -> None:
    def check() -> int:
        return subprocess.run(
            ["sha256sum", "--check", "--strict", "--quiet", "MANIFEST.sha256"],
            cwd=copy,
            check=False,
            capture_output=True,
        ).returncode

    assert check() == 0
    (copy / files.CARD).write_bytes((copy / files.CARD).read_bytes() + b"\n")
    assert check() == 1


def test_a_changed_byte_of_any_file_is_named(copy: Path) -> None:
    found, _ = files.found_files(copy)
    for name in sorted(found):
        content = (copy / name).read_bytes()
        middle = len(content) // 2
        (copy / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        said = problems_of(verify_bundle(copy))
        assert name in said or name == files.MANIFEST, (name, said)
        (copy / name).write_bytes(content)
    assert verify_bundle(copy).holds


def test_twin_without_the_manifest_check_a_changed_byte_goes_through(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the manifest protects and nothing else does: a name in the facts that nothing is made of."""
    facts = (copy / files.FACTS).read_text()
    (copy / files.FACTS).write_text(facts.replace('"peft"', '"Peft"'))
    assert "bundle.json was changed" in problems_of(verify_bundle(copy))
    listed = files.read_manifest((copy / files.MANIFEST).read_text())
    monkeypatch.setattr(seal, "digest_of", lambda _folder, name: listed[name])
    assert verify_bundle(copy).holds


def test_a_forger_can_seal_again_but_not_sign_for_the_publisher(copy: Path, key: Ed25519PrivateKey) -> None:
    """The twin of the signature: without the publisher's key, a forger's own signature is as good."""
    forger = Ed25519PrivateKey.generate()
    for name in (files.FACTS, files.CARD):
        text = (copy / name).read_text()
        (copy / name).write_text(text.replace(fingerprint(key.public_key()), fingerprint(forger.public_key())))
    seal_again(copy, forger)
    assert verify_bundle(copy).signature == "own"
    assert verify_bundle(copy).signing_key == fingerprint(forger.public_key())
    assert verify_bundle(copy).holds
    assert "by the key that it should be of" in problems_of(verify_bundle(copy, (), key.public_key()))


def _missing(folder: Path) -> None:
    (folder / files.WORDS).unlink()


def _added(folder: Path) -> None:
    (folder / "data" / "train-00003-of-00003.parquet").write_bytes(b"")


def _hidden(folder: Path) -> None:
    (folder / ".hidden").touch()


def _linked(folder: Path) -> None:
    (folder / files.CARD).rename(folder.parent / "elsewhere.md")
    (folder / files.CARD).symlink_to(folder.parent / "elsewhere.md")


def _linked_folder(folder: Path) -> None:
    (folder / "data").rename(folder.parent / "data")
    (folder / "data").symlink_to(folder.parent / "data")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _no_manifest(folder: Path) -> None:
    (folder / files.MANIFEST).unlink()


def _manifest_is_a_pipe(folder: Path) -> None:
    (folder / files.MANIFEST).unlink()
    os.mkfifo(folder / files.MANIFEST)


def _no_signature(folder: Path) -> None:
    (folder / files.SIGNATURE).unlink()


def _no_key(folder: Path) -> None:
    (folder / files.PUBLIC_KEY).unlink()


def _no_key_at_all(folder: Path) -> None:
    (folder / files.PUBLIC_KEY).unlink()
    (folder / files.SIGNATURE).unlink()


def _another_signature(folder: Path) -> None:
    (folder / files.SIGNATURE).write_bytes(Ed25519PrivateKey.generate().sign((folder / files.MANIFEST).read_bytes()))


def _short_signature(folder: Path) -> None:
    (folder / files.SIGNATURE).write_bytes(b"short")


def _key_is_garbage(folder: Path) -> None:
    (folder / files.PUBLIC_KEY).write_bytes(b"\xff")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_missing, "PRIVACY.md is missing"),
        (_added, "data/train-00003-of-00003.parquet was added"),
        (_hidden, ".hidden was added"),
        (_linked, "README.md is no regular file; README.md is missing"),
        (_linked_folder, "data is no regular file; data/train-00000-of-00003.parquet is missing"),
        (_pipe, "pipe is no regular file"),
        (_no_manifest, "MANIFEST.sha256 is missing"),
        (_manifest_is_a_pipe, "MANIFEST.sha256 is missing"),
        (_no_signature, "MANIFEST.sha256.sig is missing"),
        (_no_key, "signing_key.pub is missing"),
        (_no_key_at_all, "signing_key.pub is missing"),
        (_another_signature, "isn't of this manifest"),
        (_short_signature, "isn't of this manifest"),
        (_key_is_garbage, "signing_key.pub can't be read"),
    ],
)
def test_a_file_that_is_missing_added_or_of_another_kind_is_named(copy: Path, change: Change, said: str) -> None:
    change(copy)
    assert said in problems_of(verify_bundle(copy))


@pytest.mark.parametrize(
    "line",
    ["../outside", "/etc/passwd", "data/../../outside", "./README.md", "a b", "a\\b", "\u202e", "data//x", ""],
)  # fmt: skip
def test_a_manifest_that_names_files_elsewhere_reads_none_of_them(
    copy: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy.parent / "outside").write_text("outside")
    digests = files.read_manifest((copy / files.MANIFEST).read_text())
    (copy / files.MANIFEST).write_text(files.manifest_text(digests | {line: files.sha256_of(copy.parent / "outside")}))
    read = []
    monkeypatch.setattr(files, "sha256_of", lambda file: read.append(file) or digests[str(file.relative_to(copy))])
    said = problems_of(verify_bundle(copy))
    assert f"{line} is missing" in said or "MANIFEST.sha256 can't be read" in said
    assert all(copy in file.resolve().parents for file in read)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.rstrip("\n"),
        lambda text: text + "\n",
        lambda text: text + text.split("\n")[0] + "\n",
        lambda text: "".join(sorted(text.splitlines(keepends=True), reverse=True)),
        lambda text: text.upper(),
    ],
)
def test_a_manifest_is_written_in_one_way_only(bundle: Path, change: Callable[[str], str]) -> None:
    text = (bundle / files.MANIFEST).read_text()
    assert files.manifest_text(files.read_manifest(text)) == text
    with pytest.raises(ValueError, match="sorted list"):
        files.read_manifest(change(text))
