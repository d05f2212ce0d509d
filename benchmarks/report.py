"""The IO report of this GPU, kept: ``python -m benchmarks.report``.

Runs ``fa2-numba report`` and puts into ``benchmarks/results/<gpu>/report`` its page, table, checks,
SVG figures and, compressed, its trace, with ``about.json``: the machine, the versions and the
commit of this run, and the SHA-256 of the table. `benchmarks.figures` draws from a report only if
the two belong together.
"""

import gzip
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.environment import environment, results_folder
from fa2_numba.cli import main as fa2_numba

KEPT = ("index.html", "traffic.json", "traffic.csv", "checks.json", "verify.json")


def stamp(table: Path) -> str:
    """What ties ``about.json`` to a table."""
    return hashlib.sha256(table.read_bytes()).hexdigest()


def keep(made: Path, target: Path, about: dict[str, object]) -> None:
    """Copy what is kept of the report in `made` to `target`, and say what it is."""
    (target / "figures").mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (made / name).exists():
            shutil.copy(made / name, target / name)
    for figure in (made / "figures").glob("*.svg"):
        shutil.copy(figure, target / "figures" / figure.name)
    if (trace := made / "trace.json").exists():
        packed = gzip.compress(trace.read_bytes(), mtime=0)
        (target / "trace.json.gz").write_bytes(packed)
    record = {**about, "traffic_sha256": stamp(target / "traffic.json")}
    (target / "about.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> int:
    """Run the report and keep it; the exit code of the report."""
    about = environment()
    with tempfile.TemporaryDirectory() as folder:
        code = fa2_numba(["report", "--output", folder])
        if code in (0, 1):  # finished, exact or not
            keep(Path(folder), results_folder(about["gpu"]) / "report", about)
    return code


if __name__ == "__main__":
    sys.exit(main())
