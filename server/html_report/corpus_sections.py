"""Sections on the corpus: what was asked and what came, proportions, votes, quality, and its texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from server.html_report import code_charts
from server.html_report.canvas import draw
from server.html_report.codes import BAND, SHOWN, CodeRow, VoteRow, code_rows, summed_votes, vote_rows
from server.html_report.material import Material
from server.html_report.samples import browser
from server.html_report.site_charts import quality as quality_chart
from server.html_report.view import Block, Column, Figure, Key, Section, Table, Words
from server.html_report.words import count, listed, number, several, share
from server.report import at_most
from server.sizes import votes_tell_sizes

BY_CHANCE = 0.023
"""Share of pure noise that is more than two standard deviations above nothing."""


def asked_and_came(material: Material) -> Section:
    """What the study asked for, in words, and what came of it, code by code."""
    rows, rest, total = code_rows(material)
    blocks: list[Block] = [Words(_study_in_words(material)), Words(_origin(material, total))]
    keys = (
        (total.chosen, Key("bar", "blue", "chosen by the votes" if material.ballots else "from the pool")),
        (total.fresh, Key("bar", "amber", "generated after the vote")),
        (total.repeated, Key("bar", "plum", "repeats")),
        (total.missing, Key("hole", "ink", "missing")),
    )
    reading = _composition_reading(rows, rest, total)
    blocks.append(
        Figure(
            name="composition",
            title="Where each code's texts come from",
            drawing=draw(
                "composition", "Where each code's texts come from", reading,
                lambda wide: code_charts.composition(rows, rest, wide),
            ),
            reading=reading,
            legend=[key for there, key in keys if there],
            table=_code_table(rows, rest, total),
        )
    )  # fmt: skip
    return Section("asked", "What was asked and what came", "Asked and came", "", blocks)


def proportions(material: Material) -> Section:
    """Share of each code as wanted and as made, and how sure the profile is."""
    rows, rest, _ = code_rows(material)
    off = max((abs(row.share_made - row.share_wanted) for row in rows), default=0.0)
    width = max((row.share_high - row.share_low for row in rows), default=0.0) / 2
    reading = (
        f"Made and wanted differ by at most {share(off)} of the corpus" if off else "What was made is what was wanted"
    ) + f"; the noise leaves up to ±{share(width)} of the corpus open about what the sites really hold."
    if not any(row.size > 0 for row in rows):
        reading = "No code's noisy size is above zero, so all codes share alike: the sites' answers say nothing here."
    table = Table(
        caption="Share of the corpus by code, and the noisy size it follows",
        columns=(
            Column("code"), Column("noisy profile", True), Column("noisy size", True), Column("its noise, ±2σ", True),
            Column("wanted", True), Column("made", True), Column("lowest", True), Column("highest", True),
        ),
        rows=[
            (
                row.name, count(row.profile), count(row.size), f"±{number(BAND * row.size_noise)}",
                share(row.share_wanted), share(row.share_made), share(row.share_low), share(row.share_high),
            )
            for row in [*rows, *([rest] if rest else [])]
        ],
    )  # fmt: skip
    unit = material.summary.unit
    lead = (
        f"Every site counted its {unit}s under each code and added noise before it told; the sum of these profiles "
        "says how much of the corpus each code gets. A negative size gets nothing."
    )
    if material.ballots and votes_tell_sizes(material.study):
        lead += f" Votes tell a code's {unit}s a second time; both are averaged by how little noise they have."
    figure = Figure(
        name="proportions",
        title="Proportions, wanted and made",
        drawing=draw(
            "proportions", "Share of the corpus by code, wanted and made", reading,
            lambda wide: code_charts.proportions(rows, rest, wide),
        ),
        reading=reading,
        legend=(
            Key("bar", "blue", "made"), Key("tick", "ink", "wanted"),
            Key("band", "band", "what the noise leaves open (±2σ)"),
        ),
        table=table,
    )  # fmt: skip
    return Section("proportions", "Code proportions, wanted and made", "Proportions", lead, [figure])


def votes(material: Material) -> Section:
    """Each candidate's noisy votes, and how much of them isn't noise."""
    title, short = "Votes and their noise", "Votes"
    if not material.ballots or not material.pool_codes.size:
        words = (
            "No site voted, so nothing ranks the candidates: they entered the corpus evenly, as they were generated."
        )
        return Section("votes", title, short, "", [Words(words)])
    codes, _, _ = code_rows(material)
    rows = vote_rows(material, [row.index for row in codes])
    noise, every = material.vote_noise, summed_votes(material)
    standing = int((every > BAND * noise).sum())
    drawn, total = len(rows), len({*material.pool_codes.tolist()})
    lead = (
        f"{several(len(material.ballots), 'site')} cast at most {several(material.study.votes_per_unit, 'vote')} a "
        f"{material.summary.unit} for the candidates nearest to their texts, and added noise. Together the noise on "
        f"one candidate has σ = {number(noise)} votes; within ±{number(BAND * noise)} a count can't be told from none."
    )
    if material.summary.selection == "uniform":
        lead += " This study ignores them: it draws evenly."
    first = (
        f"{count(standing)} of {several(every.size, 'candidate')} stand out from the noise; by chance alone about "
        f"{count(BY_CHANCE * every.size)} would."
    )
    if drawn < total:
        first += f" Drawn are the {count(drawn)} largest codes of {count(total)}."
    known = [row for row in rows if not math.isnan(row.spread)]
    beyond = [row for row in known if row.spread > row.spread_by_chance]
    second = (
        f"In {count(len(beyond))} of {several(len(known), 'code')} the candidates differ by more than noise explains"
        + (f", most in {max(beyond, key=lambda r: r.spread).name}." if beyond else ": the votes hardly choose.")
    )
    figures: list[Block] = [
        Figure(
            name="votes",
            title="Votes on every candidate",
            drawing=draw(
                "votes", "Noisy votes on every candidate, by code", first,
                lambda wide: code_charts.votes(rows, noise, wide),
            ),
            reading=first,
            legend=(
                Key("tick", "blue", "a candidate that stands out"), Key("tick", "grey", "a candidate within the noise"),
                Key("band", "band", "noise band, ±2σ"),
            ),
            table=_vote_table(rows),
        ),
        Figure(
            name="signal",
            title="Signal to noise of the votes",
            drawing=draw(
                "signal", "How much the candidates of a code differ, over the noise", second,
                lambda wide: code_charts.signal(rows, wide),
            ),
            reading=second,
            legend=(
                Key("dot", "blue", "more than noise explains"), Key("ring", "grey", "no more than that"),
                Key("band", "band", "what noise alone stays below, 19 times of 20"),
            ),
        ),
    ]  # fmt: skip
    return Section("votes", title, short, lead, figures)


def quality(material: Material) -> Section:
    """Numbers of an evaluation, if there was one."""
    title = "Quality of the corpus"
    found = material.quality
    if found is None or not found.numbers:
        words = (
            "Nothing was evaluated yet, so this report says nothing about how useful or how close to the real text the "
            "corpus is. 'fedcorpus evaluate' measures it; 'fedcorpus report' then shows here what it found."
        )
        return Section("quality", title, "Quality", "", [Words(words)])
    within = [n for n in found.numbers if 0 <= n.share(n.value) <= 1]
    best = max(found.numbers, key=lambda n: n.share(n.value))
    reading = (
        f"{count(len(found.numbers))} numbers, each between the bad and the good end of its own range; nearest to the "
        f"good end is {best.name}."
    )
    if len(within) < len(found.numbers):
        reading += f" {several(len(found.numbers) - len(within), 'lies', 'lie')} beyond its range, drawn at the edge."
    table = Table(
        caption="Quality numbers with floor, ceiling and direction",
        columns=(
            Column("number"), Column("value", True), Column("interval, 95 %", True), Column("floor", True),
            Column("ceiling", True), Column("better"), Column("note"),
        ),
        rows=[
            (
                n.name, number(n.value),
                "–" if n.low is None or n.high is None else f"{number(n.low)} to {number(n.high)}",
                number(n.floor), number(n.ceiling), n.direction, n.note,
            )
            for n in found.numbers
        ],
        folded=False,
    )  # fmt: skip
    figure = Figure(
        name="quality",
        title="Where each number is in its range",
        drawing=draw("quality", title, reading, lambda wide: quality_chart(found.numbers[:SHOWN], wide)),
        reading=reading,
        legend=(
            Key("dot", "blue", "value"),
            Key("line", "blue", "its interval"),
            Key("band", "band", "floor to ceiling"),
        ),
        table=table,
    )
    return Section("quality", title, "Quality", found.note, [figure])


def texts(material: Material) -> Section:
    """The browser."""
    lead = (
        "Synthetic texts, exactly as they are in the corpus. A character that can't be seen, or that would move "
        "others, is shown by its number."
    )
    return Section("samples", "Samples", "Samples", lead, [browser(material)])


def _study_in_words(material: Material) -> str:
    study, summary = material.study, material.summary
    strong = sum(site.tier == "strong" and site.epsilon is not None for site in summary.sites)
    weak = sum(site.tier == "weak" and site.epsilon is not None for site in summary.sites)
    trained = (
        f"{several(strong, 'strong site')} fine-tuned {study.generator.base} over "
        f"{several(study.training.rounds, 'round')} of {several(study.training.steps, 'DP-SGD step')} (LoRA, rank "
        f"{study.generator.rank})"
    )
    voted = f"; {several(weak, 'weak site')} voted once on {several(summary.pool_size, 'candidate')}" if weak else ""
    return (
        f"Study {study.name} asked for {several(study.corpus.size, 'text')} under "
        f"{several(len(study.codes), 'control code')} ({listed(list(study.codes.names))}). {trained}{voted}. It "
        f"promises every site ε = {at_most(summary.epsilon)} at δ = {number(summary.delta)} for each {summary.unit}."
    )


def _origin(material: Material, total: CodeRow) -> str:
    how = "chosen by the votes" if material.ballots else "taken from the pool evenly"
    parts = [f"{several(total.chosen, 'text')} were {how}", f"{count(total.fresh)} generated afterwards"]
    if total.repeated:
        parts.append(f"{count(total.repeated)} are repeats, where the generator had no more to give")
    missing = f" {several(total.missing, 'text is', 'texts are')} missing." if total.missing else " None is missing."
    return f"{several(total.made, 'text')} came: {listed(parts)}.{missing}"


def _composition_reading(rows: Sequence[CodeRow], rest: CodeRow | None, total: CodeRow) -> str:
    if not total.made:
        return "No text was made."
    if total.missing:
        holes = [row.name for row in rows if row.missing]
        where = f" in {listed(holes)}" if holes else ""
        reading = (
            f"{count(total.made)} of {several(total.wanted, 'text')} were made; {count(total.missing)} are "
            f"missing{where}."
        )
    elif total.repeated:
        reading = f"Every quota is filled, {share(total.repeated / total.made)} of the corpus with repeats."
    elif total.fresh:
        reading = f"Every quota is filled, {share(total.fresh / total.made)} of the corpus with texts nobody voted on."
    else:
        reading = f"Every quota is filled with candidates; the largest code, {rows[0].name}, has {count(rows[0].made)}."
    if rest:
        reading += f" Drawn are the {count(len(rows))} largest codes; {count(rest.of)} more are only counted."
    return reading


def _code_table(rows: Sequence[CodeRow], rest: CodeRow | None, total: CodeRow) -> Table:
    names = ("wanted", "made", "chosen", "fresh", "repeated", "missing")
    return Table(
        caption="Texts by code",
        columns=(Column("code"), *(Column(name, True) for name in names)),
        rows=[
            (row.name, *(count(getattr(row, name)) for name in names))
            for row in [*rows, *([rest] if rest else []), total]
        ],
        last_is_total=True,
    )


def _vote_table(rows: Sequence[VoteRow]) -> Table:
    return Table(
        caption="Noisy votes by code",
        columns=(
            Column("code"), Column("candidates", True), Column("votes", True), Column("their sum / its noise", True),
            Column("most", True), Column("stand out", True), Column("by chance", True), Column("differ / noise", True),
            Column("noise stays below", True),
        ),
        rows=[
            (
                row.name, count(row.sorted_votes.size), count(float(row.sorted_votes.sum())), number(row.total),
                count(float(row.sorted_votes[0])), count(row.standing_out),
                number(BY_CHANCE * row.sorted_votes.size, 2), _or_dash(row.spread), _or_dash(row.spread_by_chance),
            )
            for row in rows
        ],
    )  # fmt: skip


def _or_dash(value: float) -> str:
    return "–" if math.isnan(value) else number(value, 2)
