"""A bundle, and its verification, for people."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.bundle.files import MANIFEST, Facts
from server.bundle.verify import BundleVerification
from server.markdown import printable
from server.report import at_most

_SIGNATURES = {
    "trusted": "Signed by the key that was given.",
    "own": "Signed by the key in the bundle. This shows that nothing was changed since, not who signed: compare the "
    "fingerprint with one that the publisher gave you by another way, or give --key.",
    "none": "Not signed: nothing shows who made it.",
    "wrong": "The signature is WRONG or can't be read.",
}


def render_release(facts: Facts, out: Path, console: Console) -> None:
    """Say what was written, and what a coordinator should do next."""
    lines = [
        f"{facts.texts} texts written to {out}",
        *([f"{sum(facts.missing.values())} texts are missing; the card says which"] if facts.missing else []),
        *([f"signed by the key of fingerprint {facts.signing_key}"] if facts.signing_key else ["not signed"]),
        *(["no licence is named; --license NAME names one"] if facts.license == "unknown" else []),
        f"check: fedcorpus verify {out}, or sha256sum --check {MANIFEST} in it",
    ]
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)


def render_bundle_verification(verification: BundleVerification, console: Console) -> None:
    """Print whose signature it is, the accountants' figures, every problem, and whether the claim holds."""
    if verification.title:
        console.print(Text(printable(f"{verification.title}: {verification.texts} texts"), style="bold"))
    console.print(Text(_SIGNATURES[verification.signature]), soft_wrap=True)
    if verification.signing_key:
        console.print(Text(f"Fingerprint of the key: {verification.signing_key}"), soft_wrap=True)
    if verification.tiers:
        console.print(_tier_table(verification))
    if verification.sites:
        console.print(_site_table(verification))
    for problem in verification.problems:
        console.print(Text(printable(problem), style="red"), soft_wrap=True)
    if verification.claimed_epsilon is not None and verification.claimed_delta is not None:
        promise = f"({at_most(verification.claimed_epsilon)}, {verification.claimed_delta:g})"
        console.print(
            Text(
                f"The corpus claims {promise}-DP for adding or removing one {verification.unit} of a person whose "
                "documents are at one site."
            ),
            soft_wrap=True,
        )
    console.print(_verdict(verification), soft_wrap=True)


def _verdict(verification: BundleVerification) -> Text:
    if not verification.holds:
        return Text("The claim is NOT confirmed.", style="bold red")
    if verification.sites:
        return Text("The claim HOLDS, by the study and by the sites' ledgers.", style="bold green")
    return Text(
        "The bundle is whole and its claim is what the study gives. Whether the sites kept to it, only their ledgers "
        "show.",
        style="bold green",
    )


def _tier_table(verification: BundleVerification) -> Table:
    table = _table("ε of a site by its study", ("tier", "sites", "claimed", "second", "δ"))
    for tier in verification.tiers:
        second = "-" if tier.second is None else at_most(tier.second)
        table.add_row(tier.tier, str(tier.sites), at_most(tier.claimed), second, f"{tier.delta:g}")
    return table


def _site_table(verification: BundleVerification) -> Table:
    table = _table("ε of each site by its own ledger", ("site", "tier", "first", "second", "answers", "verdict"))
    for site in verification.sites:
        table.add_row(
            Text(printable(site.site)),
            Text(printable(site.tier)),
            "-" if site.accountant is None else at_most(site.accountant),
            "-" if site.second is None else at_most(site.second),
            str(site.releases),
            Text("NOT confirmed", style="red") if site.problem else Text("confirmed", style="green"),
        )
    return table


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
