"""What a start costs: `python bench/start.py BASE [PAIRS]`, where BASE is a checkout of the revision to compare with.

CPU seconds of three processes, in alternating pairs of this checkout and BASE: the import of the schemas, `engine validate` of a
spec, and `engine --help`. Printed are the median and the quartiles of the ratios, this checkout to BASE; below 1 it is cheaper.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
COMMANDS = {
    "import engine.schemas.episode": ["-c", "import engine.schemas.episode"],
    "engine validate": ["-m", "engine.cli.main", "validate", str(HERE / "specs" / "guess_number.yaml")],
    "engine --help": ["-m", "engine.cli.main", "--help"],
}


def cpu(checkout: Path, arguments: list[str]) -> float:
    """CPU seconds of one process with the engine of a checkout."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPATH"] = str(checkout)
    subprocess.run([sys.executable, *arguments], env=variables, cwd=checkout, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    base = Path(sys.argv[1]).resolve()
    pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    for name, arguments in COMMANDS.items():
        for checkout in (HERE, base):
            cpu(checkout, arguments)  # writes the bytecode
        ratios = [cpu(HERE, arguments) / cpu(base, arguments) for _ in range(pairs)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"{name:32} {median:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
