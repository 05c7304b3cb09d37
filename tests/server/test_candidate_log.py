"""A generation that was killed goes on after the last whole line; another generation begins anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from common.models.generator import Generator
from common.study import Study
from server.candidate_log import CandidateLog, Outcome
from server.generation import TextSampler
from tests.hospitals import small_study

OUTCOMES = [
    Outcome(0, "One."),
    Outcome(1, dropped="empty"),
    Outcome(0, "Line\nends\u2028 and \x00 and \ud800 and 🙂", cut=True),
    Outcome(3, "Four."),
]
HEAD = {"study": "ab", "series": "pool"}


def _write(path: Path, head: dict[str, str] = HEAD) -> None:
    with CandidateLog(path, head) as log:
        assert list(log.earlier()) == []
        for outcome in OUTCOMES:
            log.add(outcome)


def _read(path: Path, head: dict[str, str] = HEAD) -> list[Outcome]:
    with CandidateLog(path, head) as log:
        return list(log.earlier())


def test_what_was_written_is_read_back_in_order(tmp_path: Path) -> None:
    _write(tmp_path / "log")
    assert _read(tmp_path / "log") == OUTCOMES


def test_cut_anywhere_the_whole_lines_are_there_and_it_goes_on(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    _write(whole)
    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content)):
        path = tmp_path / "cut"
        path.write_bytes(content[:length])
        kept = max(sum(end <= length for end in ends) - 1, 0)
        with CandidateLog(path, HEAD) as log:
            assert list(log.earlier()) == OUTCOMES[:kept]
            for outcome in OUTCOMES[kept:]:
                log.add(outcome)
        assert path.read_bytes() == content


def test_a_line_that_makes_no_sense_ends_what_is_known(tmp_path: Path) -> None:
    for nonsense in (b"{}\n", b"[1]\n", b"\x00\xff\n", b'{"code": 1, "other": 2}\n', b"null\n"):
        path = tmp_path / "log"
        path.unlink(missing_ok=True)
        _write(path)
        path.write_bytes(path.read_bytes() + nonsense + b'{"code": 0}\n')
        assert _read(path) == OUTCOMES
        assert nonsense not in path.read_bytes(), "and what follows is overwritten"


def test_outcomes_of_another_generation_are_not_taken(tmp_path: Path) -> None:
    _write(tmp_path / "log")
    assert _read(tmp_path / "log", HEAD | {"series": "more"}) == []
    assert _read(tmp_path / "log") == []


def test_removed_twice_is_removed(tmp_path: Path) -> None:
    _write(tmp_path / "log")
    with CandidateLog(tmp_path / "log", HEAD) as log:
        log.remove()
        log.remove()
    assert not (tmp_path / "log").exists()


KILLED = """
import sys
from pathlib import Path
from server.candidate_log import CandidateLog, Outcome

with CandidateLog(Path(sys.argv[1]), {"study": "ab", "series": "pool"}) as log:
    number = 0
    while True:
        log.add(Outcome(number % 4, f"Text {number}."))
        print(number, flush=True)
        number += 1
"""


def test_killed_without_warning_it_loses_no_text_that_was_given(tmp_path: Path) -> None:
    path, root = tmp_path / "log", Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], cwd=root, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as running:  # fmt: skip
        assert running.stdout is not None
        for _ in range(1000):
            given = running.stdout.readline()
        running.send_signal(signal.SIGKILL)
        given = running.stdout.read().split()[-1:] or [given]
    kept = _read(path)
    assert len(kept) > int(given[0]) >= 999
    assert kept[999] == Outcome(3, "Text 999.")


# With a sampler

WANTED = np.array([7, 0, 9, 4])


def _sampler(base: Path, **options: float) -> TextSampler:
    study = Study.model_validate(small_study(base, pool=options))
    return TextSampler(Generator(study.generator), study)


def test_a_generation_goes_on_from_any_line_to_the_same_texts(tmp_path: Path, tiny_model: Path) -> None:
    """Texts that are kept, dropped and made again: none is made twice, and none differs from a generation in one go."""
    # Short texts of a peaked model: many are made again.
    options = {"max_new_tokens": 2, "top_p": 0.02, "max_tries": 3}
    sampler = _sampler(tiny_model, **options)
    whole = tmp_path / "whole"
    with CandidateLog(whole, HEAD) as log:
        expected = sampler.sample(WANTED, series="a", record=log)
    assert sampler.drops.counts.total() > 5
    lines = whole.read_bytes().splitlines(keepends=True)
    for known in range(1, len(lines) + 1, 4):
        path = tmp_path / f"{known}"
        path.write_bytes(b"".join(lines[:known]) + b'{"code": 1, "te')
        again, generated = _sampler(tiny_model, **options), []
        real = again._request
        again._request = lambda *order, real=real, generated=generated: generated.append(order) or real(*order)
        with CandidateLog(path, HEAD) as log:
            assert again.sample(WANTED, series="a", record=log) == expected
        assert path.read_bytes() == whole.read_bytes()
        assert len(generated) == len(lines) - known
        assert again.drops == sampler.drops
