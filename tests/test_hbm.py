"""Counts of kernels that are small enough to count by hand, on the simulator and on a GPU.

fp32 in rows of 32: a warp's contiguous load is 32 elements, 1 request, 4 sectors.
"""

from typing import Any

import numpy as np
import pytest
from numba import cuda
from strategies import Backend

from fa2_numba import hbm, launch, simulator
from fa2_numba.hbm import ATOMIC, LOAD, STORE, Counted

WARP = 32
simulated = pytest.mark.skipif(not simulator.ACTIVE, reason="about the simulator's counting")


def memory(backend: Backend, host: np.ndarray) -> Any:
    """`host` where a kernel can take it, from a multiple of 256 bytes on."""
    if backend.name == "gpu":
        return cuda.to_device(host)
    raw = np.empty(host.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    array = np.ndarray(host.shape, host.dtype, raw.data, start)
    array[...] = host
    return array


def run(kernel: Any, *args: Any, blocks: int = 1, threads: int = WARP) -> None:
    launch.launch(hbm.jit(kernel), blocks, threads, 0, 0, *args)


def tally(A: Counted, op: int, row: int = 0) -> tuple[int, int, int]:
    """(elements, requests, sectors)."""
    counts = A.counts()
    assert counts.dtype == np.int64 and counts.shape == (A.phases, hbm.OPS, hbm.KINDS)
    elements, _, requests, sectors = (int(n) for n in counts[row, op])
    return elements, requests, sectors


@pytest.fixture
def vector(backend: Backend) -> Counted:
    """1024 floats."""
    return Counted(memory(backend, np.arange(1024, dtype=np.float32)))


@pytest.fixture
def out(backend: Backend) -> Counted:
    """1024 floats."""
    return Counted(memory(backend, np.zeros(1024, np.float32)))


# ---- elements, requests, sectors --------------------------------------------------------------


def test_contiguous(backend: Backend, vector: Counted, out: Counted) -> None:
    def copy(A, B):
        i = cuda.blockIdx.x * 64 + cuda.threadIdx.x
        B[i,] = A[i,]

    run(copy, vector, out, blocks=3, threads=64)
    assert tally(vector, LOAD) == (192, 6, 24)
    assert tally(out, STORE) == (192, 6, 24)
    assert tally(vector, STORE) == tally(out, LOAD) == (0, 0, 0)


def test_the_first_launch_counts_as_the_later_ones(backend: Backend) -> None:
    """CPython specialises an instruction after some executions, and its place then reads anew."""

    def copy(A):
        A[cuda.blockIdx.x * 32 + cuda.threadIdx.x,] = A[cuda.threadIdx.x,]

    counts = []
    for _ in range(3):
        A = Counted(memory(backend, np.zeros(256, np.float32)))
        run(copy, A, blocks=8)
        counts.append((tally(A, LOAD), tally(A, STORE)))
    assert counts == [((256, 8, 32), (256, 8, 32))] * 3


@pytest.mark.parametrize(("step", "sectors"), [(0, 1), (1, 4), (2, 8), (4, 16), (8, 32), (16, 32)])
def test_strided(vector: Counted, step: int, sectors: int) -> None:
    def read(A, step, B):
        B[0,] = A[cuda.threadIdx.x * step,]

    run(read, vector, step, vector)
    assert tally(vector, LOAD) == (32, 1, sectors)
    assert tally(vector, STORE) == (32, 1, 1)


@pytest.mark.parametrize(("first", "sectors"), [(0, 4), (1, 5), (7, 5), (8, 4)])
def test_misaligned(vector: Counted, first: int, sectors: int) -> None:
    def read(A, first, B):
        B[0,] = A[first + cuda.threadIdx.x,]

    run(read, vector, first, vector)
    assert tally(vector, LOAD) == (32, 1, sectors)


def test_strides_of_the_array(backend: Backend) -> None:
    """A column of a matrix, rows backwards: the address decides, not the index."""
    A = Counted(memory(backend, np.zeros((WARP, 16), np.float32))[::-1, 3:4])

    def read(A):
        A[cuda.threadIdx.x, 0] = A[cuda.threadIdx.x, 0]

    run(read, A)
    assert tally(A, LOAD) == tally(A, STORE) == (32, 1, 32)


@pytest.mark.parametrize(
    ("dtype", "sectors"),
    [(np.uint8, 1), (np.float16, 2), (np.uint16, 2), (np.float32, 4), (np.float64, 8)],
)
def test_itemsizes(backend: Backend, dtype: Any, sectors: int) -> None:
    A = Counted(memory(backend, np.zeros(WARP, dtype)))

    def read(A):
        A[cuda.threadIdx.x,] = A[cuda.threadIdx.x,]

    run(read, A)
    assert tally(A, LOAD) == tally(A, STORE) == (32, 1, sectors)


@pytest.mark.parametrize("active", [0, 1, 5, 31, 32, 33, 64])
def test_guarded(vector: Counted, out: Counted, active: int) -> None:
    """Lanes that are out do not count, and neither does a warp of them."""

    def copy(A, B, N):
        i = cuda.threadIdx.x
        if i < N:
            B[i,] = A[i,]

    run(copy, vector, out, active, threads=64)
    expected = (active, -(-active // 32), -(-active // 8))
    assert tally(vector, LOAD) == tally(out, STORE) == expected


def test_two_branches_are_two_instructions(vector: Counted, out: Counted) -> None:
    def copy(A, B):
        i = cuda.threadIdx.x
        if i % 2 == 0:
            B[i,] = A[i,]
        else:
            B[i,] = A[i,] + 1

    run(copy, vector, out)
    assert tally(vector, LOAD) == tally(out, STORE) == (32, 2, 8)


def test_loops_with_guards(vector: Counted, out: Counted) -> None:
    """One instruction an iteration of both loops, also where lanes skip some."""

    def copy(A, B):
        i = cuda.threadIdx.x
        for s in range(2):
            for t in range(3):
                if i < 8 * t:
                    B[s * 32 + i,] = A[i,]

    run(copy, vector, out)
    assert tally(vector, LOAD) == tally(out, STORE) == (2 * 24, 4, 2 * 3)


def test_device_functions_called_twice(vector: Counted) -> None:
    def read(A, i):
        return A[i,]

    read = hbm.device(read)

    def kernel(A):
        i = cuda.threadIdx.x
        A[i,] = read(A, i) + read(A, i + 8)

    run(kernel, vector)
    assert tally(vector, LOAD) == (64, 2, 8)
    assert tally(vector, STORE) == (32, 1, 4)


def test_blocks_and_warps_are_apart(vector: Counted) -> None:
    """The same address from two blocks or two warps is as many requests and sectors."""

    def kernel(A, B):
        B[0,] = A[0,]

    run(kernel, vector, vector, blocks=3, threads=96)
    assert tally(vector, LOAD) == (288, 9, 9)


# ---- vector accesses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(np.float32, 4), (np.float32, 2), (np.float32, 1), (np.float64, 2), (np.uint16, 8)],
)
def test_vectors(backend: Backend, dtype: Any, width: int) -> None:
    load, store = hbm.vector_load(width), hbm.vector_store(width)
    element = dtype

    def copy(A, B):
        x = cuda.local.array(width, element)
        load(A, (0, cuda.threadIdx.x * width), x, 0)
        store(B, (1, cuda.threadIdx.x * width), x, 0)

    host = np.arange(2 * WARP * width).astype(dtype).reshape(2, -1)
    A, B = (Counted(memory(backend, x)) for x in (host, np.zeros_like(host)))
    run(copy, A, B)
    sectors = WARP * width * np.dtype(dtype).itemsize // 32
    assert tally(A, LOAD) == tally(B, STORE) == (WARP * width, 1, sectors)
    copied = B.data if backend.name == "simulator" else B.data.copy_to_host()
    np.testing.assert_array_equal(copied[1], host[0])


def test_vectors_into_the_middle(backend: Backend) -> None:
    """`at` places the vector in the local array."""
    load, store = hbm.vector_load(2), hbm.vector_store(2)

    def swap(A):
        x = cuda.local.array(4, np.float32)
        load(A, (0,), x, 2)
        load(A, (2,), x, 0)
        store(A, (0,), x, 0)
        store(A, (2,), x, 2)

    A = memory(backend, np.arange(4, dtype=np.float32))
    run(swap, A, threads=1)
    assert (A if backend.name == "simulator" else A.copy_to_host()).tolist() == [2, 3, 0, 1]


# ---- phases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("counted", [False, True])
def test_atomic_adds(backend: Backend, dtype: Any, counted: bool) -> None:
    """64 lanes add to neighbours, then all to one element: none of the sums is lost."""

    def add(A, B):
        i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
        hbm.atomic_add(A, (i,), i)
        hbm.atomic_add(B, (1,), 0.5)

    A, B = (memory(backend, np.full(64, start, dtype)) for start in (1, 0))
    arrays = [Counted(A), Counted(B)] if counted else [A, B]
    run(add, *arrays, blocks=2)
    neighbours, one = (x.copy_to_host() if backend.name == "gpu" else x for x in (A, B))
    np.testing.assert_array_equal(neighbours, np.arange(64) + 1)
    assert one[1] == 32 and one.sum() == 32
    if counted:
        assert tally(arrays[0], ATOMIC) == (64, 2, 64 * np.dtype(dtype).itemsize // 32)
        assert tally(arrays[1], ATOMIC) == (64, 2, 2)
        assert all(tally(x, op) == (0, 0, 0) for x in arrays for op in (LOAD, STORE))


def test_phases(backend: Backend) -> None:
    A = Counted(memory(backend, np.arange(64, dtype=np.float32)), phases=3)

    def kernel(A):
        i = cuda.threadIdx.x
        x = hbm.phase(A, 0)[i,] + hbm.phase(A, 2)[i + 32,]
        A[i,] = x + A[i,]  # row 0, where nothing is said

    run(kernel, A)
    assert tally(A, LOAD, 0) == (64, 2, 8)
    assert tally(A, LOAD, 1) == tally(A, STORE, 1) == tally(A, STORE, 2) == (0, 0, 0)
    assert tally(A, LOAD, 2) == tally(A, STORE, 0) == (32, 1, 4)


def test_a_phase_of_a_plain_array_is_the_array(backend: Backend) -> None:
    def kernel(A):
        A[cuda.threadIdx.x,] = hbm.phase(A, 1)[cuda.threadIdx.x,] + 1

    A = memory(backend, np.zeros(WARP, np.float32))
    run(kernel, A)
    assert ((A if backend.name == "simulator" else A.copy_to_host()) == 1).all()


def test_counting_does_not_change_what_is_computed(backend: Backend) -> None:
    def kernel(A):
        i = cuda.threadIdx.x
        A[i,] = A[A.shape[0] - 1 - i,] * 2

    plain, counted = (memory(backend, np.arange(64, dtype=np.float32)) for _ in range(2))
    run(kernel, plain)
    run(kernel, Counted(counted))
    to_host = (lambda x: x) if backend.name == "simulator" else (lambda x: x.copy_to_host())
    np.testing.assert_array_equal(to_host(plain), to_host(counted))


def test_counts_add_up_over_launches(vector: Counted) -> None:
    def kernel(A):
        A[cuda.threadIdx.x,] = 0

    for n in range(1, 4):
        run(kernel, vector)
        assert tally(vector, STORE) == (32 * n, n, 4 * n)


# ---- what may not be --------------------------------------------------------------------------


@simulated
def test_a_while_loop_raises() -> None:
    """Its iterations have no counter to tell them apart; on a GPU it would count rightly."""
    A = Counted(np.zeros(64, np.float32))

    def kernel(A):
        n = 0
        while n < 2:
            A[cuda.threadIdx.x,] = n
            n += 1

    with pytest.raises(RuntimeError, match="for loops over one counter"):
        run(kernel, A)


@simulated
@pytest.mark.parametrize("index", [(32,), (-1,), (40,)])
def test_an_index_outside_raises(index: tuple[int]) -> None:
    for access in (lambda A, i: A[i], lambda A, i: A.__setitem__(i, 0)):
        A = Counted(np.zeros(32, np.float32))
        with pytest.raises(IndexError, match=r"outside the shape \(32,\)"):
            run(lambda A, access=access: access(A, index), A, threads=1)


@simulated
def test_an_index_that_is_not_full_raises() -> None:
    A = Counted(np.zeros((4, 4), np.float32))
    with pytest.raises(TypeError, match="full index"):
        run(lambda A: A[0], A, threads=1)


@simulated
def test_indexing_on_the_host_raises() -> None:
    with pytest.raises(AssertionError, match="inside a kernel"):
        Counted(np.zeros(4, np.float32))[(0,)]


# On a GPU, what `hbm` does not define for a counted array does not compile: test_codegen.py.
