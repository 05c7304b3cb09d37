"""Sections on the sites: what privacy costs, what left them, and what training did."""

from __future__ import annotations

import math

from common.privacy.accounting import StrongPlan
from server.html_report import site_charts
from server.html_report.canvas import draw
from server.html_report.costs import cost_lines, released_epsilon
from server.html_report.material import Material
from server.html_report.releases import DRAWN_SITES, Release, grid, releases
from server.html_report.view import Block, Column, Figure, Key, Section, Table, Words
from server.html_report.words import count, listed, number, several, share, size
from server.report import at_most
from server.summary import SiteSummary

TABLE_SITES = 500
TABLE_ROUNDS = 100
TABLE_RELEASES = 1500


def privacy(material: Material) -> Section:
    """The promise in plain words, and how each site's cost builds up."""
    summary, study = material.summary, material.study
    unit = summary.unit
    lead = (
        f"Seeing everything that left a site moves the odds on whether any one {unit} was there by a factor of e^ε at "
        f"most, which is {_factor(summary.epsilon)} for ε = {at_most(summary.epsilon)}, except with a probability of "
        f"δ = {number(summary.delta)}."
    )
    blocks: list[Block] = [Words(_promise_in_words(material))]
    lines = cost_lines(material)
    if lines:
        ends = [f"{line.who} ε = {at_most(line.points[-1][1])}" for line in lines]
        reading = f"Everything that the study asks costs {listed(ends)} at most."
        if study.privacy.epsilon is not None:
            reading += f" The study allows {number(study.privacy.epsilon)}."
        has_votes = any(step > study.training.rounds for line in lines for step, _ in line.points)
        colours = site_charts.legend_colours(lines)
        legend = [Key("line", colours[line.words], line.words) for line in lines]
        if study.privacy.epsilon is not None:
            legend.append(Key("dashes", "ink", "what the study allows"))
        rounds = study.training.rounds
        blocks.append(
            Figure(
                name="cost",
                title="Privacy cost over the study",
                drawing=draw(
                    "cost", "Privacy cost of a site over the study", reading,
                    lambda wide: site_charts.cost(lines, study.privacy.epsilon, rounds, has_votes, wide),
                ),
                reading=reading,
                legend=legend,
                table=Table(
                    caption="ε of a site's releases so far, by round",
                    columns=(Column("sites"), Column("after"), Column("ε at most", True)),
                    rows=[
                        (line.words, "the vote" if step > rounds else f"round {step}", at_most(epsilon))
                        for line in lines
                        for step, epsilon in line.points
                        if step and epsilon
                    ],
                ),
            )
        )  # fmt: skip
    blocks.append(_site_table(material))
    return Section("privacy", "Privacy", "Privacy", lead, blocks)


def what_left(material: Material) -> Section:
    """Every release of every site."""
    found = releases(material)
    rows, columns = grid(material)
    lead = (
        "All that ever left a site and depends on its documents. Each of these was noised at the site, by the site; no "
        "count, loss or text left it. σ is the noise on each count or candidate, and on the sum of the gradients of "
        "each training step, which are clipped to C."
    )
    known = [r.octets for r in found if r.octets is not None]
    total = sum(known) if len(known) == len(found) else 0
    givers = {r.site for r in found}
    silent = [s.name for s in material.summary.sites if s.name not in givers]
    reading = f"{several(len(givers), 'site')} gave {several(sum(r.answers for r in found), 'noisy vector')}" + (
        f", {size(total)} of numbers in all." if total else "."
    )
    if silent:
        reading += f" Nothing came from {listed(silent)}."
    if len(material.summary.sites) > DRAWN_SITES:
        sites = count(len(material.summary.sites))
        reading += f" Drawn are {count(len(rows))} of {sites} sites; those with gaps have precedence."
    legend = [Key("dot", "amber", "noisy counts: profile, ballot"), Key("dot", "blue", "noisy adapter")]
    if any(cell not in (None, 0.0, 1.0) for row in rows for cell in row.cells):
        legend.append(Key("ring", "blue", "in some of these rounds"))
    if any(cell == 0 for row in rows for cell in row.cells):
        legend.append(Key("ring", "grey", "asked in vain"))
    blocks: list[Block] = []
    if rows:
        blocks.append(
            Figure(
                name="releases",
                title="What left each site, and when",
                drawing=draw(
                    "releases", "What left each site", reading,
                    lambda wide: site_charts.releases(rows, columns, wide),
                ),
                reading=reading,
                legend=legend,
            )
        )  # fmt: skip
    blocks += [_release_table(found), Words(_besides(material))]
    return Section("releases", "What left each site", "What left", lead, blocks)


def training(material: Material) -> Section:
    """The rounds of phase 1."""
    reports, study = material.summary.rounds, material.study
    title = "Training rounds"
    if not reports:
        return Section("training", title, "Training", "", [Words("No training round is on record.")])
    each = "one round" if len(reports) == 1 else f"each of {count(len(reports))} rounds"
    lead = (
        f"In {each} the strong sites trained the adapter on their own documents, with noise on every step, and the "
        f"coordinator combined what they sent ({study.training.aggregation}, {study.training.server.optimizer})."
    )
    fewest = min(reports, key=lambda r: len(r.updates))
    most = max(report.signal_to_noise for report in reports)
    shared = [report.shared for report in reports if report.shared is not None]
    reading = (
        f"A round's signal was at most {number(most, 2)} times its noise"
        + (f", and the sites' changes have {share(max(shared[-1], 0.0))} in common in the last round" if shared else "")
        + f"; at the least {several(len(fewest.updates), 'site')} answered a round."
    )
    if len(reports) > site_charts.DRAWN_ROUNDS:
        reading += f" {count(site_charts.DRAWN_ROUNDS)} rounds are drawn, at even distances."
    figure = Figure(
        name="updates",
        title="How far each site moved the adapter",
        drawing=draw(
            "updates", "Norm of each site's change of the adapter, by round", reading,
            lambda wide: site_charts.updates(reports, wide),
        ),
        reading=reading,
        legend=(
            Key("tick", "blue", "changes of 9 sites of 10")
            if site_charts.has_many_sites(reports)
            else Key("ring", "blue", "a site's change"),
            Key("line", "ink", "mean of the sites"),
        ),
        table=_round_table(material),
    )  # fmt: skip
    return Section("training", title, "Training", lead, [figure])


def _promise_in_words(material: Material) -> str:
    summary = material.summary
    guess = _best_guess(summary.epsilon, summary.delta)
    return (
        f"In other words: somebody who thinks it is even whether a {summary.unit} was at a site, and who knows all the "
        f"others, could be right about it in at most {guess} of cases after seeing everything. This is the worst that "
        "the accounting allows, not what an attack has reached. It is the corpus' guarantee for a person whose "
        "documents are at one site; for a person at several sites the guarantees add up. Making more texts from this "
        "run costs nothing more."
    )


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up, of epsilon as the page shows it."""
    if epsilon > math.log(1e12):
        return "no limit worth the name"
    factor = math.exp(float(at_most(epsilon)))
    return count(math.ceil(factor)) if factor > 100 else number(math.ceil(factor * 100) / 100)


def _best_guess(epsilon: float, delta: float) -> str:
    """Accuracy of the best test of two equally likely hypotheses, rounded up."""
    if not math.isfinite(epsilon):
        return "100\u00a0%"
    # (e^eps + delta) / (1 + e^eps), written so that nothing overflows.
    accuracy = 1 - (1 - min(delta, 1.0)) * math.exp(-epsilon) / (1 + math.exp(-epsilon))
    return f"{min(math.ceil(accuracy * 1e4 - 1e-9) / 100, 100):g}\u00a0%"


def _site_table(material: Material) -> Table:
    sites = material.summary.sites
    shown = sites[:TABLE_SITES]
    caption = "ε and δ of each site"
    if len(sites) > len(shown):
        caption += f" (the first {count(len(shown))} of {count(len(sites))}; all are in summary.json)"
    return Table(
        caption=caption,
        columns=(
            Column("site"), Column("tier"), Column("size class", True), Column("answers", True), Column("outcome"),
            Column("noise"), Column("ε of its answers", True), Column("ε of all asked", True), Column("δ", True),
        ),
        rows=[
            (
                site.name, site.tier, count(site.size_class), count(site.answers), site.outcome, _noise(material, site),
                _or_dash(released_epsilon(material, site)), _or_dash(site.epsilon),
                "–" if site.delta is None else number(site.delta),
            )
            for site in shown
        ],
        folded=False,
    )  # fmt: skip


def _noise(material: Material, site: SiteSummary) -> str:
    plan = material.plan(site)
    if plan is None:
        return "–"
    if isinstance(plan, StrongPlan):
        return f"σ = {number(plan.training.noise_multiplier)} C, q = {number(plan.training.sample_rate)}"
    return f"σ = {number(plan.votes.scale)} votes"


def _or_dash(epsilon: float | None) -> str:
    return "–" if epsilon is None else at_most(epsilon)


def _release_table(found: list[Release]) -> Table:
    caption = "Every release"
    if len(found) > TABLE_RELEASES:
        caption = f"Releases (the first {count(TABLE_RELEASES)} of {count(len(found))} rows)"
    return Table(
        caption=caption,
        columns=(
            Column("site"), Column("tier"), Column("what"), Column("when"), Column("numbers", True),
            Column("bytes", True), Column("noise on them"),
        ),
        rows=[
            (
                r.site, r.tier, r.what, r.when, count(r.numbers) if r.octets is not None else "–",
                "–" if r.octets is None else size(r.octets), r.noise,
            )
            for r in found[:TABLE_RELEASES]
        ],
        folded=False,
    )  # fmt: skip


def _besides(material: Material) -> str:
    return (
        "Besides, each site told its name, tier, declared size class, software version, and the head of its ledger: "
        f"nothing of its documents. An answer that came too late, or that {material.study.name}'s coordinator couldn't "
        "read, isn't in this table; the record that counts is the site's own ledger, which 'fedcorpus verify' checks "
        "this run against."
    )


def _round_table(material: Material) -> Table:
    reports = material.summary.rounds
    shown = reports[-TABLE_ROUNDS:]
    caption = "Training rounds"
    if len(shown) < len(reports):
        caption += f" (the last {count(len(shown))} of {count(len(reports))}; all are in summary.json)"
    rows = []
    for report in shown:
        norms = [update.norm for update in report.updates]
        rows.append(
            (
                count(report.round), count(len(norms)), f"≤ {number(report.signal_to_noise, 2)}",
                "–" if report.shared is None else share(report.shared),
                number(min(norms, default=0.0)), number(max(norms, default=0.0)),
            )
        )  # fmt: skip
    return Table(
        caption=caption,
        columns=(
            Column("round", True), Column("sites", True), Column("signal / noise", True), Column("in common", True),
            Column("smallest change", True), Column("largest change", True),
        ),
        rows=rows,
    )  # fmt: skip
