"""Shared-memory tiles that count: the rule of the banks, and the counts of a warp."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numba import cuda
from numba.core.errors import TypingError
from strategies import Backend, Case, Kernel, forall

from fa2_numba import api, hbm, launch, simulator, smem
from fa2_numba.hbm import LOAD, STORE
from fa2_numba.tiling import Tiling

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
READ = [
    row
    for path in sorted(RESULTS.glob("*/banks.json"))
    for row in json.loads(path.read_text())["rows"]
]


# ---- the rule ---------------------------------------------------------------------------------


def test_the_rule_is_what_the_hardware_counted():
    assert len(READ) >= 150
    assert {(row["op"], row["size"]) for row in READ} == {
        (op, size) for op in ("load", "store") for size in (4, 8, 16)
    }
    for row in READ:
        lanes = dict(enumerate(row["addresses"]))
        found = smem.wavefronts(lanes, row["size"])
        assert found == (row["wavefronts"], row["conflicts"]), row
        assert len(set(row["addresses"])) * row["size"] == row["bytes"], row


@pytest.mark.parametrize("size", [4, 8, 16])
def test_limits(size):
    in_a_row = {lane: lane * size for lane in range(32)}
    assert smem.wavefronts(in_a_row, size) == (size // 4, 0)
    one_bank = {lane: lane * smem.ALIGNMENT for lane in range(32)}
    assert smem.wavefronts(one_bank, size) == (32, 32 - size // 4)
    assert smem.wavefronts({}, size) == (0, 0)
    assert smem.wavefronts({17: 4096}, size) == (1, 0)


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match="size: got 2, accepted: 4, 8, 16 bytes"):
        smem.wavefronts({0: 0}, 2)


def test_a_narrow_tile_does_not_count(backend: Backend) -> None:
    tile = smem.shared_tile(1, 64, np.uint16, 0)

    def kernel(shared):
        tile(shared)[0, 0] = np.uint16(1)

    launch.launch(hbm.jit(kernel), 1, 32, 0, 128, None)
    error = TypeError if simulator.ACTIVE else TypingError
    with pytest.raises(error, match="elements of 4 or 8 bytes, got uint16"):
        launch.launch(hbm.jit(kernel), 1, 32, 0, 128, smem.SharedTally(1).argument)


def test_widest():
    assert [smem.widest(n, 4) for n in (8, 4, 2, 1)] == [4, 4, 2, 1]
    assert [smem.widest(n, 8) for n in (4, 2, 1)] == [2, 2, 1]


# ---- counts -----------------------------------------------------------------------------------


@functools.cache
def probe(width: int, op: int) -> Any:
    tile = smem.shared_tile(1, 1024, np.float32, 0, row=1)
    move = smem.vector_load(width) if op == LOAD else smem.vector_store(width)

    def kernel(first, out, lanes, shared):
        T, lane = tile(shared), cuda.threadIdx.x
        x = cuda.local.array(width, np.float32)
        for c in range(width):
            x[c] = np.float32(lane)
        if lane < lanes:
            move(T, (np.uint32(0), np.uint32(first[lane])), x, 0)
        for c in range(width):
            out[lane * width + c] = x[c]

    return hbm.jit(kernel)


def counted(backend: Backend, places: list[int], width: int, op: int) -> tuple[int, ...]:
    first, out = np.zeros(32, np.int64), np.zeros(32 * width, np.float32)
    first[: len(places)] = [place * width for place in places]
    tally = smem.SharedTally(2)
    arguments = [backend.to_device(first), backend.to_device(out)]
    launch.launch(probe(width, op), 1, 32, 0, 4096, *arguments, len(places), tally.argument)
    counts = tally.counts()
    assert not counts[0].any() and not counts[1, 1 - op].any()
    return tuple(int(n) for n in counts[1, op])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("op", [LOAD, STORE])
@forall(4, st.lists(st.integers(0, 255), min_size=1, max_size=32), st.sampled_from([1, 2, 4, 8]))
def test_a_warp_is_counted_by_the_rule(
    backend: Backend, width: int, op: int, places: list[int], runs: int
) -> None:
    places = [places[n // runs * runs] for n in range(len(places))]  # lanes that share a word
    lanes = {lane: 4 * width * place for lane, place in enumerate(places)}
    passes, conflicts = smem.wavefronts(lanes, 4 * width)
    moved = len(set(places)) * 4 * width
    expected = (width * len(places), 1, moved, passes, conflicts)
    assert counted(backend, places, width, op) == expected


def test_a_plain_access_is_counted(backend: Backend) -> None:
    tile = smem.shared_tile(4, 32, np.float32, 128)

    def kernel(out, shared):
        T, lane = tile(shared), cuda.threadIdx.x
        T[lane % 4, lane] = np.float32(lane)
        cuda.syncthreads()
        out[lane] = T[lane % 4, lane] + T[0, 0]

    tally, out = smem.SharedTally(1), backend.to_device(np.zeros(32, np.float32))
    launch.launch(hbm.jit(kernel), 1, 32, 0, 1024, out, tally.argument)
    counts = tally.counts()[0]
    assert counts[STORE].tolist() == [32, 1, 128, 1, 0]
    assert counts[LOAD].tolist() == [64, 2, 128 + 4, 2, 0]
    assert backend.to_host(out).tolist() == list(range(32))


@pytest.mark.parametrize("method", api.PORTABLE)
def test_counting_changes_no_bit(backend: Backend, method: str) -> None:
    tiling = Tiling(8, 8, 4, 8) if simulator.ACTIVE else Tiling(16, 16, 4, 8)
    case = Case(Kernel(d=6, tiling=tiling), N_q=11, N_k=19)
    arrays = [backend.to_device(x) for x in case.arrays("fp32")]
    plain = backend.to_host(api.attention(*arrays, method=method, tiling=tiling, causal=True))
    measured = api.measure(*arrays, method=method, tiling=tiling, causal=True, on_chip=True)
    assert backend.to_host(measured.out).tobytes() == plain.tobytes()
    assert {row.tile for row in measured.on_chip} == {"Q_i", "K_j", "V_j", "P_ij"}
    assert all(row.wavefronts >= row.requests > 0 for row in measured.on_chip)
    assert api.measure(*arrays, method=method, tiling=tiling).on_chip == []
