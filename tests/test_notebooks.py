"""The notebooks run from a clean kernel, and what is stored in them is what they print."""

import getpass
import importlib.util
import platform
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="extra notebook")
nbformat = pytest.importorskip("nbformat", reason="extra notebook")

from fa2_numba import doctor  # noqa: E402

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = ("counting", "timing")
SECONDS = 60  # for both
MOST_CELLS, MOST_BYTES = 25, 1_000_000
ABSOLUTE_PATH = r"(?<![\w.:<-])/(bin|data|etc|home|lib|mnt|opt|root|srv|tmp|usr|Users|var|work)/"


def script() -> ModuleType:
    """notebooks/execute.py."""
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = script()


def read(name: str) -> Any:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(cell: Any) -> str:
    """What a cell printed, without pictures; rounding errors differ from machine to machine."""
    shown = [
        output.text
        if output.output_type == "stream"
        else output.data.get("text/markdown", output.data.get("text/plain", ""))
        for output in cell.outputs
        if "image/svg+xml" not in output.get("data", {})
    ]
    return re.sub(r"\d\.\de-\d\d", "tiny", "\n".join(shown))


def reads_records(cell: Any) -> bool:
    """Whether its output changes when something is measured anew."""
    return bool(re.search(r"= recorded\(|if model", cell.source))


def of_one_machine(content: str) -> list[str]:
    """Absolute paths in a text, and the names of this host and user."""
    names = [name for name in (platform.node(), getpass.getuser()) if len(name) > 3]
    words = [rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in names]
    return [m[0] for pattern in (ABSOLUTE_PATH, *words) for m in re.finditer(pattern, content)]


def outputs(notebook: Any) -> str:
    return "\n".join(str(cell.outputs) for cell in code(notebook))


# --- run anew --------------------------------------------------------------------------------


def test_both_run_from_a_clean_kernel_and_print_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    if doctor.gpu_usable():
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    else:  # the first cell has to see that
        monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    begin = time.monotonic()
    for name in NAMES:
        stored, notebook = read(name), read(name)
        for cell in code(notebook):
            cell.outputs, cell.execution_count = [], None
        execute.execute(notebook, tmp_path, timeout=SECONDS)
        assert "kernels run on the simulator" in outputs(notebook)
        assert of_one_machine(outputs(notebook)) == []
        for then, now in zip(code(stored), code(notebook), strict=True):
            if not reads_records(now):
                assert text(then) == text(now), f"{name}: python notebooks/execute.py stores anew"
    assert time.monotonic() - begin < SECONDS
    assert (tmp_path / "trace.json").exists()


# --- as stored -------------------------------------------------------------------------------


def test_these_are_all():
    assert [path.stem for path in execute.NOTEBOOKS] == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_ran_in_order_and_without_error(name):
    cells = code(read(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {
        "stderr" if output.get("name") == "stderr" else output.output_type
        for cell in cells
        for output in cell.outputs
    }
    assert kinds == {"display_data", "stream"}
    assert all(cell.outputs for cell in cells[1:])  # the first one only chooses where to run
    assert outputs(read(name)).count("<svg") >= 3


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_one_machine_is_stored(name):
    notebook = read(name)
    assert notebook.metadata == execute.METADATA
    assert [cell.id for cell in notebook.cells if cell.metadata] == []
    assert of_one_machine(outputs(notebook)) == []


@pytest.mark.parametrize("path", ["see /" + "home/x", "'/" + "tmp/a'", "(/" + "opt/y)"])
def test_an_absolute_path_would_be_seen(path):
    assert of_one_machine(path) != []


@pytest.mark.parametrize(
    "innocent", ["docs/home/x", "https://example.org/home/", "</var>", "a / b"]
)
def test_other_text_is_of_no_machine(innocent):
    assert of_one_machine(innocent) == []


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_and_small(name):
    assert len(read(name).cells) <= MOST_CELLS
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    pages = [cell.source for cell in read(name).cells if cell.cell_type == "markdown"]
    links = re.findall(r"\]\(([^)#]+)", "\n".join(pages))
    here = [link for link in links if "://" not in link]
    assert here and [link for link in here if not (FOLDER / link).exists()] == []
