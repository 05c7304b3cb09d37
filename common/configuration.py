"""Read a TOML file into a pydantic model; every failure is one sentence of the caller's error class."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import UserError

_ALTERNATIVE = re.compile(r"(int|str|float|bool)|(literal|tuple|list|dict|constrained|function)\W.*")

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""What studies and sites may be called: names are shown to people and become file names."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class Section(BaseModel):
    """A part of a file that a person writes: frozen, no unknown keys, numbers only where numbers are meant."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with changes; what was worked out from the old values, a hash above all, is worked out anew."""
        copy = super().model_copy(update=update, deep=deep)
        for kind in type(self).__mro__:
            for name, attribute in vars(kind).items():
                if isinstance(attribute, cached_property):
                    copy.__dict__.pop(name, None)
        return copy


def load_model(model: type[ModelT], path: Path, error: type[UserError]) -> ModelT:
    """Read ``path`` as a ``model``.

    Raises
    ------
    UserError
        Of class ``error``: the file, the field, the value found and what would be accepted.
    """
    try:
        return model.model_validate(_load_toml(path, error))
    except ValidationError as cause:
        raise error(f"{path}: {first_problem(cause)}") from cause


def options_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted name, default, description) of every option, in order; 'required' where there is no default."""
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        if section is not None:
            yield from options_of(section, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
        yield f"{prefix}{name}", default, field.description or ""


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's findings, as one sentence about one field."""
    findings = error.errors(include_url=False)
    finding = findings[0]
    place = tuple(part for part in finding["loc"] if not _is_alternative(part))
    where = ".".join(str(part) for part in place) or "the file as a whole"
    if finding["type"] == "extra_forbidden":
        return f"{where}: unknown key; only documented keys are accepted"
    if finding["type"] == "missing":
        return f"{where}: missing; a value is required"
    message = finding["msg"].removeprefix("Value error, ")
    if finding["type"] == "value_error":
        return f"{where}: {message}" if place else message
    if place != finding["loc"]:
        # A field with alternatives has one finding for each: together they say what is accepted.
        same = [f["msg"] for f in findings if f["loc"][: len(place)] == place]
        message = ", or ".join([same[0], *(m[:1].lower() + m[1:] for m in same[1:])])
    return f"{where}: {finding['input']!r} isn't accepted: {message[:1].lower()}{message[1:]}"


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a section, or of the elements of a list of sections."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _is_alternative(part: int | str) -> bool:
    """Whether a part of a place is pydantic's name for an alternative of a field, e.g. ``literal['auto']``."""
    return isinstance(part, str) and bool(_ALTERNATIVE.fullmatch(part))


def _load_toml(path: Path, error: type[UserError]) -> dict[str, Any]:
    if not path.is_file():
        raise error(f"{path}: no such file; a TOML file is needed")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise error(f"{path}: not valid TOML: {cause}") from cause
    except OSError as cause:
        raise error(f"{path}: can't be read: {cause.strerror}") from cause
