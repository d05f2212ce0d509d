"""Instructions on single values, and the special registers.

Each has a NumPy stand-in for the simulator, with the same meaning (not the same last bit, for
``ex2.approx``).
"""

from typing import Any

import numpy as np

from fa2_numba import simulator
from fa2_numba.ptx.emit import instruction


def _bf16_bits(x: np.float32) -> np.uint16:
    import ml_dtypes

    return np.float32(x).astype(ml_dtypes.bfloat16).view(np.uint16)


def _permuted(a: Any, b: Any, selector: Any) -> np.uint32:
    given = np.array([a, b], np.uint32).view(np.uint8)
    digits = [int(selector) >> 4 * n & 0xF for n in range(4)]
    chosen = [given[x % 8] if x < 8 else 0xFF * (given[x % 8] >> 7) for x in digits]
    return np.uint32(np.array(chosen, np.uint8).view(np.uint32)[0])


ex2_approx_ftz_f32 = instruction(
    # "Floating Point Instructions: ex2". 2**x, at most 2 ulp off, subnormals flushed to zero.
    "ex2.approx.ftz.f32 $0, $1;",
    "=f,f",
    "float32",
    ("float32",),
    lambda x: np.exp2(x, dtype=np.float32),
)

rcp_approx_ftz_f32 = instruction(
    # "Floating Point Instructions: rcp". 1 / x, at most 1 ulp off, subnormals flushed to zero.
    "rcp.approx.ftz.f32 $0, $1;",
    "=f,f",
    "float32",
    ("float32",),
    lambda x: np.float32(1) / x,
)

mov_b32 = instruction(
    # "Data Movement and Conversion Instructions: mov". A copy of which the compiler knows nothing.
    "mov.b32 $0, $1;",
    "=r,r",
    "int32",
    ("int32",),
    lambda x: x,
    volatile=True,
)

prmt_b32 = instruction(
    # "Data Movement and Conversion Instructions: prmt". (a, b, selector): four of the eight bytes
    # of a and b, one for each hex digit of the selector; with 8 added, eight times its sign.
    "prmt.b32 $0, $1, $2, $3;",
    "=r,r,r,r",
    "uint32",
    ("uint32", "uint32", "uint32"),
    _permuted,
)

trap_if_negative = instruction(
    # "Miscellaneous Instructions: trap", if the number is negative.
    "{.reg .pred negative; setp.lt.f32 negative, $0, 0f00000000; @negative trap;}",
    "f",
    "none",
    ("float32",),
    lambda x: None,
    volatile=True,
)

max_f32 = instruction(
    # "Floating Point Instructions: max". Of a number and NaN: the number.
    "max.f32 $0, $1, $2;",
    "=f,f,f",
    "float32",
    ("float32", "float32"),
    np.fmax,
)

cvt_rn_bf16_f32 = instruction(
    # "Data Movement and Conversion Instructions: cvt". Round to nearest even; result: 16 bits.
    "cvt.rn.bf16.f32 $0, $1;",
    "=h,f",
    "uint16",
    ("float32",),
    _bf16_bits,
)

mov_f32_bf16 = instruction(
    # "Data Movement and Conversion Instructions: mov". The bits become the upper half of an f32.
    "mov.b32 $0, {0, $1};",
    "=f,h",
    "float32",
    ("uint16",),
    lambda bits: (np.uint32(bits) << np.uint32(16)).view(np.float32),
)


mov_u32_clock = instruction(
    # "Special Registers: %clock". The lower half of the SM's cycle counter; wraps.
    "mov.u32 $0, %clock;",
    "=r",
    "uint32",
    (),
    lambda: np.uint32(simulator.ticks() % 2**32),
    volatile=True,
)

mov_u64_clock64 = instruction(
    # "Special Registers: %clock64". The SM's cycle counter; every SM has its own.
    "mov.u64 $0, %clock64;",
    "=l",
    "uint64",
    (),
    lambda: np.uint64(simulator.ticks()),
    volatile=True,
)

mov_u64_globaltimer = instruction(
    # "Special Registers: %globaltimer". Nanoseconds, one counter for the GPU; it moves in steps.
    "mov.u64 $0, %globaltimer;",
    "=l",
    "uint64",
    (),
    lambda: np.uint64(simulator.ticks()),
    volatile=True,
)

mov_u32_smid = instruction(
    # "Special Registers: %smid". Number of the SM that runs this thread.
    "mov.u32 $0, %smid;",
    "=r",
    "uint32",
    (),
    lambda: np.uint32(0),
    volatile=True,
)


def _shuffle_stand_in(x: Any, lanes: int) -> Any:
    return simulator.exchange(x)[simulator.lane() ^ int(lanes)]


def _lane_stand_in(x: Any, lane: int) -> Any:
    return simulator.exchange(x)[int(lane)]


def _vote_stand_in(predicate: Any) -> bool:
    return any(simulator.exchange(predicate))


def _ballot_stand_in(predicate: Any) -> np.uint32:
    return np.uint32(sum(1 << n for n, x in enumerate(simulator.exchange(predicate)) if x))


if simulator.ACTIVE:
    shfl_bfly, shfl_idx = _shuffle_stand_in, _lane_stand_in
    vote_any, vote_ballot = _vote_stand_in, _ballot_stand_in
else:
    from numba import cuda

    @cuda.jit(device=True)
    def shfl_bfly(x, lanes):
        """``shfl.sync.bfly``: the value `x` of the lane whose number differs in the bits `lanes`.

        PTX ISA, "Data Movement and Conversion Instructions: shfl.sync". All 32 lanes take part.
        """
        return cuda.shfl_xor_sync(0xFFFFFFFF, x, lanes)

    @cuda.jit(device=True)
    def shfl_idx(x, lane):
        """``shfl.sync.idx``: the value `x` of a lane. All 32 lanes take part.

        PTX ISA, "Data Movement and Conversion Instructions: shfl.sync".
        """
        return cuda.shfl_sync(0xFFFFFFFF, x, lane)

    @cuda.jit(device=True)
    def vote_any(predicate):
        """``vote.sync.any``: whether it holds in some lane of the warp. All 32 lanes take part.

        PTX ISA, "Parallel Synchronization and Communication Instructions: vote.sync".
        """
        return cuda.any_sync(0xFFFFFFFF, predicate)

    @cuda.jit(device=True)
    def vote_ballot(predicate):
        """``vote.sync.ballot``: bit l is whether it holds in lane l. All 32 lanes take part.

        PTX ISA, "Parallel Synchronization and Communication Instructions: vote.sync".
        """
        return cuda.ballot_sync(0xFFFFFFFF, predicate)
