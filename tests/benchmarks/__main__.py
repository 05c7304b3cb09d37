"""``python -m tests.benchmarks NAME``: run one benchmark, print its table, then a line per bar; exit 1 if one is short.

A benchmark is a module of this folder with a function ``run() -> Iterable[Bar]`` that prints its own table and gives at
least one bar.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tests.benchmarks.bars import Bar


def main(arguments: list[str]) -> int:
    """Run the benchmark that the arguments name."""
    files = Path(__file__).parent.glob("[a-z]*.py")
    names = sorted(
        p.stem.replace("_", "-")
        for p in files
        if p.stem not in ("bars", "figures", "real_pool", "shapes", "weak_folder", "weak_site")
    )
    if len(arguments) != 1 or arguments[0] not in names:
        print(
            f"make bench B=NAME: {' '.join(arguments) or 'no name'} isn't one; {', '.join(names)} are", file=sys.stderr
        )
        return 2
    bars: list[Bar] = list(importlib.import_module(f"tests.benchmarks.{arguments[0].replace('-', '_')}").run())
    for bar in bars:
        print(bar)
    if not bars:
        print(f"make bench B={arguments[0]}: it gave no bar, so nothing was held to a limit", file=sys.stderr)
        return 1
    return 0 if all(bar.ok for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
