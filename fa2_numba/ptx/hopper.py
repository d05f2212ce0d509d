"""Instructions of sm_90: warpgroup products, tensor copies, barriers in shared memory.

Sections are those of NVIDIA's PTX ISA manual. Addresses of shared memory are 32 bits wide
(`smem_address`).

A matrix lies in shared memory in boxes, as a tensor copy with the 128-byte swizzle puts it. A box
is R rows of 64 elements of 16 bits: row r is the 128 bytes at ``128 * r``, and its 16-byte piece c
is at place ``c ^ (r % 8)`` (`swizzle_128b`). Boxes start at multiples of 1024 bytes, and those
beside each other in a row of the matrix follow each other.

A warpgroup is 4 warps, of which the first has a number divisible by 4. Its 64 x N accumulators are
N / 2 registers of each thread: lane l of warp w holds, of row ``16 * w + l // 4``, the columns
``8 * c + 2 * (l % 4) + (0, 1)`` in registers ``4 * c + (0, 1)``, and in ``4 * c + (2, 3)`` those of
the row 8 below.

Under the simulator a call raises NotImplementedError.
"""

from typing import Any

import numpy as np

from fa2_numba.ptx.emit import device, instruction, register_instruction

PTX_TYPES = {"bf16": "bf16", "fp16": "f16"}
ROW_BYTES = 128  # of a box
PATTERN_BYTES = 1024  # 8 rows, after which the swizzle repeats


def _ordered(text: str, constraints: str, *operands: str, result: str = "none") -> Any:
    """An instruction that keeps its place and that threads execute together."""
    return instruction(text, constraints, result, operands, volatile=True, convergent=True)


# ---- matrices in shared memory ----------------------------------------------------------------


@device
def swizzle_128b(offset):
    """Where byte `offset` of a box lies: bits 4 to 6 are XORed with bits 7 to 9.

    PTX ISA, "Tensors: swizzling modes".
    """
    return np.uint32(offset) ^ ((np.uint32(offset) >> np.uint32(3)) & np.uint32(0x70))


@device
def matrix_descriptor(address, leading_bytes, stride_bytes):
    """The 64 bits that tell `wgmma_mma_async` where an operand is.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: matrix
    descriptor format". Bits 0-13 hold the address, 16-29 the leading, 32-45 the stride byte offset,
    each without its lowest 4 bits; 62-63 are 1 for the 128-byte swizzle.

    * K-major, rows of the operand in rows of boxes (Q and K in Q K^T): `stride_bytes` is
      `PATTERN_BYTES`, from 8 rows to the next 8; `leading_bytes` is not used.
    * MN-major, k in rows of boxes (V in P V, with its transpose bit): `stride_bytes` is
      `PATTERN_BYTES`, from 8 k to the next 8; `leading_bytes` is the size of a box, from 64
      columns to the next.
    """
    field = np.uint64(0x3FFFF)
    start = (np.uint64(address) & field) >> np.uint64(4)
    leading = ((np.uint64(leading_bytes) & field) >> np.uint64(4)) << np.uint64(16)
    stride = ((np.uint64(stride_bytes) & field) >> np.uint64(4)) << np.uint64(32)
    return start | leading | stride | (np.uint64(1) << np.uint64(62))


# ---- warpgroup products -----------------------------------------------------------------------


def wgmma_mma_async(
    n: int,
    dtype: str,
    a_steps: tuple[int, ...] = (0,),
    b_steps: tuple[int, ...] = (0,),
    a_in_registers: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Any:
    """``wgmma.mma_async.sync.aligned.m64nNk16.f32``, for each k16 of a product D = A B + D.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions:
    wgmma.mma_async". Each instruction takes 64 x 16 elements of A and 16 x N of B. All of a product
    are in one device function because libNVVM does not unroll a loop around so many registers.

    Parameters
    ----------
    n : int
        N: a multiple of 8, up to 256.
    dtype : {"bf16", "fp16"}
        Type of A and B; D is fp32.
    a_steps, b_steps : tuple of int
        Where each k16 of A and of B starts, in bytes from the descriptor's address
        (`k_major_steps`, `mn_major_steps`); of an A in registers, in elements from `at`.
    a_in_registers : bool
        Whether A is in registers: 4 of each thread, two elements in each, the left one in the
        lower half. Their order is the accumulators': 16 columns of these, packed in pairs, are an
        A of 16 k.
    transpose_a, transpose_b : bool
        Whether the operand is MN-major in shared memory (`matrix_descriptor`).

    Returns
    -------
    device function
        ``mma(D, descriptor_a, descriptor_b, scale_d)``, or with A in registers
        ``mma(D, A, at, descriptor_b, scale_d)``. D is a local array of N / 2 float32, A one of
        uint32. With ``scale_d == 0`` what D was does not matter. Between `wgmma_fence` and
        `wgmma_wait_group`, D, A and what the descriptors name are the hardware's.

    Raises
    ------
    ValueError
        No such instruction.
    """
    if n not in range(8, 257, 8):
        raise ValueError(f"n: got {n}, accepted: multiples of 8 from 8 to 256")
    if dtype not in PTX_TYPES:
        raise ValueError(f"dtype: got {dtype!r}, accepted: {', '.join(PTX_TYPES)}")
    if a_in_registers and transpose_a:
        raise ValueError("transpose_a: got True, accepted with A in registers: False")
    if len(a_steps) != len(b_steps):
        raise ValueError(f"b_steps: got {len(b_steps)}, accepted: as many as a_steps")
    held, reads = n // 2, max(a_steps) + 4 if a_in_registers else 0
    kind = PTX_TYPES[dtype]
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    D, A, B = _listed(0, held), f"${held}", f"${held + (reads or 1)}"
    bits = f"{transpose_b:d}" if a_in_registers else f"{transpose_a:d}, {transpose_b:d}"
    lines = [
        ".reg .pred old, more; .reg .b64 a, b; .reg .b32 a_low, a_high, b_low, b_high, low;",
        f"setp.ne.u32 old, ${held + (reads or 1) + 1}, 0; setp.eq.u32 more, 0, 0;",
        f"mov.b64 {{b_low, b_high}}, {B};",
    ]
    if not a_in_registers:
        lines.append(f"mov.b64 {{a_low, a_high}}, {A};")
    for k, (at, to) in enumerate(zip(a_steps, b_steps, strict=True)):
        # The address is in the lower half of a descriptor: sums of 32 bits suffice.
        if a_in_registers:
            A = _listed(held + at, 4)
        else:
            A = "a"
            lines.append(f"add.u32 low, a_low, {at >> 4}; mov.b64 a, {{low, a_high}};")
        lines.append(f"add.u32 low, b_low, {to >> 4}; mov.b64 b, {{low, b_high}};")
        lines.append(f"{name} {D}, {A}, b, {'more' if k else 'old'}, 1, 1, {bits};")
    operands = ("uint64",) * (1 if a_in_registers else 2) + ("uint32",)
    return register_instruction("{" + " ".join(lines) + "}", (held,), reads, operands)


def k_major_steps(k: int, box_bytes: int) -> tuple[int, ...]:
    """Where each k16 of a K-major matrix starts, in bytes: 32 on in a box, then the next box."""
    return tuple(step // 4 * box_bytes + step % 4 * 32 for step in range(k // 16))


def mn_major_steps(k: int) -> tuple[int, ...]:
    """Where each k16 of an MN-major matrix starts, in bytes: 16 rows on."""
    return tuple(step * 16 * ROW_BYTES for step in range(k // 16))


def _listed(first: int, count: int) -> str:
    """Operands ``{$first, ...}``."""
    return "{" + ", ".join(f"${n}" for n in range(first, first + count)) + "}"


def wgmma_fence(*registers: int) -> Any:
    """``wgmma.fence``: writes to registers before it are seen by products after it.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.fence".
    Needed before the first product, and wherever D's or A's registers were written since. Returns
    ``fence(*arrays)``, for local arrays of as many elements as `registers` says: those written.
    """
    return register_instruction("wgmma.fence.sync.aligned;", registers)


wgmma_commit_group = _ordered(
    # "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.commit_group".
    # The products since the last one become a group.
    "wgmma.commit_group.sync.aligned;",
    "",
)


def wgmma_wait_group(pending: int, *registers: int) -> Any:
    """``wgmma.wait_group``: wait until at most `pending` of the latest groups are not complete.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions:
    wgmma.wait_group". Returns ``wait(*arrays)``, for local arrays of as many elements as
    `registers` says: the accumulators that are complete from here on, and that nothing else may
    use before. Those of groups still pending are not among them.
    """
    if pending not in range(8):
        raise ValueError(f"pending: got {pending}, accepted: 0 to 7")
    return register_instruction(f"wgmma.wait_group.sync.aligned {pending};", registers)


cvt_rn_bf16x2_f32 = instruction(
    # "Data Movement and Conversion Instructions: cvt". (upper half, lower half), to nearest even.
    "cvt.rn.bf16x2.f32 $0, $1, $2;",
    "=r,f,f",
    "uint32",
    ("float32", "float32"),
)

cvt_rn_f16x2_f32 = instruction(
    # "Data Movement and Conversion Instructions: cvt". (upper half, lower half), to nearest even.
    "cvt.rn.f16x2.f32 $0, $1, $2;",
    "=r,f,f",
    "uint32",
    ("float32", "float32"),
)

stmatrix_x4 = _ordered(
    # "Warp Level Matrix Multiply-Accumulate Instructions: stmatrix". (address, m0, m1, m2, m3):
    # four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix
    # l // 8, and holds the elements 2 * (l % 4) + (0, 1) of row l // 4 of each. So packed
    # accumulators of 16 columns are rows 0-7 and 8-15 of their first 8 columns, then of the others.
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
    "r,r,r,r,r",
    *("uint32",) * 5,
)

stmatrix_x4_trans = _ordered(
    # The same, ".trans": each matrix is stored transposed. Lane l gives the address of column l % 8
    # of matrix l // 8.
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
    "r,r,r,r,r",
    *("uint32",) * 5,
)

ldmatrix_x4 = register_instruction(
    # "Warp Level Matrix Multiply-Accumulate Instructions: ldmatrix". (array of 4, address): reads
    # what `stmatrix_x4` stores.
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
    (4,),
    operands=("uint32",),
)

ld_shared_v2_f32 = register_instruction(
    # "Data Movement and Conversion Instructions: ld". (array of 2, address): two neighbours.
    "ld.shared.v2.f32 {$0, $1}, [$2];",
    (2,),
    operands=("uint32",),
)

st_shared_v4_f32 = _ordered(
    # "Data Movement and Conversion Instructions: st". (address, 4 values), four neighbours.
    "st.shared.v4.f32 [$0], {$1, $2, $3, $4};",
    "r,f,f,f,f",
    "uint32",
    *("float32",) * 4,
)

# ---- barriers in shared memory ----------------------------------------------------------------
# "Parallel Synchronization and Communication Instructions: mbarrier". 8 bytes each, at a multiple
# of 8. A phase ends when all its arrivals, and all the bytes it expects, are there.

mbarrier_init = _ordered(
    # "mbarrier.init". (address, arrivals that end each phase)
    "mbarrier.init.shared::cta.b64 [$0], $1;",
    "r,r",
    "uint32",
    "uint32",
)

fence_mbarrier_init = _ordered(
    # "fence.mbarrier_init". By the thread that initialised barriers, before others use them.
    "fence.mbarrier_init.release.cluster;",
    "",
)

mbarrier_arrive = _ordered(
    # "mbarrier.arrive". (address)
    "mbarrier.arrive.shared::cta.b64 _, [$0];",
    "r",
    "uint32",
)

mbarrier_arrive_expect_tx = _ordered(
    # "mbarrier.arrive.expect_tx". (address, bytes): an arrival, and bytes to wait for.
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    "r,r",
    "uint32",
    "uint32",
)

mbarrier_try_wait_parity = _ordered(
    # "mbarrier.try_wait", until it holds. (address, parity): wait for the end of the phase
    # of this parity, the first phase having 0. With 1 a barrier that is new lets through.
    "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; "
    "@!done bra again;}",
    "r,r",
    "uint32",
    "uint32",
)

fence_proxy_async = _ordered(
    # "Parallel Synchronization and Communication Instructions: fence.proxy". What this thread
    # wrote to shared memory is seen by tensor copies and products that follow.
    "fence.proxy.async.shared::cta;",
    "",
)

# ---- tensor copies ----------------------------------------------------------------------------
# "Data Movement and Conversion Instructions: cp.async.bulk.tensor". One thread copies a box
# between global and shared memory. The tensor map is the address of a `tensor_map.TensorMap`.
# Coordinates are elements, the contiguous axis first, and 0 or more: a box that was loaded and
# stored from row -8 on was an illegal instruction on an H200. Elements beyond the tensor are read
# as 0, and not written.


def _tensor_load(rank: int) -> Any:
    """(shared address, tensor map, `rank` coordinates, mbarrier that its bytes complete)."""
    at = _listed(2, rank)
    return _ordered(
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$0], [$1, {at}], [${rank + 2}];",
        ",".join("rl" + "r" * (rank + 1)),
        "uint32",
        "uint64",
        *("int32",) * rank,
        "uint32",
    )


def _tensor_store(rank: int) -> Any:
    """(tensor map, `rank` coordinates, shared address)."""
    at = _listed(1, rank)
    return _ordered(
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [$0, {at}], [${rank + 1}];",
        ",".join("l" + "r" * (rank + 1)),
        "uint64",
        *("int32",) * rank,
        "uint32",
    )


cp_async_bulk_tensor_2d_load = _tensor_load(2)
cp_async_bulk_tensor_3d_load = _tensor_load(3)
cp_async_bulk_tensor_4d_load = _tensor_load(4)
cp_async_bulk_tensor_5d_load = _tensor_load(5)
cp_async_bulk_tensor_2d_store = _tensor_store(2)
cp_async_bulk_tensor_3d_store = _tensor_store(3)
cp_async_bulk_tensor_4d_store = _tensor_store(4)
cp_async_bulk_tensor_5d_store = _tensor_store(5)

cp_reduce_async_bulk_add_f32 = _ordered(
    # "Data Movement and Conversion Instructions: cp.reduce.async.bulk". (global address, shared
    # address, bytes): fp32 numbers of shared memory are added to those in global memory, by the
    # hardware, in the thread's group of stores. Addresses and bytes are multiples of 16.
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;",
    "l,r,r",
    "uint64",
    "uint32",
    "uint32",
)

cp_async_bulk_commit_group = _ordered(
    # "cp.async.bulk.commit_group". The stores of this thread since the last one become a group.
    "cp.async.bulk.commit_group;",
    "",
)


def cp_async_bulk_wait_group_read(pending: int) -> Any:
    """Wait until shared memory was read by all but the latest `pending` groups of stores.

    PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.wait_group". Needed before
    the memory is written again, and before the block ends.
    """
    return _ordered(f"cp.async.bulk.wait_group.read {pending};", "")


def cp_async_bulk_wait_group(pending: int) -> Any:
    """Wait until all but the latest `pending` groups of this thread's stores are complete.

    PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.wait_group". This thread sees
    then what they wrote.
    """
    return _ordered(f"cp.async.bulk.wait_group {pending};", "")


fence_proxy_tensormap = _ordered(
    # "Parallel Synchronization and Communication Instructions: fence.proxy.tensormap". (tensor
    # map): before the first use in a block of a map in global memory that the host wrote there.
    "fence.proxy.tensormap::generic.acquire.sys [$0], 128;",
    "l",
    "uint64",
)

# ---- warps and their registers ----------------------------------------------------------------

bar_sync = _ordered(
    # "Parallel Synchronization and Communication Instructions: bar.sync". (barrier, threads):
    # arrive at one of the block's 16 barriers and wait until as many have; 0 is syncthreads'.
    "bar.sync $0, $1;",
    "r,r",
    "uint32",
    "uint32",
)

bar_arrive = _ordered(
    # "Parallel Synchronization and Communication Instructions: bar.arrive". Arrive, do not wait.
    "bar.arrive $0, $1;",
    "r,r",
    "uint32",
    "uint32",
)

elect_sync = _ordered(
    # "Parallel Synchronization and Communication Instructions: elect.sync". 1 in one lane of the
    # warp, the same each time; else 0. All 32 lanes take part.
    "{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 $0, 1, 0, p;}",
    "=r",
    result="uint32",
)


def setmaxnreg_inc(registers: int) -> Any:
    """``setmaxnreg.inc``: wait until each thread of the warpgroup may have `registers` registers.

    PTX ISA, "Miscellaneous Instructions: setmaxnreg". The first statement of a branch that a whole
    warpgroup takes. Without ``launch_bounds=(threads, blocks)`` ptxas may ignore it.
    """
    return _setmaxnreg("inc", registers)


def setmaxnreg_dec(registers: int) -> Any:
    """``setmaxnreg.dec``: give back the registers beyond `registers` a thread."""
    return _setmaxnreg("dec", registers)


def _setmaxnreg(direction: str, registers: int) -> Any:
    if registers not in range(24, 257, 8):
        raise ValueError(f"registers: got {registers}, accepted: multiples of 8 from 24 to 256")
    return _ordered(f"setmaxnreg.{direction}.sync.aligned.u32 {registers};", "")
