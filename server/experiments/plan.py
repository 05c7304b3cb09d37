"""An experiment as data: a TOML file says which cells there are, over which documents, and how they are shown.

    experiment = Experiment.load(Path("tests/benchmarks/paper/quick.toml"))
    [cell.name for cell in experiment.cells]

A grid is a product: where a setting of a cell has a list, there is a cell for each of its values. Settings of the study
are those of `study.toml`, written as ``study.pool.size``; nothing of them is repeated here.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.codes import ControlCodes
from common.configuration import NAME, Section, first_problem, load_model
from common.errors import UserError
from common.study import Study
from server.experiments.judges import JUDGES
from server.experiments.partition import Partition
from server.experiments.pretraining import Pretraining

_LISTS = {"partition.strong_values", "study.generator.target_modules"}
"""Settings whose own value is a list: a grid of them is a list of lists."""

Poisoning = Literal["none", "stuffed", "inverted", "garbage"]


class Data(Section):
    """The real documents."""

    file: str = Field(description="File (Parquet, CSV, JSONL; may be gzipped) inside the data folder.")
    text_column: str = Field(default="text", description="Column with the text.")
    code_columns: dict[str, str] = Field(
        default_factory=dict, description="Attribute of the study -> its column, where they differ."
    )
    more_columns: tuple[str, ...] = Field(
        default=(), description="Further columns that partitions go by, such as a hospital."
    )
    patient_column: str | None = Field(default=None, description="Column of the patient, for studies of that unit.")
    split_column: str = Field(default="split", description="Column that says which documents are for testing.")
    train: tuple[str, ...] = Field(default=("train",), description="Its values of documents that sites hold.")
    test: tuple[str, ...] = Field(default=("test",), description="Its values of documents that judge.")
    tagged_file: str | None = Field(
        default=None,
        description="File inside the data folder with public labelled sentences (lists 'tokens' and 'tags', and the "
        "split's column), for the measure 'entities'.",
    )
    most: int | None = Field(default=None, ge=1, description="Documents of the sites together, at most, by chance.")
    most_test: int | None = Field(default=None, ge=1, description="Documents that judge, at most, by chance.")


class Judging(Section):
    """What is measured of every corpus."""

    attribute: str | None = Field(
        default=None, description="Attribute that classifiers are taught to tell. Unset means the first."
    )
    measures: tuple[str, ...] = Field(
        default=("tfidf", "features", "distances", "codes", "wording"),
        description=f"Names of measures: {', '.join(sorted(JUDGES))}.",
    )
    embedder: str = Field(
        default="wordllama",
        description="As voting.embedder of a study; another one than votes is a fairer judge. 'package:' and a place "
        "inside an installed package names a folder of sentence-transformers.",
    )
    encoder: str | None = Field(default=None, description="Folder of an encoder, or 'package:…', for 'fine-tuned'.")
    most: int = Field(default=1000, ge=20, description="Texts a side that are compared, at most.")

    @model_validator(mode="after")
    def _measures_are_known(self) -> Judging:
        if unknown := sorted(set(self.measures) - set(JUDGES)):
            raise ValueError(f"measures has {unknown[0]!r}; {sorted(JUDGES)} are known")
        if "fine-tuned" in self.measures and self.encoder is None:
            raise ValueError("encoder is missing; the measure 'fine-tuned' needs one")
        return self


class Model(Section):
    """A generator: one that is there, or a small one that is pre-trained here on other public text."""

    base: str | None = Field(default=None, description="As generator.base of a study.")
    pretraining: Pretraining | None = Field(default=None, description="How a small one is made here.")
    note: str = Field(default="", description="What a reader of the results must know of it.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Model:
        if (self.base is None) == (self.pretraining is None):
            raise ValueError("a model has either a base or a pretraining")
        return self


class Table(Section):
    """A table of the results page: one measure, methods as rows."""

    title: str = Field(description="Title.")
    measure: str = Field(description="Name of a number, such as 'accuracy, tfidf'.")
    columns: str | None = Field(default=None, description="Setting whose values are the columns; unset is one column.")
    labels: tuple[str, ...] = Field(default=(), description="Labels of the cells that are rows; unset means all.")
    gap: tuple[str, str, str] | None = Field(
        default=None,
        description="Rows (without noise, with noise, refined): which share of the gap refinement wins back.",
    )
    paper: str = Field(default="", description="What the paper has for it, in words.")


class Cell(Section):
    """One way to make a corpus."""

    label: str = Field(description="What rows of tables call it; cells of one grid share it.")
    model: str = Field(description="Name of one of the experiment's models.")
    source: Literal["generator", "documents"] = Field(
        default="generator",
        description="Where the corpus is from. documents: real ones, as many as it has texts, as a ceiling.",
    )
    partition: Partition = Field(default=Partition(), description="Who holds what.")
    trains: Literal["strong", "all", "pooled", "nobody"] = Field(
        default="strong",
        description="Who trains. all: weak sites too. pooled: one site that holds everything. nobody: zero-shot.",
    )
    votes: Literal["weak", "all", "nobody"] = Field(
        default="weak", description="Who profiles and votes. all: strong sites too, if nobody trains."
    )
    noise: bool = Field(
        default=True,
        description="Whether training is private. false: plain fine-tuning without clipping or noise (epsilon = "
        "infinity), on public text only.",
    )
    vote_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="Epsilon of the sites that vote, if it is another; 500 leaves no noise on votes.",
    )
    as_paper: bool = Field(
        default=False,
        description="Joint accounting at the epsilon that the paper's way, promising the study's epsilon, composes to.",
    )
    iterations: int = Field(
        default=1,
        ge=1,
        le=20,
        description="Rounds of votes; before each but the first, what won is kept and varied (Private Evolution).",
    )
    documents_per_patient: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="For studies whose unit is the patient, over documents that name none: at each site, so many of "
        "them in turn are said to be one patient's.",
    )
    poisoning: Poisoning = Field(
        default="none",
        description="What one weak site does to the vote. stuffed: all it may on a few candidates of every code. "
        "inverted: votes against what its documents are near to. garbage: holds texts without sense.",
    )
    canaries: int = Field(
        default=0,
        ge=0,
        le=200,
        description="Made-up secrets that are planted among the documents of the first site that trains, for the "
        "measure 'leaks'.",
    )
    canary_copies: int = Field(
        default=1, ge=1, le=1000, description="Documents that say each of them; to studies of that unit, one patient's."
    )
    study: dict[str, Any] = Field(default_factory=dict, description="Settings of the study, by section.")

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Cell:
        if self.votes == "all" and self.trains != "nobody":
            raise ValueError("votes is 'all' and sites train; a site has one tier, so trains has to be 'nobody'")
        if self.votes == "weak" and self.trains in ("all", "pooled"):
            raise ValueError(f"trains is {self.trains!r} and votes 'weak'; nobody is left to vote, use 'nobody'")
        if self.iterations > 1 and self.votes == "nobody":
            raise ValueError("iterations are rounds of votes; votes is 'nobody'")
        if self.documents_per_patient > 1 and self.study.get("privacy", {}).get("unit") != "patient":
            raise ValueError(
                f"documents_per_patient is {self.documents_per_patient}, and the study's privacy.unit isn't 'patient'"
            )
        if self.poisoning != "none" and self.votes == "nobody":
            raise ValueError(f"poisoning is {self.poisoning!r}, of votes; votes is 'nobody'")
        if self.canaries and (self.trains == "nobody" or self.source == "documents"):
            raise ValueError(
                f"canaries is {self.canaries}, and nobody trains who could learn them; trains has to be another than "
                "'nobody', and source 'generator'"
            )
        return self

    @cached_property
    def template(self) -> Study:
        """The cell's study; its model and its federation are filled in when it is made."""
        settings = copy.deepcopy(self.study)
        settings["generator"] = {"base": "package:none", **settings.get("generator", {})}
        # A batch is held against the smallest site when the partition is known.
        settings["federation"] = {"min_documents": 10**9, **settings.get("federation", {})}
        return Study.model_validate({"name": "experiment", **settings})

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings by dotted name."""
        return dict(_flat(self.model_dump(mode="json", exclude={"study"}))) | {
            f"study.{name}": value
            for name, value in _flat(
                self.template.model_dump(mode="json", exclude={"codes": True, "generator": {"base"}, "name": True})
            )
        }


class Experiment(Section):
    """Everything that an experiment's file says."""

    name: str = Field(pattern=NAME, description="Short name; letters, digits, . _ -")
    title: str = Field(description="Title of its results.")
    about: str = Field(default="", description="What it shows, and how it differs from the paper's.")
    seeds: tuple[int, ...] = Field(
        default=(0, 1, 2), description="One repetition each: another partition, adapter and pool. Noise has no seed."
    )
    codes: ControlCodes = Field(description="Control codes, as in a study.")
    data: Data = Field(description="The real documents.")
    judging: Judging = Field(default=Judging(), description="What is measured.")
    models: dict[str, Model] = Field(description="Generators by name.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of all cells, unless a grid says else."
    )
    grid: tuple[dict[str, Any], ...] = Field(description="Cells: settings, by dotted name; a list is one cell a value.")
    tables: tuple[Table, ...] = Field(default=(), description="Tables of the results page.")

    @model_validator(mode="after")
    def _cells_are_valid(self) -> Experiment:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds is {list(self.seeds)}; different numbers of at least 0 are needed")
        if self.judging.attribute not in (None, *self.codes.names):
            raise ValueError(
                f"judging.attribute is {self.judging.attribute!r}; the codes have {list(self.codes.names)}"
            )
        if self.codes.multiple:
            raise ValueError("codes: an attribute is multiple; experiments take documents of one code each")
        if not self.cells:
            raise ValueError("grid: no cells; at least one table [[grid]] is needed")
        repeated = [name for name, times in Counter(cell.name for cell in self.cells).items() if times > 1]
        if repeated:
            raise ValueError(f"grid: two cells are called {repeated[0]!r}; give them different labels")
        self._check_entities()
        for table in self.tables:
            self._check_table(table)
        return self

    def _check_entities(self) -> None:
        if "entities" in self.judging.measures and self.data.tagged_file is None:
            raise ValueError("data.tagged_file is missing; the measure 'entities' needs labelled sentences")

    def _check_table(self, table: Table) -> None:
        labels = {cell.label for cell in self.cells}
        if unknown := sorted(set(table.labels) - labels):
            raise ValueError(f"tables: {table.title!r} names {unknown[0]!r}; cells are labelled {sorted(labels)}")
        rows = {name_of(cell.label, cell.chosen, table.columns) for cell in self.cells}
        if unknown := sorted(set(table.gap or ()) - rows):
            raise ValueError(f"tables: the gap of {table.title!r} names {unknown[0]!r}; its rows are {sorted(rows)}")
        if table.columns is not None and not any(table.columns in cell.cell.settings for cell in self.cells):
            raise ValueError(f"tables: the columns of {table.title!r} are {table.columns!r}, which no cell has")

    @cached_property
    def cells(self) -> tuple[NamedCell, ...]:
        """All cells, in the order of the file."""
        return tuple(cell for number, row in enumerate(self.grid, 1) for cell in self._cells_of(row, number))

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Settings of a cell about which nothing is said but what has to be."""
        study = {"codes": self.codes.model_dump(), "privacy": {"epsilon": 1.0, "delta": 1e-6}}
        return Cell(label="", model="", study=study).settings

    @property
    def judged(self) -> str:
        """The attribute that classifiers are taught to tell."""
        return self.judging.attribute or self.codes.names[0]

    @classmethod
    def load(cls, path: Path) -> Experiment:
        """Read an experiment's file; what it leaves out is taken from the file that it ``extends``, and so on.

        Raises
        ------
        UserError
            With one sentence that names the file, the field, the value and what would be accepted.
        """
        content = _with_what_it_extends(path)
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise UserError(f"{path}: {first_problem(error)}") from error

    def _cells_of(self, row: Mapping[str, Any], number: int) -> Iterator[NamedCell]:
        flat = dict(_flat(row))
        varied = {name: values for name, values in flat.items() if _is_varied(name, values)}
        for values in product(*varied.values()):
            chosen = dict(zip(varied, values, strict=True))
            yield NamedCell(self._cell({**flat, **chosen}, number), chosen)

    def _cell(self, settings: Mapping[str, Any], number: int) -> Cell:
        nested: dict[str, Any] = {}
        for name, value in [*_flat(self.settings), *_flat(settings)]:
            _put(nested, name, value)
        _put(nested, "study.codes", self.codes.model_dump())
        nested.setdefault("model", next(iter(self.models), ""))
        try:
            cell = Cell.model_validate(nested)
            _ = cell.template
        except ValidationError as error:
            raise ValueError(f"grid, table {number}: {first_problem(error)}") from error
        if cell.model not in self.models:
            raise ValueError(f"grid, table {number}: model is {cell.model!r}; {sorted(self.models)} are declared")
        return cell


@dataclass(frozen=True)
class NamedCell:
    """A cell of a grid.

    Attributes
    ----------
    cell
        Its settings.
    chosen
        Those that the grid varies.
    """

    cell: Cell
    chosen: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What it shares with the other cells of its grid."""
        return self.cell.label

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return name_of(self.label, self.chosen)


def name_of(label: str, chosen: Mapping[str, Any], leave_out: str | None = None) -> str:
    """A cell's name, by what its grid varies; without one of these, the name of a row that has a column for each."""
    # A table's column may be the name of a whole section, such as a partition's.
    left = {name: value for name, value in chosen.items() if leave_out not in (name, f"{name}.name")}
    parts = [f"{name.rpartition('.')[2]}={_called(value)}" for name, value in left.items()]
    return f"{label} ({', '.join(parts)})" if parts else label


class _Tables(BaseModel):
    """A file as it is, before its experiment is looked at."""

    model_config = ConfigDict(extra="allow")


def _with_what_it_extends(path: Path, readers: Sequence[Path] = ()) -> dict[str, Any]:
    if path.resolve() in readers:
        raise UserError(f"{path}: extends leads back to this file; a file can extend others only that don't extend it")
    content = load_model(_Tables, path, UserError).model_extra or {}
    if "extends" not in content:
        return content
    other = path.parent / str(content.pop("extends"))
    return _merged(_with_what_it_extends(other, [*readers, path.resolve()]), content)


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Both; of what both have, sections are merged and values are the own ones."""
    merged = dict(common)
    for name, value in own.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _called(value: Any) -> Any:
    return value.get("name", value) if isinstance(value, Mapping) else value


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _put(nested: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        inner = nested.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{name}: {section!r} has a value of its own and can't be a section too")
        nested = inner
    nested[last] = value


def _is_varied(name: str, value: Any) -> bool:
    return isinstance(value, list) and (name not in _LISTS or all(isinstance(one, list) for one in value))
