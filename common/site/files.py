"""Files that only the site's own account reads."""

from __future__ import annotations

import os
from pathlib import Path


def create_private(path: Path) -> None:
    """Make a file that only its owner reads, from its first moment on, and make its name durable."""
    if path.exists():
        return
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
