"""The HTML report of a finished run: one file that loads nothing and sends nothing.

    write_html_report(Workspace(Path("fedcorpus-runs/demo/run")))        # writes report.html into the run's folder

`material` reads the run, the sections say in words and charts what it shows, `page` puts them together. Texts and names
are data on the way through: escaped, isolated, and with everything visible that would hide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from common.errors import MissingExtraError, UserError
from server.workspace import Workspace, write_atomically

log = logging.getLogger("fedcorpus.server")


def write_html_report(workspace: Workspace, out: Path | None = None) -> Path:
    """Write the report of a finished run, to ``out`` or into the run's folder, and return where it is.

    Raises
    ------
    DataError
        If the folder holds no finished run, or one of its files can't be read.
    MissingExtraError
        If the libraries that draw aren't installed.
    UserError
        If ``out`` can't be written.
    """
    try:
        # They take a second to load, and a weak site has none of them.
        from server.html_report.material import read_material
        from server.html_report.page import page_of, render
    except ImportError as cause:
        raise MissingExtraError(
            f'report: {cause.name} isn\'t installed; pip install "fedcorpus[coordinator]"'
        ) from cause
    destination = out or workspace.report
    html = render(page_of(read_material(workspace)))
    try:
        write_atomically(destination, html.encode())
    except OSError as cause:
        raise UserError(f"{destination}: the report can't be written: {cause.strerror}") from cause
    return destination


def report_or_note(workspace: Workspace, note: Callable[[str], None]) -> None:
    """Write the report of a run that has just finished. If that fails it is noted, and the run is no less finished."""
    try:
        write_html_report(workspace)
    except Exception as error:
        # The corpus is there and paid for: a page about it mustn't undo that.
        log.warning("no report: %s", type(error).__name__, exc_info=error)
        note(
            f"{workspace.report.name} wasn't written ({type(error).__name__}: {error}); 'fedcorpus report' tries again"
        )
