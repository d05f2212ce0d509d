"""Run the notebooks from a clean kernel and store what they print: ``python notebooks/execute.py``.

The kernel is this interpreter's. What is stored is the source, the outputs and no more: no times,
no name of a machine or of its kernels.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
NOTEBOOKS = tuple(sorted(FOLDER.glob("*.ipynb")))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class ThisInterpreter(AsyncKernelManager):
    """Finds no kernel that is installed elsewhere: what is left is this interpreter's own."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def execute(notebook: nbformat.NotebookNode, folder: Path, timeout: int = 600) -> None:
    """Run all cells in `folder`, and keep only what belongs into the file.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        A cell raised.
    """
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        kernel_manager_class=ThisInterpreter,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # it warns of the local sockets that it uses
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()


def main() -> int:
    """Execute each notebook and write it back."""
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        nbformat.write(notebook, path)
        print(f"executed: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
