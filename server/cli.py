"""The command line. Thin: reads options, calls the rooms that do the work, prints, and maps errors to exit codes."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from common.errors import ExitCode, FedcorpusError
from server.site_commands import app as site_app

if TYPE_CHECKING:
    from server.launch import Launch

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Hospitals publish one differentially private synthetic text corpus; no note leaves its hospital.",
)
app.add_typer(site_app, name="site")

_INTERRUPTED = 130

screen = Console()
messages = Console(stderr=True)

StudyFile = Annotated[Path, typer.Argument(help="The study (study.toml).", show_default=False)]
SitesFolder = Annotated[Path, typer.Option("--sites", help="Folder with one site file (*.toml) per hospital.")]
OutFolder = Annotated[
    Path | None, typer.Option("--out", help="New folder for the run. Default: fedcorpus-runs/STUDY-TIME.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
WeakEnvironment = Annotated[
    Path | None,
    typer.Option("--weak-env", help="Virtual environment that weak sites run in (needs no torch). Default: this one."),
]


def main() -> None:
    """Entry of the ``fedcorpus`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # An old terminal that can't show an epsilon must not lose the run's closing words.
            stream.reconfigure(errors="replace")
    # A terminated command ends its federation like an interrupted one; else SuperLink and sites would go on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # Typer returns the code of an Exit, and 130 for an interrupt, instead of raising.
        code = app(standalone_mode=False)
    except FedcorpusError as error:
        _end(str(error), int(error.exit_code))
    except (typer.Abort, KeyboardInterrupt):
        _end("stopped", int(ExitCode.FAILED))
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            _end(error.format_message(), int(ExitCode.USAGE))
        raise
    if code == _INTERRUPTED:
        _end("stopped", int(ExitCode.FAILED))
    sys.exit(code or 0)


@app.command()
def simulate(
    study: StudyFile,
    sites: SitesFolder = Path("sites"),
    out: OutFolder = None,
    as_json: AsJson = False,
) -> None:
    """Run a study with Flower's simulation engine: many sites in one process pool."""
    _launch(study, sites, out, "simulation", as_json, None)


@app.command()
def up(
    study: StudyFile,
    sites: SitesFolder = Path("sites"),
    out: OutFolder = None,
    weak_env: WeakEnvironment = None,
    as_json: AsJson = False,
) -> None:
    """Run a study as a real federation on this machine: SuperLink with TLS, one SuperNode process per site."""
    _launch(study, sites, out, "processes", as_json, weak_env)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was left unfinished.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its last finished round; nothing is asked of a site, or charged, twice."""
    from server.launch import prepare_resume

    _execute(prepare_resume(run), as_json)


@app.command()
def manifest(
    model: Annotated[
        str,
        typer.Argument(help="As in generator.base or voting.embedder of a study.", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """A model's files with their SHA-256, and their digest: what a study pins."""
    from common.models.embedder import is_embedder, manifest_of_embedder
    from common.models.manifest import manifest_of_base

    option = "voting.embedder_sha256" if is_embedder(model) else "generator.sha256"
    found = manifest_of_embedder(model) if is_embedder(model) else manifest_of_base(model)
    if as_json:
        typer.echo(json.dumps({"sha256": found.digest, "files": dict(found.files)}))
        return
    typer.echo(found.text, nl=False)
    messages.print(f'{option} = "{found.digest}"', markup=False, highlight=False, soft_wrap=True)


@app.command("embedder")
def convert_embedder(
    folder: Annotated[Path, typer.Argument(help="A model in sentence-transformers format.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="New folder for the embedder.", show_default=False)],
    int8: Annotated[
        bool, typer.Option("--int8", help="Store 8-bit integers: a quarter of the size, twice as fast, a little off.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make an ONNX embedder of a sentence-transformers model, which weak sites run without torch."""
    from server.onnx_export import export_embedder

    exported = export_embedder(folder, out, int8=int8)
    if as_json:
        typer.echo(json.dumps(asdict(exported)))
        return
    typer.echo(f'voting.embedder = "{exported.name}"\nvoting.embedder_sha256 = "{exported.digest}"')
    messages.print(f"least cosine with torch's vectors of a few texts: {exported.least_cosine:.4f}", highlight=False)


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Your own documents (Parquet, CSV, JSONL) instead of the reviews."),
    ] = None,
    site_column: Annotated[
        str | None, typer.Option("--site-column", help="Column of --data that names the hospital.")
    ] = None,
    code_column: Annotated[
        list[str] | None,
        typer.Option("--code-column", help="Column of --data whose values are control codes; may be repeated."),
    ] = None,
    text_column: Annotated[str, typer.Option("--text-column", help="Column of --data with the text.")] = "text",
    out: OutFolder = None,
    processes: Annotated[
        bool,
        typer.Option("--processes", help="Use a real federation of processes instead of the simulation engine."),
    ] = False,
    weak_env: WeakEnvironment = None,
    as_json: AsJson = False,
) -> None:
    """The whole thing on one machine: six hospitals, real text, a pretrained model, a few minutes."""
    from server.demo import prepare_demo

    root = (out or _new_folder("demo")).resolve()
    prepared = prepare_demo(root, data, site_column, tuple(code_column or ()), text_column)
    messages.print(prepared.description, markup=False, highlight=False, soft_wrap=True)
    engine = "processes" if processes else "simulation"
    _launch(prepared.study_file, prepared.sites_folder, root / "run", engine, as_json, weak_env)


@app.command()
def plan(
    study: StudyFile,
    size_class: Annotated[
        int | None,
        typer.Option("--size-class", help="Size class of a strong site. Default: the study's minimum."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a study costs, before anything is touched: noise and joint epsilon of a site of each tier."""
    from common.study import Study
    from server.planning import planned, rendered

    found = planned(Study.load(study), size_class)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        screen.print(rendered(found), soft_wrap=True)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    texts: Annotated[int, typer.Option("-n", "--texts", min=1, help="How many texts to make.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for them; of the same command before, to go on. Default: RUN/more-TEXTS."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make more texts from a finished run, as many as you like: no hospital is asked, and no privacy is spent."""
    from server.more.generate import generate_more
    from server.more.view import GenerationView, render_generation

    with GenerationView(messages) as view:
        made = generate_more(run, texts, out, view.show)
    if as_json:
        typer.echo(made.model_dump_json())
    else:
        render_generation(made, screen)
    if made.missing:
        _end(f"{made.wanted - made.texts} texts are missing", int(ExitCode.FAILED))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", help="File to write. Default: report.html in the run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a finished run's report: one HTML file of charts, tables and texts, which loads and sends nothing."""
    from server.html_report import write_html_report
    from server.workspace import Workspace

    with messages.status("writing the report"):
        written = write_html_report(Workspace(run), out)
    if as_json:
        typer.echo(json.dumps({"report": str(written)}))
        return
    screen.print(Text(str(written)), soft_wrap=True)


@app.command("evaluate")
def evaluate_corpus(
    source: Annotated[
        Path, typer.Argument(help="Folder of a finished run, a bundle, or a corpus file.", show_default=False)
    ],
    test: Annotated[
        Path,
        typer.Option(
            "--test",
            help="Real texts that had no part in the corpus (Parquet, CSV, JSONL), public or test data.",
            show_default=False,
        ),
    ],
    train: Annotated[
        Path | None, typer.Option("--train", help="Real texts that it was made from: for ceilings and leaks.")
    ] = None,
    holdout: Annotated[
        Path | None, typer.Option("--holdout", help="Real texts that had no part, for leaks. Default: those of --test.")
    ] = None,
    floor: Annotated[
        Path | None, typer.Option("--floor", help="A corpus to beat, such as a zero-shot generator's.")
    ] = None,
    text_column: Annotated[
        str,
        typer.Option(
            "--text-column", help="Column of the real files with the text; of a corpus file too, if it has no 'text'."
        ),
    ] = "text",
    label_column: Annotated[
        list[str] | None,
        typer.Option(
            "--label-column",
            help="Column with labels, or ATTRIBUTE=COLUMN if real files call it otherwise; may "
            "be repeated. Default: the study's attributes, of a corpus file 'label'.",
        ),
    ] = None,
    embedder: Annotated[
        str, typer.Option("--embedder", help="As voting.embedder of a study; another one than voted is a fairer judge.")
    ] = "wordllama",
    fine_tune: Annotated[
        Path | None,
        typer.Option("--fine-tune", help="Folder of a small encoder to fine-tune as a classifier; minutes."),
    ] = None,
    next_token: Annotated[
        bool, typer.Option("--next-token", help="Also teach a small causal model next tokens; minutes.")
    ] = False,
    ner: Annotated[
        Path | None,
        typer.Option(
            "--ner",
            help="Public sentences with entities ('tokens', 'tags' in IOB2); a tagger of them labels the corpus.",
        ),
    ] = None,
    ner_test: Annotated[
        Path | None, typer.Option("--ner-test", help="Real sentences with entities to test a tagger of the corpus on.")
    ] = None,
    most: Annotated[
        int, typer.Option("--most", help="Texts of a side that distances and leaks compare, at most.", min=20)
    ] = 2000,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn.", min=0)] = 0,
    drop_overlap: Annotated[
        bool, typer.Option("--drop-overlap", help="Leave out test and held-out texts that --train has too.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder to keep embeddings in, for the next time.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File for the numbers (JSON). A run's folder gets them anyway.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How good and how safe a corpus is: utility, fidelity and leakage, each number with its floor and ceiling."""
    from common.errors import UserError
    from server.evaluation.command import Arguments, run
    from server.evaluation.material import Options
    from server.evaluation.view import render_quality

    if (ner is None) != (ner_test is None):
        raise UserError("evaluate: --ner and --ner-test go together: sentences to learn from and to test on")
    quality = run(
        Arguments(
            entities=(ner, ner_test) if ner is not None and ner_test is not None else None,
            source=source, test=test, train=train, holdout=holdout, floor=floor, text_column=text_column,
            label_columns=tuple(label_column or ()), embedder=embedder, cache=cache, drop_overlap=drop_overlap, out=out,
            options=Options(most=most, encoder=fine_tune, next_token=next_token, seed=seed),
        ),
        messages,
    )  # fmt: skip
    if as_json:
        typer.echo(quality.model_dump_json())
    else:
        render_quality(quality, screen)


@app.command("experiment")
def run_experiment(
    file: Annotated[
        Path, typer.Argument(help="What to compare (TOML), as tests/benchmarks/paper.", show_default=False)
    ],
    data: Annotated[
        Path, typer.Option("--data", help="Folder of the public text that the experiment names.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for tables and numbers; what is there goes on.", show_default=False)
    ],
    budget_hours: Annotated[
        float | None, typer.Option("--budget-hours", help="Stop before a cell that would take longer.", min=0)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Name or label of a cell; may be repeated. Default: all.")
    ] = None,
    only_missing: Annotated[
        bool, typer.Option("--only-missing", help="Leave out what results.jsonl in OUT has, whoever made it.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder of what cells share, also with others. Default: OUT/cache.")
    ] = None,
    trust_cache: Annotated[
        bool, typer.Option("--trust-cache", help="Take what is there also if other code made it.")
    ] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say how long it will take, and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare ways to make a corpus on public text: baselines, ablations, seeds; tables, a plot and raw numbers."""
    from server.experiments.command import Arguments, run
    from server.experiments.view import render_outcome

    arguments = Arguments(file, data, out, budget_hours, only or (), only_missing, cache, trust_cache, estimate)
    outcome = run(arguments, messages)
    if as_json:
        typer.echo(json.dumps(outcome.as_json()))
    else:
        render_outcome(outcome, screen)
    if outcome.report.failed:
        _end(f"{len(outcome.report.failed)} cells failed", int(ExitCode.FAILED))


@app.command("release")
def release_corpus(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="New folder for the bundle.", show_default=False)],
    key: Annotated[Path | None, typer.Option("--key", help="Your signing key (PEM, Ed25519).")] = None,
    new_key: Annotated[Path | None, typer.Option("--new-key", help="Make a signing key in this new file.")] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Publish without a signature.")] = False,
    title: Annotated[str | None, typer.Option("--title", help="Title. Default: the study's name.")] = None,
    licence: Annotated[
        str | None, typer.Option("--license", help="Licence by its SPDX name, such as CC-BY-4.0.")
    ] = None,
    language: Annotated[str | None, typer.Option("--language", help="Of the texts: ISO 639 code, such as en.")] = None,
    publisher: Annotated[str | None, typer.Option("--publisher", help="Who publishes it.")] = None,
    allow_holes: Annotated[
        bool, typer.Option("--allow-holes", help="Publish although codes have fewer texts than wanted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a finished run's corpus as a folder that can be published: data, card, privacy statement, signature."""
    from server.bundle.command import release
    from server.bundle.view import render_release

    given = {"title": title, "license": licence, "language": language, "publisher": publisher}
    facts = release(run, out, given, key, new_key, unsigned, allow_holes, messages)
    if as_json:
        typer.echo(facts.model_dump_json())
    else:
        render_release(facts, out, screen)


@app.command("verify")
def verify_claim(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run, or a bundle.", show_default=False)],
    ledgers: Annotated[
        list[Path] | None,
        typer.Argument(help="Ledgers that the sites exported: files, or folders of *.json.", show_default=False),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="Of a bundle: the publisher's public key, from another source.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Does a corpus' claim hold? Recomputes epsilon with a second accountant; of a bundle, checks every file too."""
    from common.errors import UserError
    from server.bundle.verify import is_bundle
    from server.bundle.view import render_bundle_verification
    from server.verify import read_exports, verify
    from server.verify_view import render_verification

    if is_bundle(folder):
        from server.bundle.command import verify_files

        checked = verify_files(folder, ledgers or [], key, messages)
        render_bundle_verification(checked, screen) if not as_json else typer.echo(checked.model_dump_json())
        holds = checked.holds
    else:
        if key:
            raise UserError(f"--key {key}: only a bundle is signed, and {folder} is none")
        verification = verify(folder, read_exports(ledgers or []))
        render_verification(verification, screen) if not as_json else typer.echo(verification.model_dump_json())
        holds = verification.holds
    if not holds:
        raise typer.Exit(int(ExitCode.FAILED))


@app.command()
def options(
    file: Annotated[str, typer.Argument(help="'study' for study.toml, 'site' for site.toml.")] = "study",
    as_json: AsJson = False,
) -> None:
    """Every option of a study or site file, with its default and what it means."""
    from common.configuration import options_of
    from common.errors import UserError
    from common.site.config import Site
    from common.study import Study

    models: dict[str, type[BaseModel]] = {"study": Study, "site": Site}
    if file not in models:
        raise UserError(f"options: {file!r} has none; 'study' and 'site' have")
    rows = list(options_of(models[file]))
    if as_json:
        typer.echo(json.dumps([dict(zip(("name", "default", "description"), row, strict=True)) for row in rows]))
        return
    for name, default, description in rows:
        screen.print(Text.assemble((name, "bold"), f" = {default}"), soft_wrap=True)
        screen.print(Padding(Text(description), (0, 0, 0, 4)))


def _launch(study: Path, sites: Path, out: Path | None, engine: str, as_json: bool, weak_env: Path | None) -> None:
    from server.launch import prepare

    here = Path(sys.executable).parent
    launch = prepare(
        study,
        sites,
        out or _new_folder(study.stem),
        "processes" if engine == "processes" else "simulation",
        weak_environment=_environment(weak_env) if weak_env else here,
        strong_environment=here,
    )
    _execute(launch, as_json)


def _execute(launch: Launch, as_json: bool) -> None:
    from server.launch import execute
    from server.progress_view import ProgressView
    from server.report import render_summary
    from server.summary import read_summary

    with ProgressView(messages) as view:
        execute(launch, view.show)
    if as_json:
        typer.echo(launch.workspace.summary_json.read_text(encoding="utf-8"))
        return
    render_summary(read_summary(launch.workspace), screen)
    if launch.workspace.report.is_file():
        screen.print(Text(f"report: {launch.workspace.report}"), soft_wrap=True)


def _environment(folder: Path) -> Path:
    """``bin`` folder of a virtual environment."""
    from common.errors import UserError

    scripts = folder.resolve() / "bin"
    if not (scripts / "flower-supernode").is_file():
        raise UserError(
            f"--weak-env {folder}: no flower-supernode in {scripts}; a virtual environment with fedcorpus is needed"
        )
    return scripts


def _new_folder(name: str) -> Path:
    return Path("fedcorpus-runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _end(message: str, code: int) -> NoReturn:
    style = "red" if messages.is_terminal else None
    # Not folded: a path that breaks across lines can be neither read nor copied.
    messages.print(f"fedcorpus: {message}", style=style, markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)
