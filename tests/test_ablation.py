"""The kernels with one idea taken back: exact, and their global traffic is fa2's."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from strategies import Backend, Case, Kernel, forall

from fa2_numba import api, io_model, reference, simulator, traffic
from fa2_numba.kernels import fa2, split_keys, steps
from fa2_numba.tiling import Tiling

STEPS = Tiling(8, 8, 4, 8)
SPLIT = Tiling(8, 32, 8, 8) if simulator.ACTIVE else Tiling(32, 64, 16, 8)
SIZE = 32
LAUNCHERS: dict[str, tuple[Any, Tiling]] = {
    **{name: (functools.partial(steps.launch, variant=name), STEPS) for name in steps.VARIANTS},
    "split keys": (split_keys.launch, SPLIT),
}


def run(name: str, backend: Backend, arrays: Any, causal: bool, **probes: Any) -> tuple[Any, Any]:
    launch, tiling = LAUNCHERS[name]
    device = [backend.to_device(x) for x in arrays]
    call = api._Call(*device, method="fa2", tiling=tiling, scale=None, out=None)
    call.change(causal, None, None, None, None, None)
    return call, call.run(launch, **probes)


def sizes(most: int) -> Any:
    return st.integers(1, most)


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@forall(2, st.booleans(), sizes(12), sizes(40))
def test_exact_and_as_fa2_in_global_memory(
    backend: Backend, name: str, dtype: str, causal: bool, N_q: int, N_k: int
) -> None:
    case = Case(Kernel(d=32), N_q=N_q, N_k=N_k)
    q, k, v = case.arrays(dtype)
    call, ran = run(name, backend, (q, k, v), causal, counted=True)
    out, lse = backend.to_host(call.out), backend.to_host(call.lse)
    reference.assert_attention(out, lse, q, k, v, causal=causal, name=name)
    differences = traffic.differences(ran.rows(), io_model.predict(ran.problem))
    if name == "split keys":  # its warps store O_i in another order: as many elements
        differences = [(a, b) for a, b in differences if (a.array, a.elements) != ("O", b.elements)]
    assert differences == []


def shared(name: str, backend: Backend) -> Any:
    case = Case(Kernel(d=32), N_q=SIZE, N_k=SIZE)
    if name == "fa2":
        LAUNCHERS["fa2"] = fa2.launch, SPLIT
    _, ran = run(name, backend, case.arrays("fp32"), False, on_chip=True)
    LAUNCHERS.pop("fa2", None)
    return ran.on_chip_rows()


def test_only_split_keys_exchanges_between_warps(backend: Backend) -> None:
    """FlashAttention-2, section 3.3: split-Q needs no communication between warps."""
    rows = {name: shared(name, backend) for name in ("fa2", "split keys")}
    assert {r.tile for r in rows["fa2"]} == {"Q_i", "K_j", "V_j", "P_ij"}
    exchanged = {r.op: r.elements for r in rows["split keys"] if r.tile == "R"}
    tiles = SPLIT.T_r(SIZE) * SPLIT.T_c(SIZE)
    warps = SPLIT.threads // 32
    assert exchanged == dict.fromkeys(("load", "store"), tiles * warps * SPLIT.B_r * 32)


def test_sizes_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="accepted for split_keys"):
        split_keys.build(Tiling(8, 8, 8, 8), 32, "fp32", None, 4, 4)
    with pytest.raises(ValueError, match="accepted for split_keys"):
        split_keys.build(SPLIT, 40, "fp32", None, 4, 4)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_phases_cover_a_block(backend: Backend, name: str) -> None:
    case = Case(Kernel(d=32), N_q=12, N_k=40)
    _, ran = run(name, backend, case.arrays("fp32"), True, timed=True)
    for seen in ran.timelines():
        total = seen.cycles.sum(axis=2)
        assert (seen.cycles >= 0).all()
        assert (total <= seen.end - seen.start).all()
        assert np.all(total > 0)
