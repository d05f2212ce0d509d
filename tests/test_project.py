"""The walls of docs/architecture.md, the pins, and what must not be in the repository.

The files are found by globbing, so a new module is under the rules from its first day.
"""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fa2_numba"

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}
KERNELS = [name for name in MODULES if name.startswith("fa2_numba.kernels.")]
ADAPTERS = [name for name in MODULES if name.startswith("fa2_numba.adapters.")]

# Plain Python and NumPy: what is right and what should move can be read and run without CUDA.
PURE = [f"fa2_numba.{name}" for name in ("reference", "io_model", "masking", "tiling")]

# The doors to Numba's extension API, which a successor of numba-cuda would change.
EXTENSION_DOORS = {
    f"fa2_numba.{name}" for name in ("hbm", "smem", "clock", "simulator", "ptx.emit")
}


def imports(source: str, module: str) -> set[str]:
    """Every dotted name that `source`, the text of `module`, imports, wherever it does so.

    ``from a import b`` gives both "a" and "a.b", since b may be a module.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def imported_by(module: str) -> set[str]:
    return imports(MODULES[module].read_text(), module)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def names_used(source: str) -> set[str]:
    """Identifiers and attribute names of the code; comments and strings do not count."""
    nodes = list(ast.walk(ast.parse(source)))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


# --- the checks' own tools -------------------------------------------------------------------


def test_relative_and_nested_imports_are_seen():
    source = "import a.b\nfrom . import fa1\nfrom ..hbm import jit\ndef f():\n    from c import d\n"
    assert imports(source, "fa2_numba.kernels.fa2") >= {
        "a.b",
        "fa2_numba.kernels.fa1",
        "fa2_numba.hbm",
        "fa2_numba.hbm.jit",
        "c.d",
    }


def test_names_in_text_do_not_count():
    assert names_used('"""InlineAsm"""\nx.extending  # llvmlite\n') == {"x", "extending"}


# --- what may import what --------------------------------------------------------------------


@pytest.mark.parametrize("module", KERNELS)
def test_a_kernel_imports_no_kernel_no_reference_and_no_model(module):
    walls = ("fa2_numba.reference", "fa2_numba.io_model", "fa2_numba.kernels")
    assert [name for name in imported_by(module) if within(name, *walls)] == []


@pytest.mark.parametrize("module", [name for name in PURE if name in MODULES])
def test_what_defines_and_predicts_needs_no_cuda(module):
    reached, waiting = set(), [module]
    while waiting:  # and so does everything of the package that it imports
        current = waiting.pop()
        reached.add(current)
        cuda = [
            name
            for name in imported_by(current)
            if within(name, "numba", "numba_cuda", "cupy", "cuda", "llvmlite", "torch")
        ]
        assert cuda == [], f"{module} reaches {current}, which imports {cuda}"
        waiting += [n for n in imported_by(current) if n in MODULES and n not in reached]


@pytest.mark.parametrize("module", [name for name in MODULES if name not in EXTENSION_DOORS])
def test_the_extension_api_stays_behind_its_doors(module):
    doors = ("numba.cuda.extending", "numba.extending", "numba.core.extending", "llvmlite")
    assert [name for name in imported_by(module) if within(name, *doors)] == []
    assert names_used(MODULES[module].read_text()).isdisjoint({"extending", "llvmlite"})


@pytest.mark.parametrize("module", [name for name in MODULES if name != "fa2_numba.ptx.emit"])
def test_ptx_instructions_are_written_in_ptx_alone(module):
    assert "InlineAsm" not in names_used(MODULES[module].read_text())
    assert not any(name.endswith(".InlineAsm") for name in imported_by(module))


def test_adapters_know_the_api_and_the_gradients_alone():
    for module in ADAPTERS:
        inside = {name for name in imported_by(module) if within(name, "fa2_numba")}
        known = ("fa2_numba.api", "fa2_numba.backward")
        beyond = {name for name in inside if not within(name, *known)}
        assert beyond <= {"fa2_numba"}, f"{module} imports {beyond}"


def imports_at_once(source: str) -> set[str]:
    """Packages that `source` imports when it is imported itself: outside functions."""
    found, waiting = set(), list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.split(".")[0] for name in imports(ast.unparse(node), "")}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
    return found


def test_imports_of_functions_come_later():
    source = (
        "import a.b\nif x:\n    from c import d\nclass E:\n    def f(self):\n        import g\n"
    )
    assert imports_at_once(source) == {"a", "c"}


@pytest.mark.parametrize("module", MODULES)
def test_torch_is_imported_by_its_adapter_alone(module):
    found = "torch" in imports_at_once(MODULES[module].read_text())
    assert found == (module == "fa2_numba.adapters.torch")


ARROWS = re.findall(
    r"^```text\n(.*?)^```",
    (ROOT / "docs" / "architecture.md").read_text().partition("## What may import what")[2],
    re.MULTILINE | re.DOTALL,
)[:2]


def arrows(block: str) -> dict[str, set[str]]:
    """Module to what the page says that it imports; "no other module" is nothing."""
    found: dict[str, set[str]] = {}
    lines: list[str] = []
    for line in block.splitlines():
        if line.startswith(" ") and line.strip():
            lines[-1] += line  # goes on
        else:
            lines.append(line)
    for line in filter(None, lines):
        names, arrow, imported = line.partition("->")
        if not arrow:
            names = line.partition("no other module")[0]
        for name in re.findall(r"[\w/*]+", names):
            found[name.removesuffix("/*")] = set(re.findall(r"\w+", imported))
    return found


def parts_imported(module: str, parent: str, depth: int) -> set[str]:
    """Modules or folders of `parent` that it imports."""
    parts = [name.split(".") for name in imported_by(module) if within(name, parent)]
    found = {name[depth] for name in parts if len(name) > depth}
    known = {name.split(".")[depth] for name in MODULES if within(name, parent)}
    return found & known


def test_arrows_are_read_with_their_other_lines():
    block = "a  b      no other module of c\nd, e -> a,\n        b\nk/* -> d\n"
    assert arrows(block) == {"a": set(), "b": set(), "d": {"a", "b"}, "e": {"a", "b"}, "k": {"d"}}


def test_the_package_imports_what_the_page_says():
    said = arrows(ARROWS[0]) | {"__main__": {"cli"}}
    del said["benchmarks"]
    found: dict[str, set[str]] = {}
    for module in MODULES:
        name = module.split(".")[1]
        found.setdefault(name, set()).update(parts_imported(module, "fa2_numba", 1) - {name})
    assert found == said
    order = list(said)
    assert all(order.index(n) < order.index(name) for name, names in said.items() for n in names)


def test_the_accounts_import_what_the_page_says():
    said = arrows(ARROWS[1])
    for name, names in said.items():
        module = f"fa2_numba.accounting.{name}"
        assert parts_imported(module, "fa2_numba.accounting", 2) == names, module


# --- pins ------------------------------------------------------------------------------------


def requirements() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"base": project["dependencies"], **project["optional-dependencies"]}


@pytest.mark.parametrize(
    ("extra", "requirement"),
    [
        ("base", "numpy>=2.0,<2.5"),
        ("base", "numba>=0.66,<0.69"),
        ("base", "numba-cuda>=0.30.4,<0.31"),
        ("cuda13", "numba-cuda[cu13]>=0.30.4,<0.31"),
        ("cuda13", "cuda-core<2"),
        ("cuda12", "numba-cuda[cu12]>=0.30.4,<0.31"),
        ("cuda12", "cuda-core<2"),
        ("codegen", "numba-cuda[cu13]>=0.30.4,<0.31"),
    ],
)
def test_what_a_later_release_would_break_is_pinned(extra, requirement):
    assert requirement in requirements()[extra]


def test_the_base_needs_no_gpu_package():
    assert not any(re.match(r"cupy|torch|nvidia-|numba-cuda\[", r) for r in requirements()["base"])


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()


# --- what must not be in the repository ------------------------------------------------------

# As patterns, these lines are not what they look for.
LEAKS = {
    "a path of one machine": r"(?<![\w.:-])/(home|root|Users|work|tmp)/",
    "a package index": r"(pypi\.org|pythonhosted\.org|pypi\.nvidia\.com)\b",
    "an option for one": r"--((extra-)?index-(url)|find-(links))\b",
}


def repository_files() -> list[Path]:
    """The files git has or would add; outside a checkout, those of the package and the tests."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        paths = [ROOT / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*")]
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


def leaks(text: str) -> list[str]:
    return [
        f"{kind}: {line.strip()[:120]}"
        for line in text.splitlines()
        for kind, pattern in LEAKS.items()
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize(
    "parts",
    [
        ("see /", "home/someone/x"),
        ("file:///", "root/x"),
        ("'/", "tmp/out'"),
        ("https://pypi", ".org/simple"),
        ("pip install --index", "-url x"),
    ],
)
def test_a_leak_would_be_seen(parts):
    assert leaks("".join(parts))


@pytest.mark.parametrize(
    "text", ["q.k / work / 2", "docs/work/x", "https://example.org/home/", "tmp/"]
)
def test_innocent_text_is_no_leak(text):
    assert leaks(text) == []


def test_no_file_holds_a_path_of_one_machine_or_a_package_index():
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        found += [f"{path.relative_to(ROOT)}: {leak}" for leak in leaks(text)]
    assert found == []


# --- what the pages promise ------------------------------------------------------------------

PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if path.exists()
]


def make_targets() -> set[str]:
    (phony,) = re.findall(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(phony.split())


def targets_named(page: str) -> set[str]:
    """What follows "make" in a code span, or at the start of a line of a code block."""
    blocks = re.findall(r"^```.*?^```", page, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`(make [^`\n]*)`", page)
    code = "\n".join([*blocks, *spans])
    return set(re.findall(r"^\s*(?:\$ )?make +([a-z][a-z-]*)\b", code, re.MULTILINE))


def test_targets_are_found_in_code_alone():
    page = "Run `make test`.\nmake sure of it\n```bash\n$ make report ARGS=x\nmake test-gpu\n```\n"
    assert targets_named(page) == {"test", "report", "test-gpu"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_names_only_targets_that_exist(page):
    assert targets_named(page.read_text()) <= make_targets()


@pytest.mark.parametrize("target", sorted(make_targets()))
def test_a_target_has_a_rule(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
