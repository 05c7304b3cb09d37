"""Quality numbers: none without the range that it has to be read in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError
from server.quality import Quality, QualityNumber, read_quality, write_quality
from server.workspace import Workspace

FINE = {"name": "n", "value": 0.7, "floor": 0.0, "ceiling": 1.0, "direction": "higher"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"floor": 1.0}, "the floor has to be below the ceiling"),
        ({"low": 0.6}, "an interval has both ends"),
        ({"low": 0.8, "high": 0.9}, "outside its interval"),
        ({"direction": "up"}, "direction"),
        ({"value": "much"}, "value"),
    ],
)
def test_a_number_that_says_nothing_is_refused(change: Mapping[str, Any], problem: str, tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    assert read_quality(space) is None
    write_quality(space, Quality.model_validate({"numbers": [FINE]}))
    assert read_quality(space) == Quality.model_validate({"numbers": [FINE]})
    space.quality.write_text(Quality.model_construct(numbers=(FINE | change,)).model_dump_json(warnings=False))
    with pytest.raises(DataError, match=problem):
        read_quality(space)


def test_the_good_end_of_a_range_is_at_one() -> None:
    higher = QualityNumber.model_validate(FINE | {"floor": 0.2, "ceiling": 0.9})
    lower = QualityNumber.model_validate(FINE | {"value": 0.52, "floor": 0.5, "direction": "lower"})
    assert higher.share(higher.ceiling) == 1
    assert higher.share(higher.floor) == 0
    assert lower.share(lower.floor) == 1
    assert lower.share(lower.value) == pytest.approx(0.96)
