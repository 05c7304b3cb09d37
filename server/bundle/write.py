"""From a finished run to a bundle: the corpus as a folder that can be published as it stands.

    bundle = write_bundle(run, Path("corpus-v1"), Publication(title="Comments", license="CC-BY-4.0"), key)

Everything in it is public or already noised, and nothing belongs to one site. It is there whole or not at all: it grows
under a hidden name beside its place, every file is made durable, its manifest comes last, and then it is renamed. The
same run and the same key give the same bytes: no clock and no chance go in.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import metadata
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.errors import BundleError, DataError, PrivacyError
from common.study import Study
from server.bundle import files
from server.bundle.card import card
from server.bundle.croissant import croissant
from server.bundle.files import Facts, Publication
from server.bundle.signing import fingerprint, public_pem
from server.bundle.source import FinishedCorpus, Row, counted
from server.corpus import json_line
from server.statement import TIERS, PrivacyStatement, accountant, privacy_statement, second_epsilon, to_text
from server.summary import Summary
from server.verify import TOLERANCE, at_most_about, finished_run
from server.workspace import Workspace

OnText = Callable[[int, int], None]
"""Called with the number of texts written and of all."""

ROWS_PER_SHARD = 100_000
ROWS_AT_ONCE = 2_000
CHARACTERS_AT_ONCE = 4 << 20
"""Rows of a row group, and all that is in memory at a time; fewer if their texts are long."""


def write_bundle(
    run: Path,
    out: Path,
    publication: Publication,
    key: Ed25519PrivateKey | None,
    *,
    allow_holes: bool = False,
    on_text: OnText = lambda _written, _all: None,
    rows_per_shard: int = ROWS_PER_SHARD,
) -> Facts:
    """Write a finished run's bundle to a new folder.

    Parameters
    ----------
    key
        Signs the manifest; without one the bundle can't be told from somebody else's.
    allow_holes
        Whether codes may have fewer texts than their quota; the card names them.

    Raises
    ------
    DataError
        If the run isn't finished, its corpus is damaged or has holes, or the folder exists.
    PrivacyError
        If the study gives no finite promise, or the second accountant doesn't confirm it.
    BundleError
        If it can't be written, the disk being full for one; nothing is left of it then.
    """
    workspace = Workspace(run)
    study, summary = finished_run(workspace)
    if os.path.lexists(out):
        raise DataError(f"{out}: exists already; a bundle is written to a new folder")
    if not out.absolute().parent.is_dir():
        raise DataError(f"{out}: the folder that it would be in isn't there")
    statement = _statement(run, study, summary)
    missing = _missing(run, summary, allow_holes)
    corpus = counted(workspace, study, summary)

    # Under a name that says what it is, should the machine die before it is finished.
    building = out.absolute().with_name(f".{out.name}.{secrets.token_hex(4)}.unfinished")
    try:
        building.mkdir()
        (building / "data").mkdir()
        shards = max(1, -(-corpus.size // rows_per_shard))
        in_memory = _write_rows(building, corpus, shards, rows_per_shard, on_text)
        facts = _facts(building, publication, corpus, summary, shards, in_memory, missing, key)
        _write_words(building, facts, corpus, statement)
        _write_manifest(building, key)
        _make_durable(building)
        building.rename(out)
        _sync(out.absolute().parent)
    except (OSError, UnicodeError, pa.ArrowException) as cause:
        reason = getattr(cause, "strerror", None) or cause
        raise BundleError(f"{out}: the bundle can't be written ({reason}); nothing is left of it") from cause
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return facts


def _statement(run: Path, study: Study, summary: Summary) -> PrivacyStatement:
    sites = {tier: sum(s.tier == tier and s.answers > 0 for s in summary.sites) for tier in TIERS}
    version = summary.software.get("dp-accounting", "of an unknown version")
    statement = privacy_statement(study, summary.study_sha256, summary.run_id, sites, accountant(version))
    if summary.epsilon > statement.epsilon * (1 + TOLERANCE) or summary.delta > statement.delta * (1 + TOLERANCE):
        raise DataError(
            f"{run}: summary.json has a site of epsilon {summary.epsilon:g}, delta {summary.delta:g}; this study "
            f"allows {statement.epsilon:g} and {statement.delta:g} at most"
        )
    for tier in statement.tiers:
        second = second_epsilon(tier)
        if second > at_most_about(tier.epsilon):
            raise PrivacyError(
                f"{run}: the second accountant gives epsilon {second:.4f} for a {tier.tier} site, the first "
                f"{tier.epsilon:g}; a bundle whose claim they don't agree on isn't written"
            )
    return statement


def _missing(run: Path, summary: Summary, allow_holes: bool) -> dict[str, int]:
    missing = {code.label: code.wanted - code.made for code in summary.codes if code.made != code.wanted}
    if missing and not allow_holes:
        raise DataError(
            f"{run}: {sum(missing.values())} texts are missing, under {len(missing)} of {len(summary.codes)} codes, as "
            "the generator gave none; --allow-holes publishes the corpus and says so in its card"
        )
    return missing


def _write_rows(building: Path, corpus: FinishedCorpus, shards: int, rows_per_shard: int, on_text: OnText) -> int:
    """Write both formats in one go; returns the texts' size in memory."""
    names = files.columns(corpus.study.codes)
    schema = pa.schema([*((name, pa.string()) for name in names[:-1]), (names[-1], pa.float64())])
    rows, written, in_memory = corpus.rows(), 0, 0
    with ExitStack() as stack:
        opened = stack.enter_context((building / files.JSON_LINES).open("wb"))
        # No time and no name in it, which gzip would keep.
        packed = stack.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=opened, mtime=0))
        for shard in files.shard_names(shards):
            with pq.ParquetWriter(building / shard, schema, compression="zstd", store_schema=False) as parquet:
                for some in _lots(islice(rows, rows_per_shard)):
                    table = pa.Table.from_pylist(some, schema)
                    parquet.write_table(table)
                    packed.write(b"".join(map(_line, some)))
                    in_memory += table.nbytes
                    written += len(some)
                    on_text(written, corpus.size)
    if written != corpus.size or next(rows, None):
        raise DataError(f"{corpus.workspace.corpus_jsonl}: was changed while it was read; release it again")
    return in_memory


def _lots(rows: Iterable[Row]) -> Iterator[list[Row]]:
    lot: list[Row] = []
    characters = 0
    for row in rows:
        lot.append(row)
        characters += len(row["text"])
        if len(lot) == ROWS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield lot
            lot, characters = [], 0
    if lot:
        yield lot


def _line(row: Row) -> bytes:
    line = json_line(row).encode()
    if len(line) >= files.MOST_LINE:
        raise DataError(f"text {row['id']} has more than {files.MOST_LINE >> 20} MiB, which no reader has to take")
    return line


def _facts(
    building: Path,
    publication: Publication,
    corpus: FinishedCorpus,
    summary: Summary,
    shards: int,
    in_memory: int,
    missing: Mapping[str, int],
    key: Ed25519PrivateKey | None,
) -> Facts:
    return Facts(
        **publication.model_dump(),
        format="fedcorpus bundle",
        version=files.VERSION,
        study=summary.study,
        study_sha256=summary.study_sha256,
        run_id=summary.run_id,
        date=_finished_on(corpus.workspace),
        texts=corpus.size,
        shards=shards,
        columns=files.columns(corpus.study.codes),
        parquet_bytes=sum((building / name).stat().st_size for name in files.shard_names(shards)),
        memory_bytes=in_memory,
        missing=dict(missing),
        signing_key=fingerprint(key.public_key()) if key else None,
        software={"fedcorpus": metadata.version("fedcorpus"), **summary.software},
    )


def _finished_on(workspace: Workspace) -> str:
    """Day of the run's last event: the same whenever the bundle is written."""
    try:
        last = [line for line in workspace.progress.read_bytes().split(b"\n") if line.strip()][-1]
        return datetime.fromtimestamp(float(json.loads(last)["at"]), UTC).date().isoformat()
    except (OSError, ValueError, LookupError, TypeError) as cause:
        raise DataError(f"{workspace.progress}: doesn't say when the run was finished") from cause


def _write_words(building: Path, facts: Facts, corpus: FinishedCorpus, statement: PrivacyStatement) -> None:
    digests = {name: files.sha256_of(building / name) for name in (*files.shard_names(facts.shards), files.JSON_LINES)}
    pages = {
        files.STUDY: corpus.workspace.study.read_text(encoding="utf-8"),
        files.FACTS: facts.model_dump_json(indent=1) + "\n",
        files.STATEMENT: statement.model_dump_json(indent=1) + "\n",
        files.WORDS: f"# Privacy statement\n\n{to_text(statement)}",
        files.CROISSANT: croissant(facts, statement, digests),
        files.CARD: card(facts, statement, corpus.study, corpus.counts.tolist(), corpus.samples),
    }
    for name, text in pages.items():
        (building / name).write_bytes(text.encode())


def _write_manifest(building: Path, key: Ed25519PrivateKey | None) -> None:
    if key:
        (building / files.PUBLIC_KEY).write_bytes(public_pem(key.public_key()))
    found, _ = files.found_files(building)
    manifest = files.manifest_text({name: files.sha256_of(building / name) for name in found}).encode()
    if key:
        (building / files.SIGNATURE).write_bytes(key.sign(manifest))
    (building / files.MANIFEST).write_bytes(manifest)


def _make_durable(building: Path) -> None:
    for path in [*building.rglob("*"), building]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
