"""What ``fedcorpus evaluate`` does with its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from common.codes import ControlCodes
from common.errors import DataError, UserError
from common.models.embedder import visible
from common.study import Study
from server.bundle import files
from server.bundle.verify import is_bundle
from server.corpus import attribute_columns, iterate_corpus
from server.evaluation.evaluation import CAUTION, evaluate
from server.evaluation.material import Material, Options
from server.evaluation.ner import read_tagged
from server.evaluation.texts import Columns, Texts, read_texts, without
from server.evaluation.vectors import Vectors
from server.quality import Quality, write_quality
from server.verify import finished_run
from server.workspace import Workspace, write_atomically

TEXT_COLUMN, LABEL_COLUMN = "text", "label"


@dataclass(frozen=True)
class Arguments:
    """The options as they were given; what each means is said once, in `server.cli`."""

    source: Path
    test: Path
    train: Path | None = None
    holdout: Path | None = None
    floor: Path | None = None
    text_column: str = TEXT_COLUMN
    label_columns: Sequence[str] = ()
    embedder: str = "wordllama"
    cache: Path | None = None
    drop_overlap: bool = False
    entities: tuple[Path, Path] | None = None
    options: Options = field(default_factory=Options)
    out: Path | None = None


@dataclass(frozen=True)
class _Source:
    """A corpus, its study if it has one, and where its numbers go."""

    texts: Texts
    study: Study | None
    workspace: Workspace | None
    columns: Mapping[str, str]


def run(arguments: Arguments, messages: Console) -> Quality:
    """Evaluate, and write ``evaluation.json`` into the run's folder, or where it should go.

    Raises
    ------
    DataError, UserError
        As `server.evaluation.evaluation.evaluate`, or if files can't be read.
    """
    messages.print(CAUTION, markup=False, highlight=False, soft_wrap=True)
    source = _source(arguments)
    material = _material(arguments, source)
    with _bars(messages) as bars:
        quality = evaluate(replace(material, progress=_Shown(bars)))
    if source.study is not None and source.study.voting.embedder == arguments.embedder:
        words = f" The embedder, {arguments.embedder}, is the one that voted: of the votes it is a biased judge."
        quality = quality.model_copy(update={"note": quality.note + words})
    if source.workspace is not None:
        write_quality(source.workspace, quality)
    if arguments.out is not None:
        write_atomically(arguments.out, quality.model_dump_json(indent=1).encode())
    return quality


def _material(arguments: Arguments, source: _Source) -> Material:
    real = Columns(arguments.text_column, source.columns)
    test = _real("--test", arguments.test, real, source.study)
    train, holdout, floor = (
        None if path is None else _real(option, path, columns, source.study)
        for option, path, columns in (
            ("--train", arguments.train, real),
            ("--holdout", arguments.holdout, Columns(arguments.text_column, {})),
            ("--floor", arguments.floor, Columns(TEXT_COLUMN, {name: name for name in source.columns})),
        )
    )
    if holdout is not None and train is None:
        raise UserError("--holdout needs --train: leaks are told by comparing both with the corpus")
    if train is not None and arguments.drop_overlap:
        test = without(test, train)
        holdout = None if holdout is None else without(holdout, train)
    options = arguments.options
    if arguments.entities is not None:
        public, labelled = arguments.entities
        tagged = (read_tagged(public, f"--ner {public.name}"), read_tagged(labelled, f"--ner-test {labelled.name}"))
        options = replace(options, entities=tagged)
    return Material(
        corpus=source.texts, test=test, train=train, holdout=holdout, floor=floor, options=options,
        vectors=Vectors(arguments.embedder, arguments.cache),
    )  # fmt: skip


def _source(arguments: Arguments) -> _Source:
    path = arguments.source
    mapping = _mapping(arguments.label_columns)
    if not path.is_dir():
        columns = mapping or {LABEL_COLUMN: LABEL_COLUMN}
        return _Source(_file(path, arguments.text_column, columns), None, None, columns)
    if is_bundle(path):
        study = _study(path)
        texts = _bundle(path, study.codes)
        workspace = None
    else:
        workspace = Workspace(path)
        study, _ = finished_run(workspace)
        texts = _run(path, workspace, study.codes)
    unknown = [name for name in mapping if name not in study.codes.names]
    if unknown:
        raise UserError(
            f"--label-column {unknown[0]}: the study's attributes are {list(study.codes.names)}; ATTRIBUTE=COLUMN says "
            "which column of the real files has one"
        )
    columns = {name: mapping.get(name, name) for name in study.codes.names}
    return _Source(texts, study, workspace, columns)


def _mapping(given: Sequence[str]) -> dict[str, str]:
    """Attribute -> column of the real files."""
    found: dict[str, str] = {}
    for one in given:
        attribute, _, column = one.partition("=")
        if not attribute or attribute in found:
            raise UserError(f"--label-column {one!r}: COLUMN or ATTRIBUTE=COLUMN is accepted, each attribute once")
        found[attribute] = column or attribute
    return found


def _real(option: str, path: Path, columns: Columns, study: Study | None) -> Texts:
    """Real texts; of those that the study doesn't declare a site would use none, so they don't count here either."""
    texts = read_texts(path, f"{option} {path.name}", columns)
    if study is None or not texts.labels:
        return texts
    declared = {a.name: a.declared for a in study.codes.attributes}
    kept = [
        i
        for i, code in enumerate(texts.codes)
        if all(v in declared[n] for n, v in zip(texts.labels, code, strict=True))
    ]
    if not kept:
        raise DataError(
            f"{texts.name}: no text has labels that the study declares; for {study.codes.names[0]!r} these are "
            f"{list(study.codes.attributes[0].values)}"
        )
    return replace(texts.at(kept), left_out=texts.left_out + len(texts) - len(kept))


def _file(path: Path, text_column: str, columns: Mapping[str, str]) -> Texts:
    """A corpus in a file of its own: its texts are in 'text', unless there is no such column."""
    own = {name: name for name in columns}
    try:
        return read_texts(path, str(path), Columns(TEXT_COLUMN, own))
    except DataError:
        if text_column == TEXT_COLUMN:
            raise
    return read_texts(path, str(path), Columns(text_column, own))


def _run(path: Path, workspace: Workspace, codes: ControlCodes) -> Texts:
    rows = [(visible(row.text), codes.combinations[row.code]) for row in iterate_corpus(workspace, codes)]
    kept = [row for row in rows if row[0]]
    if not kept:
        raise DataError(f"{path}: the corpus has no texts; nothing can be evaluated")
    texts, combinations = zip(*kept, strict=True)
    return Texts(
        str(path), texts, dict(zip(codes.names, zip(*combinations, strict=True), strict=True)), len(rows) - len(kept)
    )


def _bundle(path: Path, codes: ControlCodes) -> Texts:
    columns = dict(zip(codes.names, attribute_columns(codes, files.OWN_COLUMNS), strict=True))
    return read_texts(path / files.JSON_LINES, str(path), Columns(TEXT_COLUMN, columns))


def _study(path: Path) -> Study:
    try:
        return Study.from_canonical((path / files.STUDY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise DataError(f"{path}: no readable {files.STUDY}; check the bundle with fedcorpus verify") from cause


def _bars(messages: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=messages, transient=True, disable=not messages.is_terminal,
    )  # fmt: skip


class _Shown:
    """Shows how far each part is; one that gives its place to the next is done."""

    def __init__(self, bars: Progress) -> None:
        self._bars, self._what = bars, ""
        self._task = bars.add_task("reading", total=None)

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self._bars.reset(self._task, description=what, total=total)
            self._what = what
        self._bars.update(self._task, completed=done, total=total)
