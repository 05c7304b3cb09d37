"""Logging of the app's own processes: to standard error, so it ends in the log of the site's SuperNode.

In deployment those logs stay on the machine; nothing of them is sent. Flower sets up its own logger only.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

NAME = "fedcorpus"


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what standard error is now, and drops what can't be written: a log must not end a release."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Nothing: by default, logging prints the exception in hand with its text, which may quote a note."""


def log_to_stderr() -> None:
    """Let everything under the logger ``fedcorpus`` be seen, once per process."""
    logger = logging.getLogger(NAME)
    if logger.handlers:
        return
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
