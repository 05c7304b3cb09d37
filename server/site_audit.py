"""What ``fedcorpus site audit`` does with its options."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from common.errors import UserError
from common.site.audit.found import LeakCheck
from common.site.audit.leak_check import check_leaks
from common.site.audit.sources import read_corpus, read_documents, read_holdout
from common.site.config import Site
from common.study import Study, Voting
from server.bundle.files import JSON_LINES, SHARDS


def audit(corpus: Path, site: Path, study: Path | None, holdout: Path | None, messages: Console) -> LeakCheck:
    """Compare a corpus with a site's documents; raises as `check_leaks` and what reads its files.

    Parameters
    ----------
    corpus
        A file, or the folder of a bundle.
    study
        Says which documents count, what a unit is, and at a weak site the embedder. Without, all documents of the
        site's file count.
    holdout
        A file of documents that had no part in the study.
    """
    config = Site.load(site)
    loaded = Study.load(study) if study else None
    files = corpus_files(corpus)
    # A strong site needs no embedder of a study's; this one every install has.
    voting = loaded.voting if loaded and config.tier == "weak" else Voting()
    with Progress(console=messages, transient=True, disable=not messages.is_terminal) as bars:
        bar = bars.add_task("reading", total=None)
        texts, documents = read_corpus(files), read_documents(config, loaded)
        held_out = read_holdout(holdout, config).texts if holdout else None
        return check_leaks(
            texts,
            documents,
            held_out,
            config.leak_check,
            voting,
            config.models,
            lambda stage, share: bars.update(bar, description=stage, completed=share, total=1),
        )


def corpus_files(corpus: Path) -> list[Path]:
    """The file of a corpus, or the files of a bundle.

    Raises
    ------
    UserError
        If a folder isn't a bundle.
    """
    if not corpus.is_dir():
        return [corpus]
    files = sorted(corpus.glob(SHARDS)) or [file for file in [corpus / JSON_LINES] if file.exists()]
    if not files:
        raise UserError(f"{corpus}: no {SHARDS} in it; a corpus file or the folder of a bundle is needed")
    return files


def check_new(path: Path) -> None:
    """Refuse a file that is there already, before any work is done.

    Raises
    ------
    UserError
    """
    if path.exists():
        raise UserError(f"{path}: exists already; name a new file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: its folder isn't there")


def write_private(path: Path, text: str) -> None:
    """Write a new file that only its owner reads.

    Raises
    ------
    UserError
        If it can't be made.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as cause:
        raise UserError(f"{path}: can't be written: {cause.strerror}") from cause
