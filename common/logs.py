"""Logging of the app's own processes: to standard error, so it ends in the log of the site's SuperNode.

In deployment those logs stay on the machine; nothing of them is sent. Flower sets up its own logger only.
"""

from __future__ import annotations

import logging
import sys

NAME = "fedcorpus"


def log_to_stderr() -> None:
    """Let everything under the logger ``fedcorpus`` be seen, once per process."""
    logger = logging.getLogger(NAME)
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
