"""The machine code of sm_90's instructions, compiled and read without a GPU."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import ptx_kernels
import pytest
from numba import cuda, float32, types, uint32
from test_codegen import Code, compile_kernel
from test_codegen import hopper as hopper

from fa2_numba import ptx, smem

pytestmark = pytest.mark.codegen

MAP = types.int64
BITS, FLOATS = types.Array(types.uint16, 2, "C"), types.Array(types.float32, 2, "C")
WORDS = types.Array(types.uint32, 1, "C")


def compiler_log(kernel: Any, arguments: tuple[Any, ...]) -> str:
    """What ptxas says of a kernel."""
    from numba.cuda import dispatcher

    library = dispatcher._Kernel(kernel.py_func, arguments, **kernel.targetoptions)._codelibrary
    library.get_cubin()
    return library.get_linkerinfo((9, 0, "a"))


def assert_in_registers(code: Code) -> None:
    assert (code.stack, code.local, code.using("LDL|STL")) == (0, 0, []), code.name


# ---- one instruction each ---------------------------------------------------------------------

bulk_reads, bulk_stores = ptx.cp_async_bulk_wait_group_read(0), ptx.cp_async_bulk_wait_group(0)
more, fewer = ptx.setmaxnreg_inc(240), ptx.setmaxnreg_dec(24)


def barriers(out):
    at = ptx.smem_address(64)
    ptx.mbarrier_init(at, 1)
    ptx.fence_mbarrier_init()
    ptx.mbarrier_arrive_expect_tx(at, 32)
    ptx.mbarrier_arrive(at)
    ptx.mbarrier_try_wait_parity(at, 1)


def named_barriers(out):
    ptx.bar_sync(3, 256)
    ptx.bar_arrive(4, 384)
    ptx.bar_sync(out[0], 128)


def loads(out):
    at, tensor, full = ptx.smem_address(0), out[0], ptx.smem_address(4096)
    ptx.fence_proxy_tensormap(tensor)
    ptx.cp_async_bulk_tensor_2d_load(at, tensor, 0, 1, full)
    ptx.cp_async_bulk_tensor_3d_load(at, tensor, 0, 1, 2, full)
    ptx.cp_async_bulk_tensor_4d_load(at, tensor, 0, 1, 2, 3, full)
    ptx.cp_async_bulk_tensor_5d_load(at, tensor, 0, 1, 2, 3, 4, full)


def stores(out):
    at, tensor = ptx.smem_address(0), out[0]
    ptx.fence_proxy_async()
    ptx.cp_async_bulk_tensor_2d_store(tensor, 0, 1, at)
    ptx.cp_async_bulk_tensor_3d_store(tensor, 0, 1, 2, at)
    ptx.cp_async_bulk_tensor_4d_store(tensor, 0, 1, 2, 3, at)
    ptx.cp_async_bulk_tensor_5d_store(tensor, 0, 1, 2, 3, 4, at)
    ptx.cp_async_bulk_commit_group()
    bulk_reads()
    bulk_stores()


def packing(out):
    x, y = float32(out[0]), float32(out[1])
    out[2] = ptx.cvt_rn_bf16x2_f32(x, y)
    out[3] = ptx.cvt_rn_f16x2_f32(x, y)
    ptx.stmatrix_x4(ptx.smem_address(16 * cuda.laneid), out[4], out[5], out[6], out[7])


def single_values(out):
    x, y = float32(out[0]), float32(out[1])
    out[2] = uint32(ptx.max_f32(x, y))
    out[3] = uint32(ptx.rcp_approx_ftz_f32(x))
    ptx.trap_if_negative(y)
    if ptx.vote_any(x > y):
        out[4] = 1
    out[5] = ptx.vote_ballot(x > y)
    mine = np.int32(out[cuda.laneid])
    out[6] = ptx.shfl_idx(mine, np.int32(y))
    out[7] = ptx.shfl_bfly(mine, 1)
    out[8] = ptx.prmt_b32(out[8], 0, 0xBB99)


def registers_of_a_warpgroup(out):
    if cuda.threadIdx.x < 128:
        fewer()
    else:
        more()
        if ptx.elect_sync():
            out[0] = 1


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (barriers, {
            r"SYNCS\.EXCH\.64": 1,  # mbarrier.init
            r"SYNCS\.ARRIVE\.TRANS64\.A1T0": 1,  # without bytes
            r"SYNCS\.ARRIVE\.TRANS64$": 1,  # with
            r"SYNCS\.PHASECHK\.TRANS64\.TRYWAIT": 2,  # once before the loop, once in it
        }),
        (named_barriers, {r"BAR\.SYNC": 2, r"BAR\.ARV": 1}),
        (loads, {
            r"UTMACCTL\.IV": 1,  # the fence of the map
            r"UTMALDG\.2D": 1, r"UTMALDG\.3D": 1, r"UTMALDG\.4D": 1, r"UTMALDG\.5D": 1,
        }),
        (stores, {
            r"FENCE\.VIEW\.ASYNC": 1, r"UTMACMDFLUSH": 1, r"DEPBAR": 2,
            r"CCTL\.IVALL": 1,  # what was written is to be seen
            r"UTMASTG\.2D": 1, r"UTMASTG\.3D": 1, r"UTMASTG\.4D": 1, r"UTMASTG\.5D": 1,
        }),
        (packing, {
            r"F2FP\.BF16\.F32\.PACK_AB": 1, r"F2FP\.F16\.F32\.PACK_AB": 1, r"STSM\.16\.M88\.4": 1,
        }),
        (single_values, {
            r"FMNMX": 1, r"MUFU\.RCP": 1, r"FSETP\.GEU?": 1, r"BPT\.TRAP": 1, r"VOTE": 2,
            r"SHFL\.IDX": 1, r"SHFL\.BFLY": 1, r"PRMT": 1,
        }),
        (registers_of_a_warpgroup, {
            r"USETMAXREG\.TRY_ALLOC": 1, r"USETMAXREG\.DEALLOC": 1, r"ELECT": 1,
        }),
    ],
)  # fmt: skip
def test_instructions(hopper: Path, function: Any, expected: dict[str, int]) -> None:
    code = compile_kernel(cuda.jit(function, launch_bounds=(256, 1)), (WORDS,), 256, hopper)
    assert {name: len(code.using(name)) for name in expected} == expected


def test_named_barriers_have_their_numbers(hopper: Path) -> None:
    code = compile_kernel(cuda.jit(named_barriers), (WORDS,), 128, hopper)
    found = [line for line in code.instructions if line.startswith("BAR.")]
    assert re.fullmatch(r"BAR\.SYNC\S* 0x3, 0x100 ;", found[0])
    assert re.fullmatch(r"BAR\.ARV 0x4, 0x180 ;", found[1])
    assert re.fullmatch(r"BAR\.SYNC\S* R\d+, 0x80 ;", found[2])


def test_a_copy_is_hidden_from_libnvvm(hopper: Path) -> None:
    """3 + 4 is left to ptxas, which sees through the copy."""
    from numba.cuda import dispatcher

    def text(hide: Any) -> str:
        def kernel(out):
            out[0] = uint32(hide(np.int32(3)) + np.int32(4))

        compiled = dispatcher._Kernel(kernel, (WORDS,), **cuda.jit(kernel).targetoptions)
        return compiled._codelibrary.get_lto_ptx((9, 0, "a"))

    adds = r"add\.s\d\d[^;]*, 4;"
    assert re.search(adds, text(ptx.mov_b32))
    assert not re.search(adds, text(cuda.jit(lambda x: x, device=True)))


def test_arguments_are_counted(hopper: Path) -> None:
    from numba.core.errors import TypingError

    def one_too_few(out):
        ptx.bar_sync(1)

    with pytest.raises(TypingError, match=r"bar\.sync"):
        compile_kernel(cuda.jit(one_too_few), (WORDS,), 128, hopper)


# ---- products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 128, 176, 256])
def test_accumulators_stay_in_registers(hopper: Path, n: int) -> None:
    """Through a loop over tiles, with everything that a real kernel does around them."""
    kernel, _ = ptx_kernels.pipeline(n)
    arguments = (MAP, MAP, types.int64, FLOATS)
    code = compile_kernel(kernel, arguments, 3 * ptx_kernels.WARPGROUP, hopper)
    assert_in_registers(code)
    products = code.using("HGMMA")
    assert products == [f"HGMMA.64x{n}x16.F32.BF16"] * len(products)
    tiles = len(products) // 4
    assert len(code.using(r"WARPGROUP\.ARRIVE")) == len(code.using(r"WARPGROUP\.DEPBAR")) == tiles
    assert len(code.using("USETMAXREG")) == 2
    assert "ptxas" not in compiler_log(kernel, arguments)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("n", "k", "a_mn", "b_mn"),
    [
        (64, 64, False, False),
        (256, 128, False, False),
        (128, 64, False, True),
        (64, 64, True, True),
    ],
)
def test_operands_in_shared_memory(
    hopper: Path, n: int, k: int, dtype: str, a_mn: bool, b_mn: bool
) -> None:
    kernel, _ = ptx_kernels.product(n, k, dtype, a_mn, b_mn)
    code = compile_kernel(kernel, (MAP, MAP, FLOATS), ptx_kernels.WARPGROUP, hopper)
    assert_in_registers(code)
    suffix = ".BF16" if dtype == "bf16" else ""  # fp16 is what is not said
    assert code.using("HGMMA") == [f"HGMMA.64x{n}x16.F32{suffix}"] * (k // 16)
    products = [line for line in code.instructions if line.startswith("HGMMA")]
    assert all((".tnspA" in line) == a_mn and (".tnspB" in line) == b_mn for line in products)
    # what D was does not matter: the first takes zeros, the others add
    assert [", RZ, !UPT" in line for line in products] == [True] + [False] * (k // 16 - 1)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_first_operand_in_registers(hopper: Path, dtype: str) -> None:
    kernel, _ = ptx_kernels.two_products(128, 64, dtype)
    code = compile_kernel(kernel, (MAP,) * 4, ptx_kernels.WARPGROUP, hopper)
    assert_in_registers(code)
    products = [line for line in code.instructions if line.startswith("HGMMA")]
    assert len(products) == 64 // 16 + 128 // 16
    from_registers = [
        re.search(r"HGMMA\S* R\d+, R\d+, gdesc", line) is not None for line in products
    ]
    assert from_registers == [False] * 4 + [True] * 8
    assert len(code.using(r"WARPGROUP\.ARRIVE")) == len(code.using(r"WARPGROUP\.DEPBAR")) == 2
    assert len(code.using(r"F2FP")) == 128 // 4 + 64 // 4
    assert len(code.using(r"STSM")) == 64 // 16
    assert len(code.using("MOV")) < 10  # the registers of P and O are not copied about
    assert "ptxas" not in compiler_log(kernel, (MAP,) * 4)


def test_what_is_used_too_early_is_seen(hopper: Path) -> None:
    """So the log, empty above, would say that products wait for each other."""
    mma, fence, wait = ptx.wgmma_mma_async(64, "bf16"), ptx.wgmma_fence(32), ptx.wgmma_wait_group(0)

    def kernel(C):
        D = cuda.local.array(32, float32)
        fence(D)
        mma(D, np.uint64(0), np.uint64(0), 0)
        ptx.wgmma_commit_group()
        for i in range(32):
            D[i] = D[i] + float32(1)
        wait()
        for i in range(32):
            C[i, cuda.threadIdx.x] = D[i]

    assert re.search(r"C75\d\d.*wgmma", compiler_log(cuda.jit(kernel), (FLOATS,)))


# ---- shared memory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "arguments", "expected"),
    [
        (ptx_kernels.transposed_matrices, (BITS, BITS), {r"STSM\.16\.MT88\.4": 1}),
        (ptx_kernels.matrices, (BITS, BITS), {r"LDSM\.16\.M88\.4": 1}),
        (ptx_kernels.shared_vectors, (FLOATS, FLOATS), {r"STS\.128": 1, r"LDS\.64": 2, "LDS": 2}),
        (
            lambda: ptx_kernels.bulk_adds(128, 2),
            (types.Array(types.float32, 1, "C"), types.int64),
            {r"UBLKRED\.G\.S\.ADD\.F32\.RN": 2, "UTMACMDFLUSH": 1, r"FENCE\.VIEW\.ASYNC": 1},
        ),
    ],
    ids=["stmatrix, transposed", "ldmatrix", "vectors", "bulk add"],
)
def test_accesses_of_shared_memory(
    hopper: Path, built: Any, arguments: tuple[Any, ...], expected: dict[str, int]
) -> None:
    kernel, _ = built()
    code = compile_kernel(kernel, arguments, 128, hopper)
    assert_in_registers(code)
    assert {name: len(code.using(name)) for name in expected} == expected
    assert code.using("REDG|ATOM") == []


def test_tiles_and_addresses_are_of_one_memory(hopper: Path) -> None:
    """Byte 512 of the allocation, as an element of a tile and as an address."""
    tile = smem.shared_tile(4, 32, np.uint32, 256)

    def kernel(out):
        T = tile(None)
        T[2, 0] = uint32(7)
        out[0] = ptx.smem_address(512)

    from numba.cuda import dispatcher

    compiled = dispatcher._Kernel(kernel, (WORDS,), **cuda.jit(kernel).targetoptions)
    text = compiled._codelibrary.get_lto_ptx((9, 0, "a"))
    assert re.findall(r"\.extern \.shared.*", text) == [
        ".extern .shared .align 1024 .b8 fa2_smem[];"
    ]
    code = compile_kernel(cuda.jit(kernel), (WORDS,), 32, hopper)
    assert code.using("STS")


# ---- planted faults ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "there", "missing"),
    [
        ("a thread stores past the end", {"STG.E"}, set()),
        ("a tensor copy loads past the end", {"UTMALDG.2D"}, set()),
        ("a tensor copy stores past the end", {"UTMASTG.2D"}, set()),
        ("threads without a barrier", {"STS", "LDS"}, {"BAR.SYNC.DEFER_BLOCKING"}),
        ("threads read before a tensor copy is there", {"UTMALDG.2D", "LDS.U16"}, set()),
        ("half a warp at a barrier", {"BAR.SYNC.DEFER_BLOCKING"}, set()),
        ("an mbarrier that was not initialised", {"SYNCS.ARRIVE.TRANS64.A1T0"}, {"SYNCS.EXCH.64"}),
        ("a thread loads what nobody wrote", {"LDG.E"}, set()),
        ("a tensor copy loads what nobody wrote", {"UTMALDG.2D"}, set()),
    ],
)
def test_planted_faults_are_in_the_code(
    hopper: Path, monkeypatch: pytest.MonkeyPatch, fault: str, there: set[str], missing: set[str]
) -> None:
    """What compute-sanitizer is asked to see: a compiler may have left it out."""
    import sanitizer_faults

    codes = []

    def compiled(kernel: Any, shared_bytes: int, *args: Any) -> None:
        arguments = tuple(kernel.typeof_pyval(x) for x in args)
        codes.append(compile_kernel(kernel, arguments, sanitizer_faults.THREADS, hopper))

    monkeypatch.setattr(sanitizer_faults, "run", compiled)
    monkeypatch.setattr(
        sanitizer_faults, "new", lambda shape, dtype=np.float32: np.empty(shape, dtype)
    )
    monkeypatch.setattr(sanitizer_faults, "boxes", lambda rows: None)
    monkeypatch.setattr(sanitizer_faults, "bf16_map", lambda array, rows: 1 << 40)
    sanitizer_faults.FAULTS[fault][1]()
    (code,) = codes
    assert there <= set(code.opcodes) and not missing & set(code.opcodes)
