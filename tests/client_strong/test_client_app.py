"""The strong tier's answer to a training request, through the real door: what is charged, released and kept."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_strong.client_app import prepared
from common.models.generator import Generator
from common.protocol import Adapter, TrainReply, TrainRequest, unpack_release
from common.site.config import Site
from common.site.door import Door
from common.site.ledger import Ledger
from common.study import Study
from tests.hospitals import rows, small_study, write_site

ROOT = Path(__file__).parents[2]


def _study(base: Path, **changes: Any) -> Study:
    training = {"rounds": 3, "steps": 2, **changes.pop("training", {})}
    return Study.model_validate(small_study(base, training=training, **changes))


def _ask(site: Site, study: Study, server_round: int, adapter: Adapter | None = None, run: str = "run") -> Adapter:
    generator = Generator(study.generator)
    request = TrainRequest(study, run, server_round, adapter or generator.adapter(), generator.frozen_sha256())
    release = Door(site).release(request, lambda: prepared(site, request))
    return TrainReply.from_records(release.to_records(), len(study.codes)).adapter


def _kept(site: Site, study: Study, run: str = "run") -> dict[str, np.ndarray]:
    with Ledger.of(site) as ledger:
        kept = ledger.kept(site.name, study.sha256, run)
    return unpack_release(kept) if kept else {}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.load(write_site(tmp_path, "north", "strong", rows(40)))


def test_the_optimiser_goes_on_over_rounds_and_is_forgotten_after_the_last(tiny_model: Path, site: Site) -> None:
    study = _study(tiny_model)
    steps = []
    for server_round in (1, 2):
        _ask(site, study, server_round)
        kept = _kept(site, study)
        steps.append({float(value) for name, value in kept.items() if name.startswith("step/")})
    assert steps == [{2.0}, {4.0}]
    _ask(site, study, 3)
    assert not _kept(site, study)


def test_a_round_that_was_missed_leaves_the_optimiser_where_it_was(tiny_model: Path, site: Site) -> None:
    study = _study(tiny_model, training={"rounds": 4})
    _ask(site, study, 1)
    _ask(site, study, 3)
    assert {float(v) for name, v in _kept(site, study).items() if name.startswith("step/")} == {4.0}


def test_a_round_that_is_asked_again_is_the_stored_one_and_moves_no_optimiser(tiny_model: Path, site: Site) -> None:
    study = _study(tiny_model)
    first = _ask(site, study, 1)
    kept = _kept(site, study)
    again = _ask(site, study, 1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert all(np.array_equal(kept[name], value) for name, value in _kept(site, study).items())


def test_a_study_may_ask_for_a_fresh_optimiser_in_every_round(tiny_model: Path, site: Site) -> None:
    study = _study(tiny_model, training={"keep_optimizer": False})
    _ask(site, study, 1)
    assert not _kept(site, study)


def test_an_encrypted_ledger_encrypts_what_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    site = Site.load(write_site(tmp_path, "north", "strong", rows(40), ledger_key_file=str(key)))
    study = _study(tiny_model)
    _ask(site, study, 1)
    files = b"".join(file.read_bytes() for file in site.state.iterdir())
    assert b"exp_avg" not in files
    assert any(name.startswith("exp_avg/") for name in _kept(site, study))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_is_the_sites_choice_and_changes_no_interface(
    tiny_model: Path, tmp_path: Path, checkpointing: bool
) -> None:
    extra = f"[machine]\ncheckpointing = {str(checkpointing).lower()}\nphysical_documents = 3\nphysical_tokens = 64\n"
    site = Site.load(write_site(tmp_path, "north", "strong", rows(40), extra=extra))
    study = _study(tiny_model)
    assert set(_ask(site, study, 1)) == set(Generator(study.generator).adapter())


def test_freed_memory_goes_back_to_the_system() -> None:
    """In a process of its own, as the setting stays; the twin leaves it out and keeps the memory."""
    script = (
        "import ctypes, sys\n"
        "from client_strong.client_app import _return_freed_memory\n"
        "if sys.argv[1] == 'on': _return_freed_memory()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]\n"
        "libc.free.argtypes = [ctypes.c_void_p]\n"
        "libc.free(libc.malloc(30 * 2**20))\n"
        # Blocks of a size that was freed once come from the heap; what lies above them keeps them there.
        "blocks = [libc.malloc(8 * 2**20) for _ in range(20)]\n"
        "[ctypes.memset(b, 1, 8 * 2**20) for b in blocks]\n"
        "top = libc.malloc(500_000)\n"
        "[libc.free(b) for b in blocks]\n"
        "pages = int(open('/proc/self/statm').read().split()[1])\n"
        "print(pages * 4096 / 2**20)\n"
    )
    resident = {
        mode: float(
            subprocess.run(
                [sys.executable, "-c", script, mode], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout
        )
        for mode in ("on", "off")
    }
    assert resident["off"] > resident["on"] + 100


def test_all_documents_under_one_code_train(tiny_model: Path, tmp_path: Path) -> None:
    documents = [{**row, "topic": "staff", "tone": 1} for row in rows(40)]
    site = Site.load(write_site(tmp_path, "north", "strong", documents))
    study = _study(tiny_model)
    assert all(np.isfinite(value).all() for value in _ask(site, study, 1).values())


def test_steps_are_reported_to_the_operators_log_without_a_count_of_documents(
    tiny_model: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="fedcorpus.strong"):
        _ask(site, _study(tiny_model), 1)
    assert [r.getMessage() for r in caplog.records if r.name == "fedcorpus.strong"] == [
        "round 1: step 1 of 2",
        "round 1: step 2 of 2",
    ]
