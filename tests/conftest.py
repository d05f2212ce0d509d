"""Where the tests run, how many examples they draw, and what is counted.

Numba reads NUMBA_ENABLE_CUDASIM once, so one process is either the simulator or the real thing.
A test that asks for `backend` runs on both: unmarked on the simulator with NumPy arrays, marked
``gpu`` on the GPU with CuPy arrays. Profiles (``HYPOTHESIS_PROFILE=...`` or pytest's
``--hypothesis-profile``): "ci", quick and always the same examples; "gpu", more; "deep", nightly.
"""

import functools
import os
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fa2_numba import simulator

# FA2_TEST_GPUS=2: each xdist worker sees one of the first two GPUs, in turns.
if "FA2_TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    _worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(_worker % int(os.environ["FA2_TEST_GPUS"]))

_common: dict[str, Any] = {
    "deadline": None,  # the first example compiles, or runs in the simulator
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("ci", derandomize=True, **_common)
settings.register_profile("gpu", derandomize=True, **_common)
settings.register_profile("deep", print_blob=True, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

import strategies  # noqa: E402 - reads the profile
from strategies import Backend  # noqa: E402


@functools.cache
def _gpu_missing() -> str:
    """Why GPU tests cannot run in this process; empty if they can."""
    if simulator.ACTIVE:
        return "needs a CUDA GPU, this process is the simulator: make test-gpu"
    from numba import cuda

    if not cuda.is_available():
        return "no CUDA GPU"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what CuPy says of its toolkit while it is imported
        try:
            import cupy  # noqa: F401
        except ImportError:
            return "CuPy is not installed (extras cuda13, cuda12)"
    return ""


@pytest.fixture(scope="session", params=["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """NumPy arrays on the simulator, or CuPy arrays on the GPU."""
    if request.param == "simulator":
        if not simulator.ACTIVE:
            pytest.skip("runs on the simulator: NUMBA_ENABLE_CUDASIM=1")
        return Backend("simulator", lambda x: x, lambda x: x)
    import cupy

    return Backend("gpu", cupy.asarray, cupy.asnumpy)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part of the tests where FA2_TEST_PART says "K/N"; a test function stays whole."""
    if "FA2_TEST_PART" not in os.environ:
        return
    k, n = (int(x) for x in os.environ["FA2_TEST_PART"].split("/"))
    names = sorted({item.nodeid.split("[")[0] for item in items})
    mine = set(names[k - 1 :: n])
    kept = [item for item in items if item.nodeid.split("[")[0] in mine]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run here, and everything after the time limit."""
    if item.get_closest_marker("gpu") and (why := _gpu_missing()):
        pytest.skip(why)
    if item.get_closest_marker("codegen") and simulator.ACTIVE:
        pytest.skip("compiles: NUMBA_ENABLE_CUDASIM=0")
    if strategies.too_late():
        pytest.skip("time limit of this run")


# ---- how many examples ran --------------------------------------------------------------------

_of_workers = dict.fromkeys(strategies.examples, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """xdist: add up what the workers ran."""
    for what, number in getattr(node, "workeroutput", {}).get("examples", {}).items():
        _of_workers[what] += number


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """xdist: tell the controller how many examples this worker ran."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["examples"] = strategies.examples


def examples_counted() -> dict[str, int]:
    """Examples that this process and its workers ran, and those left out for lack of time."""
    return {what: number + _of_workers[what] for what, number in strategies.examples.items()}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say it."""
    ran = examples_counted()
    more = f", {ran['left_out']} left out by the time limit" if ran["left_out"] else ""
    terminalreporter.write_line(f"{ran['run']} examples of properties ran{more}")
