"""Finished runs for tests: one that was really run, and others that are made of it by hand."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.study import Study
from server.bundle import files
from server.bundle.files import Publication
from server.bundle.signing import public_pem
from server.bundle.verify import BundleVerification
from server.corpus import CorpusText, write_corpus
from server.workspace import Workspace

SITES = {"okapi-infirmary": "strong", "zebra-hospital": "weak"}
"""Names that no other word of a bundle holds."""

PRIVACY = {"delta": 1e-4, "training_noise_multiplier": 8.0, "vote_noise_multiplier": 8.0}
"""Much noise is given, and epsilon is solved: accounting takes a tenth of a second, and not eight."""

PUBLICATION = Publication(title="Comments", license="CC-BY-4.0", language="en", publisher="A network")


@dataclass(frozen=True)
class Finished:
    """A finished run's folder, and a folder with the ledger that each of its sites exported."""

    run: Path
    ledgers: Path


def changed_run(
    finished: Finished,
    folder: Path,
    texts: Sequence[tuple[str, int]],
    missing: Mapping[int, int] | None = None,
    **study_changes: Any,
) -> Path:
    """A run as it would be had it ended with other texts (text, code), or been one of another study.

    Parameters
    ----------
    missing
        Code -> texts that it should have had besides.
    """
    shutil.copytree(finished.run, folder)
    workspace = Workspace(folder)
    study = Study.model_validate(json.loads(workspace.study.read_text()) | study_changes)
    workspace.study.write_text(study.canonical)
    write_corpus(workspace, study.codes, [CorpusText(text, code, "candidate") for text, code in texts])
    made = Counter(code for _, code in texts)
    summary = json.loads(workspace.summary_json.read_text())
    codes = [
        summary["codes"][0]
        | {
            "label": study.codes.label(code),
            "values": list(study.codes.combinations[code]),
            "profile": 3 * made[code] + 1,
            "wanted": made[code] + (missing or {}).get(code, 0),
            "made": made[code],
        }
        for code in range(len(study.codes))
    ]
    summary |= {"study_sha256": study.sha256, "attributes": list(study.codes.names), "codes": codes}
    summary |= {"corpus_size": len(texts)}
    workspace.summary_json.write_text(json.dumps(summary))
    return folder


def seal(folder: Path, key: Ed25519PrivateKey) -> None:
    """Make a bundle's manifest and signature anew, as whoever changed its files would."""
    (folder / files.PUBLIC_KEY).write_bytes(public_pem(key.public_key()))
    for name in (files.MANIFEST, files.SIGNATURE):
        (folder / name).unlink(missing_ok=True)
    found, _ = files.found_files(folder)
    manifest = files.manifest_text({name: files.sha256_of(folder / name) for name in found}).encode()
    (folder / files.MANIFEST).write_bytes(manifest)
    (folder / files.SIGNATURE).write_bytes(key.sign(manifest))


def problems_of(verification: BundleVerification) -> str:
    """What a verification that failed found, in one line."""
    assert not verification.holds
    return "; ".join(verification.problems)
