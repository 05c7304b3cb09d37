"""What single steps do: plain and private training, pre-training, variations, winners, hostile votes, gaps."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from common.codes import Attribute, ControlCodes
from common.errors import BudgetExceededError, ModelError, UserError
from common.logs import NAME
from common.models.generator import Generator, document_losses
from common.privacy.accounting import joint_epsilon
from common.protocol import CandidatePool
from common.site.config import Site
from common.site.plan import weak_plan
from common.site.policy import check_study
from common.study import Study
from server.experiments.estimate import in_words
from server.experiments.federation import SiteDocuments, matching_paper, phase_study, quiet, write_sites
from server.experiments.places import embedder_of, folder_of
from server.experiments.plain import PlainSite, plain_rounds
from server.experiments.plan import Experiment, Table
from server.experiments.plot import draw_points, svg
from server.experiments.poison import inverted, stuffed
from server.experiments.pooling import best
from server.experiments.pretraining import Pretraining, PublicText, pretrain
from server.experiments.runner import Row
from server.experiments.tables import Spread, entries_of, render_table, won_back
from server.experiments.variation import vary
from server.experiments.voting import shared
from tests.hospitals import rows, small_study

CODES = ControlCodes(attributes=(Attribute(name="topic", values=("staff", "parking")),))


def _study(base: Path, **changes: Any) -> Study:
    study = small_study(base, federation={"min_documents": 10**6}, **changes)
    return Study.model_validate(study)


READ = [("class: a\nText:", f"The patient number {i % 9} was given a drug.") for i in range(60)]


def _pretraining(steps: int) -> Pretraining:
    return Pretraining(
        texts=(PublicText(file="none"),),
        vocabulary=320,
        layers=1,
        width=32,
        heads=2,
        context=48,
        batch_size=8,
        steps=steps,
        learning_rate=1e-2,
    )


def _site(name: str, count: int, offset: int = 0) -> SiteDocuments:
    import json

    content = "".join(json.dumps({**row, "tone": str(row["tone"])}) + "\n" for row in rows(count, offset)).encode()
    return SiteDocuments.of(name, content, "record")


def test_plain_training_learns_what_sites_hold(tiny_model: Path) -> None:
    training = {"rounds": 3, "steps": 8, "batch_size": 16, "learning_rate": 3e-2}
    study = _study(tiny_model, training=training, generator={"rank": 4})
    sites = [PlainSite.read(_site(name, 40, place), study) for place, name in ((0, "north"), (40, "south"))]
    generator = Generator(study.generator)

    def loss() -> float:
        prompts = generator.prompts(study.codes)
        texts = generator.encode(sites[0].texts, [40] * 40)
        with torch.no_grad():
            batch = generator.batch([prompts[code] for code in sites[0].codes], texts)
            return float(document_losses(generator.model, batch).mean())

    before = loss()
    generator.load_adapter(plain_rounds(generator, sites, study, seed=0))
    assert loss() < before - 0.3
    assert sites[0].profile(4).sum() == 40


def test_a_pretrained_model_has_learnt_its_text(tmp_path: Path) -> None:
    short = pretrain(READ, _pretraining(1), tmp_path / "short", tmp_path)
    long = pretrain(READ, _pretraining(90), tmp_path / "long", tmp_path)
    assert long < short - 1.0
    study = _study(tmp_path / "long", generator={"max_tokens": 48}, pool={"max_new_tokens": 8})
    assert len(Generator(study.generator).prompts(study.codes)) == 4


def test_pretraining_that_was_killed_goes_on_to_the_same_model(tmp_path: Path) -> None:
    def until_130(done: int, _: int) -> None:
        if done == 130:
            raise KeyboardInterrupt

    options, steps = _pretraining(150), list[int]()
    with pytest.raises(KeyboardInterrupt):
        pretrain(READ, options, tmp_path / "none", tmp_path, until_130)
    resumed = pretrain(READ, options, tmp_path / "resumed", tmp_path, lambda done, _: steps.append(done))
    assert steps == list(range(101, 151))
    (tmp_path / "state.pt").unlink()
    assert pretrain(READ, options, tmp_path / "whole", tmp_path) == resumed
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("resumed", "whole")]
    assert models[0] == models[1]


def test_a_variation_begins_as_what_won_and_goes_on_otherwise(tiny_model: Path) -> None:
    study = _study(tiny_model, pool={"max_new_tokens": 30})
    texts = [("The staff were kind and explained everything.", 0), ("Parking is difficult and too warm.", 2)]
    varied = vary(Generator(study.generator), texts, 6, study, (0, 2))
    assert 0 < len(varied) <= 6
    assert len({text for text, _ in varied}) == len(varied)
    for text, code in varied:
        won = next(text for text, own in texts if own == code)
        assert text != won
        assert text[:3] == won[:3]
    again = vary(Generator(study.generator), texts, 6, study, (0, 2))
    assert again == varied


def test_winners_are_a_share_of_every_code() -> None:
    pool = CandidatePool(tuple("abcdefg"), np.array([0, 0, 0, 0, 2, 2, 3], dtype=np.int32))
    votes = np.array([1, 5, 3, 9, 0, 2, -4])
    assert best(pool, votes, 4, 0.5) == [3, 1, 5, 6]


def test_a_stuffed_ballot_claims_all_it_may_for_the_worst() -> None:
    study = Study.model_validate(small_study(Path("package:none"), federation={"max_units": 400}))
    pool = CandidatePool(tuple(f"c{i}" for i in range(20)), np.repeat(np.arange(4, dtype=np.int32), 5))
    ballot = np.tile(np.array([5, 1, 4, 2, 3]), 4)
    profile, sent = stuffed(np.ones(4, dtype=np.int64), ballot, pool, study)
    assert profile.tolist() == [100] * 4
    assert sent[:5].tolist() == [0, 100, 0, 100, 100]
    _, against = inverted(profile, ballot, pool, study)
    assert against[:5].tolist() == [0, 4, 1, 3, 2]


def test_a_site_of_an_experiment_refuses_more_than_its_cell_says(tmp_path: Path) -> None:
    site = _site("north", 40)
    template = Study.model_validate(small_study(Path("package:none")))
    study = phase_study(template, ("privacy", "voting"), "weak", [site], privacy={"epsilon": 2.0})
    files = write_sites(tmp_path / "homes", tmp_path / "sites", "weak", [site], study)
    more = phase_study(template, ("privacy", "voting"), "weak", [site], privacy={"epsilon": 3.0})
    with pytest.raises(BudgetExceededError, match="asks for epsilon 3; the policy of site 'north' allows 2"):
        check_study(Site.load(files[1]), more)


def test_a_phase_has_only_what_it_depends_on() -> None:
    site = _site("north", 40)
    template = Study.model_validate(small_study(Path("package:none")))
    other = template.model_copy(update={"pool": template.pool.model_copy(update={"size": 77})})
    parts = ("privacy", "generator", "training")
    assert phase_study(template, parts, "strong", [site]) == phase_study(other, parts, "strong", [site])
    with_pool = (*parts, "pool")
    assert phase_study(template, with_pool, "strong", [site]) != phase_study(other, with_pool, "strong", [site])
    with pytest.raises(UserError, match="batch_size is 8, and the smallest site that trains has size class 6"):
        phase_study(template, parts, "strong", [_site("small", 6)])


@pytest.fixture(scope="module")
def promise() -> Study:
    # A large epsilon and one vote: the accountant is soon done.
    study = small_study(Path("package:none"), privacy={"epsilon": 4.0, "delta": 1e-3})
    return Study.model_validate({**study, "voting": {"neighbours": 1}})


def test_votes_that_share_a_promise_keep_it_together(promise: Study) -> None:
    one = weak_plan(promise.model_copy(update={"privacy": shared(promise, 3)}))
    total = joint_epsilon(one.mechanisms * 3, 1e-3)
    assert 3.6 < total <= 4.0
    assert one.votes.scale > 1.6 * weak_plan(promise).votes.scale


def test_the_papers_way_composes_to_less_than_it_promises(promise: Study) -> None:
    matched = matching_paper(promise, "weak", [_site("north", 40)])
    assert matched.accounting == "joint"
    assert matched.epsilon is not None
    assert 2.0 < matched.epsilon < 3.9


def _row(label: str, value: float, seed: int, size: int | None = None, measure: str = "accuracy") -> Row:
    chosen = {} if size is None else {"study.pool.size": size}
    return Row(
        experiment="e", cell=label, label=label, chosen=chosen, model="m", seed=seed,
        settings={"study.pool.size": size or 1, "noise": True, "trains": "strong"}, numbers={measure: value},
        notes={}, seconds={}, results={},
    )  # fmt: skip


def test_a_gap_is_won_back_in_part_or_is_within_the_spread() -> None:
    assert won_back(Spread((0.8,)), Spread((0.4,)), Spread((0.5,))) == pytest.approx(0.25)
    assert math.isnan(won_back(Spread((0.4,)), Spread((0.4,)), Spread((0.5,))))
    # Lower is better: the same rule.
    assert won_back(Spread((0.1,)), Spread((0.3,)), Spread((0.2,))) == pytest.approx(0.5)
    table = Table(title="T", measure="accuracy", gap=("no noise", "noise", "refined"))
    rows_ = [_row(label, value, 0) for label, value in (("no noise", 0.8), ("noise", 0.4), ("refined", 0.6))]
    assert "| share of the gap won back | 50% of 0.400 |" in render_table(table, rows_)
    noisy = [*rows_, _row("noise", 1.6, 1)]
    assert "is no more than the seeds' spread" in render_table(table, noisy)
    assert "0.400 ± 0.849" not in render_table(table, rows_)


def test_what_refinement_gains_is_told_seed_by_seed() -> None:
    """Seeds differ by far more than refinement changes, and by as much in both."""
    rows_ = [_row("noise", 0.3, 0), _row("noise", 0.7, 1), _row("refined", 0.35, 0), _row("refined", 0.77, 1)]
    table = Table(title="T", measure="accuracy", gap=("no noise", "noise", "refined"))
    assert "| gain by refinement, seed by seed | +0.060 ± 0.014 |" in render_table(table, rows_)
    # A seed that only one of both has doesn't count.
    assert "seed by seed | +0.050 |" in render_table(table, rows_[:3])
    assert "seed by seed | – |" in render_table(table, rows_[:2])
    swapped = Table(title="T", measure="accuracy", gap=("no noise", "refined", "noise"))
    assert "seed by seed | -0.060 ± 0.014 |" in render_table(swapped, rows_)


@pytest.mark.parametrize(("step", "told"), [("tuned", "–"), ("pool-1", "–"), ("votes-1", "+0.050")])
def test_rows_of_another_adapter_or_pool_tell_no_gain(step: str, told: str) -> None:
    """Two machines draw other noise for one seed; between their rows votes aren't the only difference."""
    results = {"tuned": "aa", "pool-1": "bb"}
    noisy = _row("noise", 0.3, 0).model_copy(update={"results": results})
    refined = _row("refined", 0.35, 0).model_copy(update={"results": {**results, step: "cc"}})
    table = Table(title="T", measure="accuracy", gap=("no noise", "noise", "refined"))
    assert f"| gain by refinement, seed by seed | {told} |" in render_table(table, [noisy, refined])


@pytest.mark.parametrize(("measure", "better", "worse"), [("accuracy", 0.8, 0.4), ("Fréchet distance", 0.1, 0.3)])
def test_where_noise_costs_nothing_there_is_no_share_of_it(measure: str, better: float, worse: float) -> None:
    table = Table(title="T", measure=measure, gap=("no noise", "noise", "refined"))

    def shown(no_noise: float, noise: float) -> str:
        values = {"no noise": no_noise, "noise": noise, "refined": better}
        return render_table(table, [_row(label, value, 0, measure=measure) for label, value in values.items()])

    assert f"| share of the gap won back | 100% of {abs(better - worse):.3f} |" in shown(better, worse)
    assert "what noise costs, -" in shown(worse, better)


def test_rows_that_a_grid_varies_are_columns_or_rows_of_their_own() -> None:
    rows_ = [_row("pool", 0.1 * size, 0, size) for size in (1, 2, 3)]
    assert list(entries_of(Table(title="T", measure="accuracy"), rows_)) == [f"pool (size={n})" for n in (1, 2, 3)]
    table = Table(title="T", measure="accuracy", columns="study.pool.size")
    assert list(entries_of(table, rows_)) == ["pool"]
    assert "| pool | 0.100 | 0.200 | 0.300 |" in render_table(table, rows_)
    # Numbers from the least up, whichever cell came first: a plot joins them by a line.
    assert render_table(table, rows_[::-1]) == render_table(table, rows_)


def test_a_plot_has_a_line_for_every_row_and_is_the_same_twice() -> None:
    experiment = Experiment.model_validate(
        {
            "name": "e", "title": "E", "codes": CODES.model_dump(), "data": {"file": "f"},
            "models": {"m": {"base": "b"}},
            "settings": {"study": {"privacy": {"epsilon": 1.0, "delta": 1e-3}}},
            "grid": [{"label": "pool", "study.pool.size": [2, 3]}],
            "tables": [
                {"title": "By size", "measure": "accuracy", "columns": "study.pool.size"},
                {"title": "Bars", "measure": "accuracy"},
            ],
        }
    )  # fmt: skip
    rows_ = [_row("pool", 0.1 * size + seed, seed, size) for size in (2, 3) for seed in (0, 1)]
    drawn = svg(experiment, rows_)
    assert drawn == svg(experiment, rows_)
    for words in (b"By size", b"Bars", b"pool (size=2)", b"accuracy"):
        assert words in drawn
    assert b"<svg" in svg(experiment, [])


@pytest.mark.parametrize(("columns", "line"), [((2, 3), "-"), (("IID", "hospitals"), "None")])
def test_a_line_joins_only_columns_that_have_an_order(columns: tuple[Any, Any], line: str) -> None:
    rows_ = [
        _row(label, 0.5, 0).model_copy(update={"settings": {"partition.name": column}})
        for label in ("noise", "refined")
        for column in columns
    ]
    axes = Figure().add_subplot()
    draw_points(axes, Table(title="T", measure="accuracy", columns="partition.name"), rows_)
    points = [container.lines[0] for container in axes.containers]
    assert [found.get_linestyle() for found in points] == [line, line]
    # Without a line they stand beside each other, or one would hide the other.
    assert (list(points[0].get_xdata()) == list(points[1].get_xdata())) is (line == "-")
    assert axes.get_xlabel() == "partition"


def test_a_place_in_a_package_is_found_or_told(tmp_path: Path) -> None:
    assert folder_of("package:numpy/linalg").name == "linalg"
    assert folder_of(str(tmp_path)) == tmp_path
    assert embedder_of("wordllama") == "wordllama"
    assert embedder_of("sentence-transformers:package:numpy/linalg").endswith("numpy/linalg")
    with pytest.raises(ModelError, match="isn't installed"):
        folder_of("package:no-such-package/x")
    with pytest.raises(ModelError, match="isn't a folder"):
        folder_of("package:numpy/no-such-place")


def test_durations_are_said_as_people_do() -> None:
    assert [in_words(s) for s in (3.2, 89, 600, 7200)] == ["3 s", "89 s", "10 min", "2.0 h"]


def test_loggers_are_as_they_were_after_an_experiment() -> None:
    """Or the site's log would be silent in whatever runs next in this process, a search for leaks in it included."""
    loggers = [logging.getLogger(name) for name in (NAME, "flwr", "sentence_transformers")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]

    def a_failing_step() -> None:
        with quiet():
            assert not logging.getLogger(f"{NAME}.site").isEnabledFor(logging.INFO)
            raise UserError("a step that fails")

    with pytest.raises(UserError):
        a_failing_step()
    assert [(logger.level, logger.handlers) for logger in loggers] == before
