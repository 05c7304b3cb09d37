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
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
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
    from common.site.plan import saved_by_joint_accounting, strong_plan, weak_plan
    from common.study import Study
    from server.report import at_most

    loaded = Study.load(study)
    size = size_class or loaded.federation.min_documents
    strong, weak = strong_plan(loaded, size), weak_plan(loaded)
    saved = saved_by_joint_accounting(loaded, size)
    rows = [
        ("strong", f"{strong.training.steps} steps at q={strong.training.sample_rate:.4g}",
         f"Gaussian, multiplier {strong.training.noise_multiplier:.4f}", strong.epsilon, strong.delta),
        ("strong", "profile", f"discrete Gaussian, scale {strong.profile.scale:.3f}", strong.epsilon, strong.delta),
        ("weak", f"ballot, R={weak.votes.cells_per_unit}",
         f"discrete Gaussian, scale {weak.votes.scale:.3f}", weak.epsilon, weak.delta),
        ("weak", "profile", f"discrete Gaussian, scale {weak.profile.scale:.3f}", weak.epsilon, weak.delta),
    ]  # fmt: skip
    over_a_round = loaded.training.steps**0.5
    signal = loaded.training.batch_size / strong.training.noise_multiplier
    if as_json:
        keys = ("tier", "release", "noise", "joint_epsilon", "delta")
        releases = [dict(zip(keys, row, strict=True)) for row in rows]
        accounting = loaded.privacy.accounting
        typer.echo(
            json.dumps(
                {
                    "study": loaded.sha256,
                    "accounting": accounting,
                    "releases": releases,
                    "joint_saves": saved,
                    "step_signal_to_noise_times_root_of_weights": signal,
                }
            )
        )
        return
    title = f"Study {loaded.name}: what each site would release (size class {size})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("tier", "release", "noise", "ε of all", "δ"):
        table.add_column(heading)
    for tier, release, noise, epsilon, delta in rows:
        table.add_row(tier, release, noise, at_most(epsilon), f"{delta:g}")
    screen.print(table)
    own = "this study" if loaded.privacy.accounting == "joint" else "not this study"
    screen.print(
        Text(
            f"One promise for all of a site's releases ({own}) needs {saved['strong']:.1%} less training noise, "
            f"{saved['weak']:.1%} less vote noise\nand {saved['profile']:.0%} less profile noise than the paper's way, "
            f"which splits the same epsilon and delta\nand adds (profile: {loaded.privacy.paper_profile_share:.0%}).\n"
            f"A training step's signal is at most {signal:.3g}/√d of its noise, with d trained weights (a million: "
            f"{signal / 1000:.2g});\nover a round {over_a_round:.3g} times that, and over n sites √n times."
        ),
        soft_wrap=True,
    )


@app.command("verify")
def verify_claim(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    ledgers: Annotated[
        list[Path],
        typer.Argument(help="Ledgers that the sites exported: files, or folders of *.json.", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Recompute every site's epsilon from exported ledgers with a second accountant; does the corpus' claim hold?"""
    from server.verify import read_exports, verify
    from server.verify_view import render_verification

    verification = verify(run, read_exports(ledgers))
    if as_json:
        typer.echo(verification.model_dump_json())
    else:
        render_verification(verification, screen)
    if not verification.holds:
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
