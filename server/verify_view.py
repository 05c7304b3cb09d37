"""A verification for people."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.verify import Verification


def render_verification(verification: Verification, console: Console) -> None:
    """Print the accountants' figures site by site, and whether the claim holds."""
    table = Table(title="Epsilon of each site, from its own ledger")
    for heading in ("site", "tier", "claimed", "accountant", "second", "δ", "answers", "verdict"):
        table.add_column(heading, overflow="fold")
    for site in verification.sites:
        table.add_row(
            Text(site.site),
            Text(site.tier),
            _up(site.claimed),
            _up(site.accountant),
            _up(site.second),
            "-" if site.delta is None else f"{site.delta:g}",
            str(site.releases),
            Text(site.problem or "confirmed", style="red" if site.problem else "green"),
        )
    console.print(table)
    claim = (
        f"The corpus claims ({_up(verification.claimed_epsilon)}, {verification.claimed_delta:g})-DP for adding or "
        f"removing one {verification.unit} of a person whose documents are at one site."
    )
    verdict = "The claim HOLDS." if verification.holds else "The claim is NOT confirmed."
    console.print(Text(claim), soft_wrap=True)
    console.print(Text(verdict, style="bold green" if verification.holds else "bold red"))


def _up(epsilon: float | None) -> str:
    """A bound is only ever rounded up."""
    return "-" if epsilon is None else f"{math.ceil(epsilon * 1000) / 1000:.3f}"
