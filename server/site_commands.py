"""``fedcorpus site …``: what a hospital's operator runs. Prints to this machine's screen only; nothing travels."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from common.site.config import Site
    from common.site.ledger import Ledger
    from common.study import Study

app = typer.Typer(no_args_is_help=True, help="What a hospital runs.")

screen = Console()
messages = Console(stderr=True)

SiteFile = Annotated[Path, typer.Argument(help="Your site file (site.toml).", show_default=False)]
RunName = Annotated[str, typer.Argument(help="The run's name, or its first digits.", show_default=False)]
StudyHash = Annotated[str, typer.Argument(help="The study's SHA-256, or its first digits.", show_default=False)]
Person = Annotated[str | None, typer.Option("--by", help="Who decides. Default: the name you are logged in with.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


@app.command()
def check(
    site: SiteFile,
    study: Annotated[Path, typer.Option("--study", help="The study you were asked to join.")],
) -> None:
    """Read your documents, and at a strong site the model, as the study would, and say what is wrong."""
    from common.site.check import check_site
    from common.site.config import Site
    from common.site.policy import check_study
    from common.study import Study

    loaded, config = Study.load(study), Site.load(site)
    check_study(config, loaded)
    found = check_site(config, loaded)
    read = f"\n{_read_by_the_model(config, loaded)}" if config.tier == "strong" else ""
    screen.print(Text(f"site {config.name} ({config.tier})\n{found.report}{read}"), soft_wrap=True)


@app.command()
def budget(site: SiteFile, as_json: AsJson = False) -> None:
    """What was charged so far, run by run, and what the caps leave. Reads every stored release back."""
    from common.privacy.accounting import describe, joint_epsilon, renyi_budget, renyi_cost
    from common.site.config import Site
    from server.report import at_most

    config = Site.load(site)
    with _ledger(config) as ledger:
        ledger.verify(blobs=True)
        charges, spent = ledger.charges(config.documents.assets), ledger.spent(config.documents.assets)
        runs = ledger.runs()
        given = [ledger.given_out(run["site"], run["study"], run["run"]) for run in runs]
        closed = [ledger.is_closed(run["site"], run["study"], run["run"]) for run in runs]
    by_itself = [
        joint_epsilon(mechanisms, run["delta"]) if mechanisms else 0.0
        for mechanisms, run in zip(given, runs, strict=True)
    ]
    policy = config.policy
    order, allowed = renyi_budget(policy.max_epsilon, policy.max_delta)
    used = sum(renyi_cost(charge.mechanisms, order) for charge in charges)
    by_renyi = f"Renyi filter at order {order}: {used:.4g} of {allowed:.4g} used"
    if as_json:
        shown = {
            "site": config.name,
            "composition": policy.composition,
            "epsilon": {"spent": spent[0], "cap": policy.max_epsilon},
            "delta": {"spent": spent[1], "cap": policy.max_delta},
            "renyi": {"order": order, "spent": used, "cap": allowed},
            "charges": [{"mechanisms": [describe(m) for m in charge.mechanisms]} for charge in charges],
            "runs": [{**run, "epsilon_given_out": by_itself[i], "closed": closed[i]} for i, run in enumerate(runs)],
        }
        typer.echo(json.dumps(shown))
        return
    table = Table(
        title=f"Site {config.name}: charged on its data, for life",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("at", "run", "study", "site", "tier", "ε", "δ", "ε so far"):
        table.add_column(heading, overflow="fold")
    for run, out, ended in zip(runs, by_itself, closed, strict=True):
        at, epsilon, delta = run["at"][:16].replace("T", " "), at_most(run["epsilon"]), f"{run['delta']:g}"
        said = at_most(out) + (", closed" if ended else "")
        table.add_row(at, run["run"][:8], run["study"][:8], run["site"], run["tier"], epsilon, delta, said)
    screen.print(table)
    mark = {"basic": ("  <- your policy", ""), "renyi": ("", "  <- your policy")}[policy.composition]
    screen.print(
        Text(
            "ε so far: what a run has given out, by itself; the caps count the whole plan.\n"
            f"Added up: ε {at_most(spent[0])} of {policy.max_epsilon:g}, δ {spent[1]:g} of {policy.max_delta:g}"
            f"{mark[0]}\n{by_renyi}{mark[1]}"
        ),
        soft_wrap=True,
    )


@app.command()
def close(site: SiteFile, run: RunName, by: Person = None) -> None:
    """End a run at this site: it gets nothing new. A Renyi filter then counts what it got, not what was planned."""
    from common.site.config import Site

    config = Site.load(site)
    with _ledger(config) as ledger, ledger.exclusive():
        known = {r["run"]: r["study"] for r in ledger.runs() if r["site"] == config.name}
        name = _only_match(f"site {config.name!r}", run, list(known), "runs that were charged", "budget")
        ledger.close_run(config.name, known[name], name, by or getpass.getuser())
    screen.print(Text(f"closed: run {name}"), soft_wrap=True)


@app.command()
def export(
    site: SiteFile,
    out: Annotated[Path, typer.Option("--out", help="File to write (JSON).", show_default=False)],
) -> None:
    """Write your ledger for an auditor: every event, no released byte. Look at it before you hand it out."""
    from common.errors import UserError
    from common.site.config import Site

    config = Site.load(site)
    if out.exists():
        raise UserError(f"{out}: exists already; name a new file")
    if not out.parent.is_dir():
        raise UserError(f"{out}: its folder isn't there")
    with _ledger(config) as ledger:
        ledger.verify(blobs=True)
        exported = ledger.export(config.name)
    out.write_text(json.dumps(exported, indent=1), encoding="utf-8")
    screen.print(Text(f"{len(exported['events'])} events written to {out}"), soft_wrap=True)


@app.command("audit")
def audit_corpus(
    corpus: Annotated[
        Path, typer.Argument(help="A corpus (Parquet, JSON lines, CSV), or the folder of a bundle.", show_default=False)
    ],
    site: Annotated[Path, typer.Option("--site", help="Your site file.")] = Path("site.toml"),
    study: Annotated[
        Path | None,
        typer.Option("--study", help="The study: only documents that it uses count. Default: all of your file."),
    ] = None,
    holdout: Annotated[
        Path | None,
        typer.Option("--holdout", help="Documents that had no part in the study, in a file like your own."),
    ] = None,
    texts: Annotated[
        bool | None,
        typer.Option(
            "--texts/--no-texts",
            help="Print what the corpus shares with your documents: text of theirs. Default: on a terminal only.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="New file for the result (JSON, no texts), which only you can read.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look for copies of your documents in a corpus, before it is published. Exit code 1: look at what was found."""
    from common.errors import ExitCode
    from server.site_audit import audit, check_new, write_private
    from server.site_audit_view import render_leak_check

    if out:
        check_new(out)
    found = audit(corpus, site, study, holdout, messages)
    if out:
        write_private(out, found.model_dump_json(indent=1))
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        render_leak_check(found, screen, texts=screen.is_terminal if texts is None else texts)
    if found.findings:
        raise typer.Exit(int(ExitCode.FAILED))


@app.command()
def pending(site: SiteFile) -> None:
    """Studies that wait for a person of this site."""
    from common.site.config import Site
    from common.site.plan import site_plan
    from server.report import at_most

    config = Site.load(site)
    with _ledger(config) as ledger:
        waiting = ledger.pending(config.name)
    if not waiting:
        screen.print(f"No study waits for a decision at site {config.name}.")
        return
    for study in waiting:
        plan = site_plan(study, config.tier, config.size_class)
        screen.print(
            Text(
                f"{study.sha256}  {study.name}: protects a {study.privacy.unit} with ε={at_most(plan.epsilon)}, δ="
                f"{plan.delta:g} at this site; {len(study.codes)} codes, generator {study.generator.base!r}"
            ),
            soft_wrap=True,
        )


@app.command()
def approve(site: SiteFile, study: StudyHash, by: Person = None) -> None:
    """Agree to a study that waits. It is noted in the ledger with your name."""
    _decide(site, study, "approved", by)


@app.command()
def decline(site: SiteFile, study: StudyHash, by: Person = None) -> None:
    """Decline a study, also one that was approved before."""
    _decide(site, study, "declined", by)


def _read_by_the_model(site: Site, study: Study) -> str:
    """How much of the documents the model takes, in words; for the operator's eyes only."""
    from common.models.generator import Generator
    from common.site.documents import Documents

    generator, documents = Generator(study.generator, site.models, site.machine.device), Documents.load(site, study)
    rooms = [generator.room(prompt) for prompt in generator.prompts(study.codes)]
    whole = generator.encode(documents.texts, [sys.maxsize] * len(documents))
    cut = sum(len(text) > rooms[code] for text, code in zip(whole, documents.codes, strict=True))
    return (
        f"the model is there, on {generator.device}; {cut} documents are longer than the {study.generator.max_tokens} "
        "tokens that it takes with their code, and are cut"
    )


def _ledger(site: Site) -> Ledger:
    """The site's ledger, if it has one: looking must not make one."""
    from common.errors import UserError
    from common.site.ledger import Ledger

    if not site.ledger_path.exists():
        raise UserError(f"{site.ledger_path}: site {site.name!r} has no ledger yet; the first question makes it")
    return Ledger.of(site)


def _decide(site: Path, digits: str, verdict: str, by: str | None) -> None:
    from common.site.config import Site

    config = Site.load(site)
    with _ledger(config) as ledger:
        known = ledger.asked(config.name)
        name = _only_match(f"site {config.name!r}", digits, known, "studies that were asked for", "pending")
        ledger.decide(config.name, name, "approved" if verdict == "approved" else "declined", by or getpass.getuser())
    screen.print(Text(f"{verdict}: {name}"), soft_wrap=True)


def _only_match(where: str, digits: str, known: list[str], what: str, command: str) -> str:
    """The one name that begins with ``digits``."""
    from common.errors import UserError

    matching = [name for name in known if digits and name.startswith(digits.lower())]
    if len(matching) != 1:
        raise UserError(
            f"{where}: {digits!r} names {len(matching)} of the {len(known)} {what}; the first digits of one are "
            f"needed, see 'fedcorpus site {command}'"
        )
    return matching[0]
