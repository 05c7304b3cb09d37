"""What ``fedcorpus release`` and ``fedcorpus verify BUNDLE`` do with their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from common.configuration import first_problem
from common.errors import UserError
from server.bundle.files import Facts, Publication
from server.bundle.signing import load_key, load_public_key, new_key
from server.bundle.verify import BundleVerification, verify_bundle
from server.bundle.write import write_bundle
from server.verify import finished_run, read_exports
from server.workspace import Workspace


def release(
    run: Path,
    out: Path,
    given: Mapping[str, str | None],
    key_file: Path | None,
    new_key_file: Path | None,
    unsigned: bool,
    allow_holes: bool,
    messages: Console,
) -> Facts:
    """Write a run's bundle; raises as `write_bundle`.

    Parameters
    ----------
    given
        Fields of `Publication`; None where left out.

    Raises
    ------
    UserError
        If not exactly one way to sign is chosen, or an option has no meaning.
    """
    if [key_file is not None, new_key_file is not None, unsigned].count(True) != 1:
        raise UserError("release: give one of --key FILE, --new-key FILE and --unsigned")
    study, _ = finished_run(Workspace(run))
    publication = _publication({"title": study.name, **{k: v for k, v in given.items() if v is not None}})
    key = _key(key_file, new_key_file)
    try:
        with Progress(console=messages, transient=True, disable=not messages.is_terminal) as progress:
            task = progress.add_task("texts", total=None)
            return write_bundle(
                run,
                out,
                publication,
                key,
                allow_holes=allow_holes,
                on_text=lambda written, texts: progress.update(task, completed=written, total=texts),
            )
    except BaseException:
        if new_key_file:
            # It has signed nothing, and would be in the way of the next attempt.
            new_key_file.unlink(missing_ok=True)
        raise


def verify_files(folder: Path, ledgers: Sequence[Path], trusted: Path | None, messages: Console) -> BundleVerification:
    """Check a bundle, with ledgers and a trusted key if they are given; raises as `read_exports`, `load_public_key`."""
    exports = read_exports(ledgers) if ledgers else []
    key = load_public_key(trusted) if trusted else None
    # How much there is to read only the bundle says, which isn't believed: so no bar, but a sign of life.
    with messages.status("checking every file and every text"):
        return verify_bundle(folder, exports, key)


def _key(key_file: Path | None, new_key_file: Path | None) -> Ed25519PrivateKey | None:
    if new_key_file:
        return new_key(new_key_file)
    return load_key(key_file) if key_file else None


def _publication(values: Mapping[str, str]) -> Publication:
    try:
        return Publication.model_validate(values)
    except ValidationError as cause:
        raise UserError(f"release: --{first_problem(cause)}") from cause
