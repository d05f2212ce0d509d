"""The diagnosis: every conflict it knows, on machines made up for it; and this machine as it is."""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fa2_numba import doctor
from fa2_numba.doctor import Finding, Gpu, Machine

H200 = Gpu("NVIDIA H200", (9, 0), shared_memory=232_448, sm_count=132)
V100 = Gpu("Tesla V100", (7, 0), shared_memory=98_304, sm_count=80)

# A machine on which everything is as it should be, and one without a GPU.
GOOD = Machine(
    python=(3, 12, 3),
    versions={
        "numpy": "2.4.6",
        "numba": "0.68.1",
        "numba-cuda": "0.30.4",
        "cupy-cuda13x": "14.2.0",
        "torch": "2.11.0+cu130",
    },
    implementation="NVIDIA",
    nvvm="site-packages",
    toolkit=(13, 5),
    driver=(13, 0),
    gpus=(H200,),
    torch_cuda="13.0",
)
LAPTOP = dataclasses.replace(
    GOOD,
    versions={"numpy": "2.4.6", "numba": "0.68.1", "numba-cuda": "0.30.4"},
    nvvm=None,
    toolkit=None,
    driver=None,
    gpus=(),
    torch_cuda=None,
)


def changed(machine=GOOD, versions=(), **fields):
    """`machine` with other fields; a version of None takes that distribution away."""
    merged = {**machine.versions, **dict(versions)}
    kept = {name: version for name, version in merged.items() if version is not None}
    return dataclasses.replace(machine, versions=kept, **fields)


def line(machine, item) -> Finding:
    (found,) = (f for f in doctor.judge(machine) if f.item == item)
    return found


def assert_well_formed(findings):
    assert all(isinstance(f, Finding) for f in findings)
    assert {f.status for f in findings} <= {"ok", "warn", "fail", "info"}
    assert all(f.found for f in findings)
    assert all(f.advice.endswith(".") for f in findings if f.status in ("warn", "fail"))
    assert findings[-1].item == "fa2-numba report"


def test_a_good_machine_has_only_good_lines():
    findings = doctor.judge(GOOD)
    assert_well_formed(findings)
    assert {f.status for f in findings if f.item != "simulator"} == {"ok"}
    assert findings[-1].found == "runs on the GPU, NVIDIA H200"
    gpu = line(GOOD, "GPU").found
    assert "compute capability 9.0" in gpu
    assert "132 SMs" in gpu
    assert "232,448 bytes" in gpu


def test_a_laptop_runs_on_the_simulator():
    findings = doctor.judge(LAPTOP)
    assert_well_formed(findings)
    assert {f.status for f in findings} == {"ok", "info"}
    assert "simulator" in findings[-1].found
    assert "no CUDA GPU" in findings[-1].found


@pytest.mark.parametrize(
    ("machine", "item", "status", "said"),
    [
        (changed(python=(3, 10, 2)), "Python", "fail", "3.11 or newer"),
        (changed(versions={"numpy": "2.5.2"}), "NumPy", "fail", "numpy<2.5"),
        (changed(versions={"numpy": "2.10.0"}), "NumPy", "fail", "row_stack"),
        (changed(versions={"numpy": None}), "NumPy", "fail", "not installed"),
        (changed(versions={"numba": None}), "Numba", "fail", "not installed"),
        (changed(versions={"numba-cuda": None}), "numba-cuda", "fail", "not installed"),
        (changed(implementation="Built-in"), "numba-cuda", "fail", "Built-in"),
        (
            changed(implementation=None, errors={"implementation": "ImportError: cuda"}),
            "numba-cuda",
            "fail",
            "ImportError: cuda",
        ),
        (changed(versions={"numba-cuda": "0.31.0"}), "numba-cuda", "warn", "<0.31"),
        (changed(simulator=True), "simulator", "warn", "Unset NUMBA_ENABLE_CUDASIM"),
        (changed(driver=(11, 8)), "NVIDIA driver", "warn", "Update the driver"),
        (
            changed(gpus=(), errors={"gpus": "RuntimeError: CUDA_ERROR_NO_DEVICE"}),
            "GPU",
            "warn",
            "CUDA_ERROR_NO_DEVICE",
        ),
        (changed(nvvm=None), "CUDA toolkit", "warn", "NVVM not found"),
        (changed(nvvm=None), "CUDA toolkit", "warn", ".[cuda13]"),
        (changed(toolkit=None, driver=(12, 4)), "CUDA toolkit", "warn", ".[cuda12]"),
        (changed(driver=(12, 4)), "CUDA toolkit", "warn", "newer than the driver's CUDA 12.4"),
        (changed(gpus=(V100,)), "CUDA toolkit", "warn", ".[cuda12]"),
        (changed(driver=(12, 4)), "CuPy", "warn", "newer than the driver's CUDA 12.4"),
        (changed(versions={"cupy-cuda12x": "14.2.0"}), "CuPy", "warn", "Uninstall all of them"),
        (
            changed(versions={"cupy-cuda13x": None, "torch": None}),
            "CuPy",
            "warn",
            "no arrays on the GPU",
        ),
        (changed(torch_cuda=None), "torch", "warn", "CUDA build of torch"),
    ],
)
def test_a_conflict_is_named_with_its_advice(machine, item, status, said):
    assert_well_formed(doctor.judge(machine))
    found = line(machine, item)
    assert found.status == status
    assert said in f"{found.found} {found.advice}"


@pytest.mark.parametrize(
    ("machine", "status", "said"),
    [
        (changed(simulator=True), "ok", "NUMBA_ENABLE_CUDASIM is set"),
        (changed(gpus=()), "ok", "no CUDA GPU"),
        (changed(nvvm=None), "ok", "no CUDA toolkit"),
        (changed(driver=(12, 4)), "ok", "does not serve"),
        (changed(gpus=(V100,)), "ok", "does not serve"),
        (changed(toolkit=(12, 9), gpus=(V100,)), "ok", "runs on the GPU"),
        (changed(implementation="Built-in"), "fail", "see numba-cuda"),
        (changed(versions={"numpy": "2.5.2"}, simulator=True), "fail", "see NumPy"),
    ],
)
def test_the_last_line_says_what_the_report_will_do(machine, status, said):
    last = doctor.judge(machine)[-1]
    assert last.status == status
    assert said in last.found


def test_the_gpus_of_one_machine_are_told_apart():
    items = [f.item for f in doctor.judge(changed(gpus=(H200, V100)))]
    assert {"GPU 0", "GPU 1"} <= set(items)


def test_this_machine_can_be_diagnosed():
    findings = doctor.diagnose()
    assert_well_formed(findings)
    assert findings[-1].status == "ok"


@pytest.mark.gpu
def test_this_gpu_is_described():
    (gpu, *_) = doctor.probe().gpus
    assert gpu.name
    assert gpu.compute_capability >= (7, 0)
    assert gpu.shared_memory >= 48 * 1024
    assert gpu.sm_count > 0


def test_a_probe_that_fails_is_recorded_and_not_raised(monkeypatch):
    def broken():
        raise OSError("\nlibcuda.so.1: wrong ELF class\nmore")

    readers = ("_implementation", "_simulator", "_nvvm", "_toolkit", "_driver", "_gpus")
    for reader in (*readers, "_torch_cuda"):
        monkeypatch.setattr(doctor, reader, broken)
    machine = doctor.probe()
    assert machine.gpus == ()
    assert machine.driver is None
    assert set(machine.errors.values()) == {"OSError: libcuda.so.1: wrong ELF class"}
    assert_well_formed(doctor.judge(machine))


def test_the_driver_is_read_as_it_answers(monkeypatch):
    bindings = pytest.importorskip("cuda.bindings")
    ok, attributes = 0, {"MAJOR": 9, "MINOR": 0, "SHARED": 232_448, "SMS": 132}
    driver = SimpleNamespace(
        CUdevice_attribute=SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="MAJOR",
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="MINOR",
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="SHARED",
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="SMS",
        ),
        cuDriverGetVersion=lambda: (ok, 13000),
        cuInit=lambda flags: (ok,),
        cuDeviceGetCount=lambda: (ok, 1),
        cuDeviceGet=lambda ordinal: (ok, ordinal),
        cuDeviceGetName=lambda length, device: (ok, b"NVIDIA H200\0\0\0"),
        cuDeviceGetAttribute=lambda which, device: (ok, attributes[which]),
    )
    monkeypatch.setattr(bindings, "driver", driver, raising=False)
    machine = doctor.probe()
    assert machine.driver == (13, 0)
    assert machine.gpus == (H200,)
    monkeypatch.setattr(driver, "cuInit", lambda flags: (100,))
    assert doctor.probe().gpus == ()


@pytest.mark.parametrize(
    ("line", "cuda"),
    [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda: Optional[str] = None", None)],
)
def test_the_build_of_torch_is_read_from_its_file(line, cuda, tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\n{line}\nhip = None\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    assert doctor._torch_cuda() == cuda


def run_python(*arguments, **environment):
    """Run this Python on `arguments`, in the environment of the tests changed by `environment`."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# gpu_usable answers before Numba is imported, because Numba reads NUMBA_ENABLE_CUDASIM only then;
# this needs a package whose import does not import Numba.
def test_the_simulator_can_still_be_chosen_after_asking_for_a_gpu():
    ask = "from fa2_numba.doctor import gpu_usable; gpu_usable()"
    assert run_python("-c", f"{ask}; import sys; print('numba' in sys.modules)") == "False"


def test_the_simulator_is_never_a_gpu():
    code = "from fa2_numba.doctor import gpu_usable; print(gpu_usable())"
    assert run_python("-c", code, NUMBA_ENABLE_CUDASIM="1") == "False"


def test_an_installation_without_any_package_is_diagnosed():
    # -S leaves the installed packages out; the package itself is found from its folder.
    folder = os.path.dirname(os.path.dirname(doctor.__file__))
    code = "from fa2_numba.doctor import diagnose; print([f.status for f in diagnose()][-1])"
    assert run_python("-S", "-c", code, PYTHONPATH=folder) == "fail"
