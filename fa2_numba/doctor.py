"""What this machine has, what is in the way, and what to do next.

Two steps, so that every conflict can be tested on a machine that does not have it:

- `probe` reads the machine into a `Machine`. It imports Numba and asks the CUDA driver for its
  properties, but creates no CUDA context, compiles nothing and launches nothing. Whatever fails is
  recorded as text.
- `judge` turns a `Machine` into findings. Plain Python: no imports, no machine.
"""

import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail", "info"]

# The distributions whose versions decide something below.
DISTRIBUTIONS = (
    "numpy",
    "numba",
    "numba-cuda",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torch",
)

# NumPy 2.5 removed row_stack, which numba-cuda 0.30 uses when it is imported.
NUMPY_TOO_NEW = (2, 5)

# CUDA 13 compiles for compute capability 7.5 and newer, CUDA 12 for 5.0 and newer.
OLDEST_FOR_CUDA_13 = (7, 5)


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes
    ----------
    item : str
        What was looked at.
    status : {"ok", "warn", "fail", "info"}
        ok: as it should be; info: absent or off, and nothing needs it here; warn: something will
        not work; fail: nothing will run until it is mended.
    found : str
        What is there.
    advice : str
        What to do next, one sentence; empty where there is nothing to do.
    """

    item: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it; shared memory in bytes per block, after opting in."""

    name: str
    compute_capability: tuple[int, int]
    shared_memory: int
    sm_count: int


@dataclass(frozen=True)
class Machine:
    """What `probe` read. A version is its text, a CUDA version is (major, minor), None is absent.

    ``errors`` says why something is None, under the name of its field.
    """

    python: tuple[int, int, int] = (3, 11, 0)
    versions: dict[str, str] = field(default_factory=dict)
    implementation: str | None = None
    simulator: bool = False
    nvvm: str | None = None
    toolkit: tuple[int, int] | None = None
    driver: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    torch_cuda: str | None = None
    errors: dict[str, str] = field(default_factory=dict)


def diagnose() -> list[Finding]:
    """Say what this machine has and what to do next; the last finding is what the report will do.

    Never raises and never launches anything; works without a GPU, without CUDA's libraries and
    under the simulator.

    Returns
    -------
    list of Finding
        In reading order, from Python to the GPU.
    """
    return judge(probe())


def gpu_usable() -> bool:
    """Say whether kernels can be compiled for this machine's GPU and run on it.

    Imports no Numba, so that the caller can still set ``NUMBA_ENABLE_CUDASIM`` where it is False.
    """
    machine = probe(import_numba=False)
    return not machine.simulator and not _gpu_obstacle(machine)


# --- reading the machine ---------------------------------------------------------------------


def probe(*, import_numba: bool = True) -> Machine:
    """Read this machine; a probe that fails leaves None and its reason in ``errors``."""
    errors: dict[str, str] = {}

    def attempt(name: str, read: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return read()
        except Exception as error:  # whatever a broken installation raises is the finding
            errors[name] = f"{type(error).__name__}: {_first_line(error)}"
            return None

    return Machine(
        python=sys.version_info[:3],
        versions=_versions(),
        implementation=attempt("implementation", _implementation) if import_numba else None,
        simulator=attempt("simulator", _simulator) or False,
        nvvm=attempt("nvvm", _nvvm),
        toolkit=attempt("toolkit", _toolkit),
        driver=attempt("driver", _driver),
        gpus=attempt("gpus", _gpus) or (),
        torch_cuda=attempt("torch_cuda", _torch_cuda),
        errors=errors,
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _implementation() -> str:
    from numba import cuda

    return str(cuda.implementation)


def _simulator() -> bool:
    # Numba reads the variable once; before that the variable itself is what it will read.
    if "numba" in sys.modules:
        return bool(sys.modules["numba"].config.ENABLE_CUDASIM)
    return bool(int(os.environ.get("NUMBA_ENABLE_CUDASIM", "0")))


def _nvvm() -> str:
    from cuda import pathfinder

    return str(pathfinder.load_nvidia_dynamic_lib("nvvm").found_via)


def _toolkit() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    _check(status)
    return int(major), int(minor)


def _driver() -> tuple[int, int]:
    from cuda.bindings import driver

    status, version = driver.cuDriverGetVersion()
    _check(status)
    return version // 1000, version % 1000 // 10


def _gpus() -> tuple[Gpu, ...]:
    # The driver is asked itself, not numba.cuda, because the simulator would answer in its place.
    from cuda.bindings import driver

    (status,) = driver.cuInit(0)
    _check(status)
    status, count = driver.cuDeviceGetCount()
    _check(status)
    of = driver.CUdevice_attribute

    def describe(ordinal: int) -> Gpu:
        status, device = driver.cuDeviceGet(ordinal)
        _check(status)
        status, name = driver.cuDeviceGetName(128, device)
        _check(status)

        def attribute(which: Any) -> int:
            status, value = driver.cuDeviceGetAttribute(which, device)
            _check(status)
            return int(value)

        return Gpu(
            name=name.split(b"\0")[0].decode(),
            compute_capability=(
                attribute(of.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                attribute(of.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            shared_memory=attribute(of.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            sm_count=attribute(of.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        )

    return tuple(describe(ordinal) for ordinal in range(count))


def _torch_cuda() -> str | None:
    # Read from torch's file: importing torch takes seconds and loads CUDA's libraries.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found.group(1) if found else None


def _check(status: Any) -> None:
    if int(status) != 0:
        raise RuntimeError(getattr(status, "name", str(status)))


# --- judging it ------------------------------------------------------------------------------


def judge(machine: Machine) -> list[Finding]:
    """Turn what was read into findings; the last one is `job`."""
    return [
        _judge_python(machine),
        _judge_numpy(machine),
        _judge_numba(machine),
        _judge_numba_cuda(machine),
        _judge_simulator(machine),
        _judge_driver(machine),
        *_judge_gpus(machine),
        _judge_toolkit(machine),
        _judge_cupy(machine),
        _judge_torch(machine),
        job(machine),
    ]


def job(machine: Machine) -> Finding:
    """Say whether ``fa2-numba report`` will run on the GPU or on the simulator here, and why."""
    item = "fa2-numba report"
    broken = [
        f.item
        for f in (
            _judge_python(machine),
            _judge_numpy(machine),
            _judge_numba(machine),
            _judge_numba_cuda(machine),
        )
        if f.status == "fail"
    ]
    if broken:
        return Finding(
            item, "fail", f"cannot run: see {', '.join(broken)}", "Mend the lines that say fail."
        )
    if machine.simulator:
        return Finding(
            item, "ok", "runs on the simulator, small sizes (NUMBA_ENABLE_CUDASIM is set)"
        )
    obstacle = _gpu_obstacle(machine)
    if obstacle:
        return Finding(item, "ok", f"runs on the simulator, small sizes ({obstacle})")
    return Finding(item, "ok", f"runs on the GPU, {machine.gpus[0].name}")


def _gpu_obstacle(machine: Machine) -> str:
    """Why the GPU cannot be used, in a few words; empty if it can."""
    if not machine.gpus:
        return "no CUDA GPU"
    if machine.nvvm is None or machine.toolkit is None:
        return "no CUDA toolkit to compile with"
    if _judge_toolkit(machine).status != "ok":
        return "this CUDA toolkit does not serve this GPU or its driver"
    return ""


def _judge_python(machine: Machine) -> Finding:
    found = ".".join(map(str, machine.python))
    if machine.python < (3, 11):
        return Finding("Python", "fail", found, "Install Python 3.11 or newer.")
    return Finding("Python", "ok", found)


def _judge_numpy(machine: Machine) -> Finding:
    version = machine.versions.get("numpy")
    if version is None:
        return Finding("NumPy", "fail", "not installed", _install())
    if _release(version) >= NUMPY_TOO_NEW:
        return Finding(
            "NumPy",
            "fail",
            f"{version}, without row_stack, which numba-cuda needs",
            "Run pip install 'numpy<2.5'.",
        )
    return Finding("NumPy", "ok", version)


def _judge_numba(machine: Machine) -> Finding:
    version = machine.versions.get("numba")
    if version is None:
        return Finding("Numba", "fail", "not installed", _install())
    return Finding("Numba", "ok", version)


def _judge_numba_cuda(machine: Machine) -> Finding:
    item = "numba-cuda"
    version = machine.versions.get("numba-cuda")
    if version is None:
        return Finding(item, "fail", "not installed", _install())
    if machine.implementation is None:
        reason = machine.errors.get("implementation", "no reason given")
        return Finding(
            item,
            "fail",
            f"{version}, cannot be imported ({reason})",
            _install(first="Start a new environment"),
        )
    if machine.implementation != "NVIDIA":
        return Finding(
            item,
            "fail",
            f"{version}, but numba.cuda is Numba's own ({machine.implementation})",
            "Install numba and numba-cuda in the same environment, then start Python anew.",
        )
    if not (0, 30) <= _release(version) < (0, 31):
        return Finding(
            item,
            "warn",
            f"{version}, another release than this package was tested with",
            "Run pip install 'numba-cuda>=0.30.4,<0.31'.",
        )
    return Finding(item, "ok", version)


def _judge_simulator(machine: Machine) -> Finding:
    item = "simulator"
    if not machine.simulator:
        return Finding(item, "info", "off (NUMBA_ENABLE_CUDASIM is 0 or not set)")
    if machine.gpus:
        return Finding(
            item,
            "warn",
            "on, so the GPU is not used",
            "Unset NUMBA_ENABLE_CUDASIM before Python starts to use the GPU.",
        )
    return Finding(item, "ok", "on (NUMBA_ENABLE_CUDASIM is set)")


def _judge_driver(machine: Machine) -> Finding:
    item = "NVIDIA driver"
    if machine.driver is None:
        return Finding(
            item,
            "info",
            "none found",
            "On a machine with an NVIDIA GPU, install its driver; without one the simulator runs.",
        )
    found = f"CUDA {_dotted(machine.driver)}"
    if machine.driver[0] < 12:
        return Finding(item, "warn", found, "Update the driver to one for CUDA 12 or newer.")
    return Finding(item, "ok", found)


def _judge_gpus(machine: Machine) -> list[Finding]:
    if not machine.gpus:
        if machine.driver is None:
            return [Finding("GPU", "info", "none")]
        reason = machine.errors.get("gpus", "the driver counts 0")
        return [
            Finding(
                "GPU",
                "warn",
                f"none usable ({reason})",
                "Check nvidia-smi and CUDA_VISIBLE_DEVICES.",
            )
        ]
    return [
        Finding(
            "GPU" if len(machine.gpus) == 1 else f"GPU {ordinal}",
            "ok",
            f"{gpu.name}: compute capability {_dotted(gpu.compute_capability)}, "
            f"{gpu.sm_count} SMs, {gpu.shared_memory:,} bytes of shared memory per block",
        )
        for ordinal, gpu in enumerate(machine.gpus)
    ]


def _judge_toolkit(machine: Machine) -> Finding:
    item = "CUDA toolkit"
    missing = [
        library
        for library, there in (("NVVM", machine.nvvm), ("NVRTC", machine.toolkit))
        if there is None
    ]
    if missing:
        return Finding(
            item,
            "warn" if machine.gpus else "info",
            f"{' and '.join(missing)} not found",
            _install(_extra(machine))
            if machine.gpus
            else _install("codegen", first="Do nothing; or, to compile without a GPU"),
        )
    assert machine.toolkit is not None
    found = f"CUDA {_dotted(machine.toolkit)} ({machine.nvvm})"
    major = machine.toolkit[0]
    if machine.gpus and machine.driver and major > machine.driver[0]:
        return Finding(
            item,
            "warn",
            f"{found}, newer than the driver's CUDA {_dotted(machine.driver)}",
            _install(_extra(machine), first="Update the driver, or start a new environment"),
        )
    if machine.gpus and major >= 13 and machine.gpus[0].compute_capability < OLDEST_FOR_CUDA_13:
        return Finding(
            item,
            "warn",
            f"{found}, which no longer compiles for this GPU",
            _install("cuda12", first="Start a new environment"),
        )
    return Finding(item, "ok", found)


def _judge_cupy(machine: Machine) -> Finding:
    item = "CuPy"
    found = [name for name in machine.versions if name.startswith("cupy")]
    if not found:
        if machine.gpus and "torch" not in machine.versions:
            return Finding(
                item,
                "warn",
                "not installed, and no torch either: no arrays on the GPU",
                _install(_extra(machine)),
            )
        return Finding(item, "info", "not installed")
    named = ", ".join(f"{name} {machine.versions[name]}" for name in found)
    if len(found) > 1:
        return Finding(
            item,
            "warn",
            f"{named}: they overwrite each other",
            _install(_extra(machine), first="Uninstall all of them"),
        )
    built_for = re.search(r"cuda(\d+)x", found[0])
    if built_for and machine.driver and int(built_for.group(1)) > machine.driver[0]:
        return Finding(
            item,
            "warn",
            f"{named}, newer than the driver's CUDA {_dotted(machine.driver)}",
            _install(_extra(machine), first="Update the driver, or start a new environment"),
        )
    return Finding(item, "ok", named)


def _judge_torch(machine: Machine) -> Finding:
    item = "torch"
    version = machine.versions.get("torch")
    if version is None:
        return Finding(item, "info", "not installed (optional)")
    if machine.torch_cuda is None:
        return Finding(
            item,
            "warn" if machine.gpus else "info",
            f"{version}, built without CUDA",
            "Install a CUDA build of torch if its tensors are to be on the GPU."
            if machine.gpus
            else "",
        )
    return Finding(item, "ok", f"{version}, built for CUDA {machine.torch_cuda}")


def _extra(machine: Machine) -> str:
    """The extra that fits the driver and the GPU."""
    old_driver = machine.driver is not None and machine.driver[0] < 13
    old_gpu = bool(machine.gpus) and machine.gpus[0].compute_capability < OLDEST_FOR_CUDA_13
    return "cuda12" if old_driver or old_gpu else "cuda13"


def _install(extra: str = "", first: str = "") -> str:
    """The advice to install this package with an extra, after doing something first."""
    target = f"'.[{extra}]'" if extra else "."
    return f"{first + ', then run' if first else 'Run'} pip install {target} in fa2_numba's folder."


def _release(version: str) -> tuple[int, int]:
    """The first two numbers of a version: "2.11.0+cu130" is (2, 11)."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
