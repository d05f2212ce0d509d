"""What a recorded number needs beside it: GPU, driver, versions, commit, date."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("fa2-numba", "numba", "numba-cuda", "numpy", "cupy-cuda13x", "torch", "triton")
PACKAGES += ("flash-attn-4", "nvidia-cutlass-dsl", "hypothesis")


def first_gpu() -> str:
    """Number (in the order of PCI) or UUID of the first GPU that CUDA sees, for nvidia-smi."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def nvidia_smi(*fields: str) -> list[str]:
    """Values of ``nvidia-smi --query-gpu`` for the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    command += ["-i", first_gpu()]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [value.strip() for value in out.strip().splitlines()[0].split(",")]


def commit() -> str:
    """The commit that runs: ``FA2_NUMBA_COMMIT`` where the tree is a copy without its history."""
    given = os.environ.get("FA2_NUMBA_COMMIT")
    if given:
        return given
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return result.stdout.strip() or "unknown"


def environment() -> dict[str, Any]:
    """GPU, driver, package versions, commit and date of this run."""
    name, driver = nvidia_smi("name", "driver_version")
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpu": name,
        "driver": driver,
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def results_folder(gpu: str) -> Path:
    """Where this GPU's results are kept: ``benchmarks/results/nvidia-h200``."""
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_record(record: dict[str, Any], path: Path, allow_nan: bool = True) -> None:
    """Write JSON with one row of a list a line; `allow_nan` as for ``json.dumps``."""

    def text(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return json.dumps(value, allow_nan=allow_nan)
        rows = (json.dumps(row, allow_nan=allow_nan) for row in value)
        return "[\n  " + ",\n  ".join(rows) + "\n ]"

    lines = ",\n ".join(f"{json.dumps(name)}: {text(value)}" for name, value in record.items())
    path.write_text(f"{{\n {lines}\n}}\n")
