"""Attributes of an instance, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, **attributes: object) -> Iterator[None]:
    """Attributes of an instance for a while; afterwards it has those it had, not even the class's own ones more."""
    before = {name: vars(owner).get(name, _MISSING) for name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                del vars(owner)[name]
            else:
                vars(owner)[name] = value
