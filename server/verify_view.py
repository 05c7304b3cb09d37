"""A verification for people."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.report import at_most
from server.verify import Verification


def render_verification(verification: Verification, console: Console) -> None:
    """Print the accountants' figures site by site, and whether the claim holds."""
    table = Table(
        title=f"ε of each site at δ={verification.claimed_delta:g}, from its own ledger and by two accountants",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("site", "tier", "claimed", "first", "second", "answers", "verdict"):
        table.add_column(heading, overflow="fold")
    for site in verification.sites:
        table.add_row(
            Text(site.site),
            Text(site.tier),
            _up(site.claimed),
            _up(site.accountant),
            _up(site.second),
            str(site.releases),
            Text("NOT confirmed", style="red") if site.problem else Text("confirmed", style="green"),
        )
    console.print(table)
    for site in verification.sites:
        if site.problem:
            console.print(Text(f"{site.site}: {site.problem}"), soft_wrap=True)
    claim = (
        f"The corpus claims ({_up(verification.claimed_epsilon)}, {verification.claimed_delta:g})-DP for adding or "
        f"removing one {verification.unit} of a person whose documents are at one site."
    )
    verdict = "The claim HOLDS." if verification.holds else "The claim is NOT confirmed."
    console.print(Text(claim), soft_wrap=True)
    console.print(Text(verdict, style="bold green" if verification.holds else "bold red"))


def _up(epsilon: float | None) -> str:
    return "-" if epsilon is None else at_most(epsilon)
