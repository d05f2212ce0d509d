"""Small kernels of sm_90's instructions: test_ptx.py runs them, test_ptx_code.py reads their code.

Each builder returns the kernel and its bytes of shared memory. Matrices lie there in boxes of 64
columns; an operand that is MN-major is transposed in global memory already.
"""

from typing import Any

import numpy as np
from numba import cuda, float32, uint32

from fa2_numba import hbm, ptx, smem

COLUMNS = 64  # of a box
WARPGROUP = 128
PACK = {"bf16": ptx.cvt_rn_bf16x2_f32, "fp16": ptx.cvt_rn_f16x2_f32}


@hbm.device
def start_barrier(barrier, arrivals):
    if cuda.threadIdx.x == 0:
        ptx.mbarrier_init(barrier, arrivals)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()


@hbm.device
def load_boxes(start, tensor, boxes, box_bytes, row, barrier):
    """A row of boxes, by one thread."""
    for i in range(boxes):
        at = ptx.smem_address(start + i * box_bytes)
        ptx.cp_async_bulk_tensor_2d_load(at, tensor, i * COLUMNS, row, barrier)


@hbm.device
def k_major(start):
    return ptx.matrix_descriptor(ptx.smem_address(start), 0, ptx.PATTERN_BYTES)


@hbm.device
def mn_major(start, box_bytes):
    return ptx.matrix_descriptor(ptx.smem_address(start), box_bytes, ptx.PATTERN_BYTES)


@hbm.device
def store_accumulators(C, D, first, n):
    """Rows `first` to `first` + 63 of C, by their warpgroup."""
    lane, warp = uint32(cuda.laneid), uint32(cuda.threadIdx.x) // uint32(32) % uint32(4)
    row = uint32(first) + uint32(16) * warp + lane // uint32(4)
    for c in range(n // 8):
        column = uint32(8) * uint32(c) + uint32(2) * (lane % uint32(4))
        C[row, column] = D[4 * c]
        C[row, column + uint32(1)] = D[4 * c + 1]
        C[row + uint32(8), column] = D[4 * c + 2]
        C[row + uint32(8), column + uint32(1)] = D[4 * c + 3]


def product(n: int, k: int, dtype: str, a_mn: bool = False, b_mn: bool = False) -> Any:
    """``kernel(A map, B map, C)``: C = A B^T by a warpgroup, A 64 x k, B n x k, C float32."""
    a_boxes, a_bytes = (1, k * ptx.ROW_BYTES) if a_mn else (k // COLUMNS, 64 * ptx.ROW_BYTES)
    b_boxes, b_bytes = (
        (n // COLUMNS, k * ptx.ROW_BYTES) if b_mn else (k // COLUMNS, n * ptx.ROW_BYTES)
    )
    b_start = a_boxes * a_bytes
    end = b_start + b_boxes * b_bytes
    a_steps = ptx.mn_major_steps(k) if a_mn else ptx.k_major_steps(k, a_bytes)
    b_steps = ptx.mn_major_steps(k) if b_mn else ptx.k_major_steps(k, b_bytes)
    mma = ptx.wgmma_mma_async(n, dtype, a_steps, b_steps, transpose_a=a_mn, transpose_b=b_mn)
    held = n // 2
    fence, wait = ptx.wgmma_fence(held), ptx.wgmma_wait_group(0, held)

    def kernel(A, B, C):
        D = cuda.local.array(held, float32)
        full = ptx.smem_address(end)
        start_barrier(full, 1)
        if cuda.threadIdx.x == 0:
            ptx.fence_proxy_tensormap(A)
            ptx.fence_proxy_tensormap(B)
            ptx.mbarrier_arrive_expect_tx(full, end)
            load_boxes(0, A, a_boxes, a_bytes, 0, full)
            load_boxes(b_start, B, b_boxes, b_bytes, 0, full)
        ptx.mbarrier_try_wait_parity(full, 0)
        fence(D)
        a = mn_major(0, a_bytes) if a_mn else k_major(0)
        b = mn_major(b_start, b_bytes) if b_mn else k_major(b_start)
        mma(D, a, b, 0)
        ptx.wgmma_commit_group()
        wait(D)
        store_accumulators(C, D, 0, n)

    return hbm.jit(kernel), end + 8


def two_products(n: int, d: int, dtype: str) -> Any:
    """``kernel(Q map, K map, V map, O map)``: O = P V with P = Q K^T in 16 bits, in registers.

    Q is 64 x d, K and V are n x d. O leaves by stmatrix and a tensor copy, in place of Q.
    """
    boxes, q_bytes, k_bytes = d // COLUMNS, 64 * ptx.ROW_BYTES, n * ptx.ROW_BYTES
    k_start = boxes * q_bytes
    v_start = k_start + boxes * k_bytes
    end = v_start + boxes * k_bytes
    qk = ptx.wgmma_mma_async(n, dtype, ptx.k_major_steps(d, q_bytes), ptx.k_major_steps(d, k_bytes))
    pv = ptx.wgmma_mma_async(
        d,
        dtype,
        tuple(range(0, n // 4, 4)),
        ptx.mn_major_steps(n),
        a_in_registers=True,
        transpose_b=True,
    )
    of_S, of_P, of_O = n // 2, n // 4, d // 2
    fence_S, wait_S = ptx.wgmma_fence(of_S), ptx.wgmma_wait_group(0, of_S)
    fence_O_P, wait_O = ptx.wgmma_fence(of_O, of_P), ptx.wgmma_wait_group(0, of_O)
    stores_read = ptx.cp_async_bulk_wait_group_read(0)
    pack = PACK[dtype]

    def kernel(Q, K, V, O):
        S = cuda.local.array(of_S, float32)
        P = cuda.local.array(of_P, uint32)
        acc = cuda.local.array(of_O, float32)
        full = ptx.smem_address(end)
        start_barrier(full, 1)
        if cuda.threadIdx.x == 0:
            for tensor in (Q, K, V, O):
                ptx.fence_proxy_tensormap(tensor)
            ptx.mbarrier_arrive_expect_tx(full, end)
            load_boxes(0, Q, boxes, q_bytes, 0, full)
            load_boxes(k_start, K, boxes, k_bytes, 0, full)
            load_boxes(v_start, V, boxes, k_bytes, 0, full)
        ptx.mbarrier_try_wait_parity(full, 0)

        fence_S(S)
        qk(S, k_major(0), k_major(k_start), 0)
        ptx.wgmma_commit_group()
        wait_S(S)
        for c in range(of_P):
            P[c] = pack(S[2 * c + 1], S[2 * c])
        fence_O_P(acc, P)
        pv(acc, P, 0, mn_major(v_start, k_bytes), 0)
        ptx.wgmma_commit_group()
        wait_O(acc)
        ptx.bar_sync(1, WARPGROUP)  # no warp's products read Q any more

        lane, warp = uint32(cuda.laneid), uint32(cuda.threadIdx.x) // uint32(32)
        row = uint32(16) * warp + lane % uint32(16)  # of one matrix of four: two above, two beside
        for c in range(d // 16):
            piece = uint32(2) * uint32(c % 4) + lane // uint32(16)
            place = ptx.swizzle_128b(row * uint32(ptx.ROW_BYTES) + uint32(16) * piece)
            ptx.stmatrix_x4(
                ptx.smem_address(uint32(c // 4 * q_bytes) + place),
                pack(acc[8 * c + 1], acc[8 * c]),
                pack(acc[8 * c + 3], acc[8 * c + 2]),
                pack(acc[8 * c + 5], acc[8 * c + 4]),
                pack(acc[8 * c + 7], acc[8 * c + 6]),
            )
        ptx.fence_proxy_async()
        ptx.bar_sync(1, WARPGROUP)
        if cuda.threadIdx.x == 0:
            for i in range(boxes):
                at = ptx.smem_address(i * q_bytes)
                ptx.cp_async_bulk_tensor_2d_store(O, i * COLUMNS, 0, at)
            ptx.cp_async_bulk_commit_group()
            stores_read()

    return hbm.jit(kernel), end + 8


def copy_box(rows: int) -> Any:
    """``kernel(from map, to map, column, row, head, batch, seen)``: one box there and back.

    `seen` is what arrived, rows x 64.
    """
    size = rows * ptx.ROW_BYTES
    box = smem.shared_tile(rows, COLUMNS, np.uint16, 0)
    stores_read = ptx.cp_async_bulk_wait_group_read(0)

    def kernel(source, target, column, row, head, batch, seen):
        at, full = ptx.smem_address(0), ptx.smem_address(size)
        start_barrier(full, 1)
        if cuda.threadIdx.x == 0:
            ptx.fence_proxy_tensormap(source)
            ptx.fence_proxy_tensormap(target)
            ptx.mbarrier_arrive_expect_tx(full, size)
            ptx.cp_async_bulk_tensor_4d_load(at, source, column, row, head, batch, full)
        ptx.mbarrier_try_wait_parity(full, 0)
        T = box(None)
        c = cuda.threadIdx.x
        for r in range(rows):
            place = ptx.swizzle_128b(r * ptx.ROW_BYTES + 2 * c)
            seen[r, c] = T[r, place % uint32(ptx.ROW_BYTES) // uint32(2)]
        if c == 0:
            ptx.cp_async_bulk_tensor_4d_store(target, column, row, head, batch, at)
            ptx.cp_async_bulk_commit_group()
            stores_read()

    return hbm.jit(kernel), size + 8


def transposed_matrices() -> Any:
    """``kernel(source, seen)``: a warp stores four 8 x 8 matrices by stmatrix, transposed.

    `source` and `seen` are 32 x 8 of 16 bits, the matrices one below the other.
    """
    tile = smem.shared_tile(32, 8, np.uint16, 0)

    def kernel(source, seen):
        lane = uint32(cuda.laneid)
        row, column = lane // uint32(4), uint32(2) * (lane % uint32(4))
        words = cuda.local.array(4, uint32)
        for m in range(4):
            low = uint32(source[uint32(8 * m) + row, column])
            words[m] = low | uint32(source[uint32(8 * m) + row, column + uint32(1)]) << uint32(16)
        at = ptx.smem_address(uint32(16) * lane)
        ptx.stmatrix_x4_trans(at, words[0], words[1], words[2], words[3])
        cuda.syncwarp()
        T = tile(None)
        for c in range(8):
            seen[lane, c] = T[lane, c]

    return hbm.jit(kernel), 32 * 16


def matrices() -> Any:
    """``kernel(source, seen)``: a warp loads four 8 x 8 matrices by ldmatrix.

    `source` and `seen` are 32 x 8 of 16 bits, the matrices one below the other.
    """
    tile = smem.shared_tile(32, 8, np.uint16, 0)

    def kernel(source, seen):
        lane = uint32(cuda.laneid)
        T = tile(None)
        for c in range(8):
            T[lane, c] = source[lane, c]
        cuda.syncwarp()
        words = cuda.local.array(4, uint32)
        ptx.ldmatrix_x4(words, ptx.smem_address(uint32(16) * lane))
        row, column = lane // uint32(4), uint32(2) * (lane % uint32(4))
        for m in range(4):
            seen[uint32(8 * m) + row, column] = words[m]
            seen[uint32(8 * m) + row, column + uint32(1)] = words[m] >> uint32(16)

    return hbm.jit(kernel), 32 * 16


def shared_vectors() -> Any:
    """``kernel(source, seen)``: 32 x 4 to shared memory by fours, and back from it by twos."""

    def kernel(source, seen):
        lane = uint32(cuda.laneid)
        at = ptx.smem_address(uint32(16) * lane)
        ptx.st_shared_v4_f32(at, source[lane, 0], source[lane, 1], source[lane, 2], source[lane, 3])
        cuda.syncwarp()
        two = cuda.local.array(2, float32)
        for half in range(2):
            ptx.ld_shared_v2_f32(
                two, uint32(ptx.smem_address(uint32(256 * half) + uint32(8) * lane))
            )
            for c in range(2):
                seen[uint32(32 * half) + lane, c] = two[c]

    return hbm.jit(kernel), 32 * 16


def bulk_adds(n: int, times: int) -> Any:
    """``kernel(x, place)``: n numbers of x are added to those at the address `place`, so often."""
    tile = smem.shared_tile(1, n, np.float32, 0)
    adds_read = ptx.cp_async_bulk_wait_group_read(0)

    def kernel(x, place):
        T = tile(None)
        thread = uint32(cuda.threadIdx.x)
        T[0, thread] = x[thread]
        ptx.fence_proxy_async()
        cuda.syncthreads()
        if thread == uint32(0):
            for _ in range(times):
                ptx.cp_reduce_async_bulk_add_f32(
                    np.uint64(place), ptx.smem_address(0), uint32(4 * n)
                )
            ptx.cp_async_bulk_commit_group()
            adds_read()

    return hbm.jit(kernel), 4 * n


def pipeline(n: int, dtype: str = "bf16") -> Any:
    """``kernel(A map, B map, tiles, C)``: C = A B^T over tiles of 64 k, two of them in flight.

    A is 128 x k, B n x k. The first warpgroup copies, each of the other two multiplies 64 rows;
    these take turns on the barriers 1 and 2.
    """
    stages, a_bytes, b_bytes = 2, WARPGROUP * ptx.ROW_BYTES, n * ptx.ROW_BYTES
    b_start = stages * a_bytes
    full = b_start + stages * b_bytes
    empty = full + 8 * stages
    steps = ptx.k_major_steps(COLUMNS, 0)
    mma = ptx.wgmma_mma_async(n, dtype, steps, steps)
    held = n // 2
    fence, wait = ptx.wgmma_fence(held), ptx.wgmma_wait_group(0, held)
    fewer, more = ptx.setmaxnreg_dec(24), ptx.setmaxnreg_inc(240)

    def kernel(A, B, tiles, C):
        thread = uint32(cuda.threadIdx.x)
        group = thread // uint32(WARPGROUP)
        if thread == 0:
            for s in range(stages):
                ptx.mbarrier_init(ptx.smem_address(full + 8 * s), 1)
                ptx.mbarrier_init(ptx.smem_address(empty + 8 * s), 2)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if group == 0:
            fewer()
            if thread < 32 and ptx.elect_sync():
                ptx.fence_proxy_tensormap(A)
                ptx.fence_proxy_tensormap(B)
                for t in range(tiles):
                    s, phase = uint32(t) % uint32(2), uint32(t) // uint32(2) % uint32(2)
                    barrier = ptx.smem_address(uint32(full) + uint32(8) * s)
                    ptx.mbarrier_try_wait_parity(
                        ptx.smem_address(uint32(empty) + uint32(8) * s), phase ^ uint32(1)
                    )
                    ptx.mbarrier_arrive_expect_tx(barrier, a_bytes + b_bytes)
                    at = ptx.smem_address(s * uint32(a_bytes))
                    ptx.cp_async_bulk_tensor_2d_load(at, A, t * COLUMNS, 0, barrier)
                    at = ptx.smem_address(uint32(b_start) + s * uint32(b_bytes))
                    ptx.cp_async_bulk_tensor_2d_load(at, B, t * COLUMNS, 0, barrier)
        else:
            more()
            D = cuda.local.array(held, float32)
            first = (group - uint32(1)) * uint32(64)
            if group == 2:
                ptx.bar_arrive(1, 2 * WARPGROUP)  # the first turn is group 1's
            for t in range(tiles):
                s, phase = uint32(t) % uint32(2), uint32(t) // uint32(2) % uint32(2)
                ptx.mbarrier_try_wait_parity(ptx.smem_address(uint32(full) + uint32(8) * s), phase)
                a = s * uint32(a_bytes) + first * uint32(ptx.ROW_BYTES)
                b = uint32(b_start) + s * uint32(b_bytes)
                ptx.bar_sync(group, 2 * WARPGROUP)
                fence(D)
                mma(D, k_major(a), k_major(b), t)
                ptx.wgmma_commit_group()
                if group == 1 or t + 1 < tiles:
                    ptx.bar_arrive(uint32(3) - group, 2 * WARPGROUP)
                wait(D)
                if thread % uint32(WARPGROUP) == 0:
                    ptx.mbarrier_arrive(ptx.smem_address(uint32(empty) + uint32(8) * s))
            store_accumulators(C, D, first, n)

    return cuda.jit(kernel, launch_bounds=(3 * WARPGROUP, 1)), empty + 8 * stages
