"""fa3 on a GPU of compute capability 9.0: any size, any place, the same bits, counts, accuracy.

References are float64 (`fa3_cases`), of drawn problems on the CPU, which is faster where several
processes share a GPU, else on the GPU. Compiling takes seconds a kernel, so what decides
the kernel (head dimension, dtype, kind of mask, softcap, sign of the scale) is parametrised, and
the rest is drawn. Streams, graphs, threads and devices: `test_plan_gpu.py`.
"""

import importlib.resources
import math
import warnings
from collections.abc import Iterator
from typing import Any

import fa3_cases
import numpy as np
import pytest
from fa3_cases import LAYOUTS, OUTS, VALUES, Draw
from hypothesis import example
from hypothesis import strategies as st
from strategies import forall

from fa2_numba import api, io_model, launch, traffic

pytestmark = pytest.mark.gpu
one_worker = pytest.mark.xdist_group("memory")  # tests of many GB one after the other


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    """torch, where it has a GPU that runs fa3."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    if launch.compute_capability(torch.cuda.current_device()) != (9, 0):
        pytest.skip("fa3 needs compute capability 9.0")
    yield torch
    torch.cuda.empty_cache()


def need(torch: Any, gigabytes: float) -> None:
    """Skip where the GPU has less free memory."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory")


def dtype_of(torch: Any, dtype: str) -> Any:
    return torch.bfloat16 if dtype == "bf16" else torch.float16


def qkv(
    torch: Any, n_q: int, n_k: int, d: int, dtype: str, B: int = 1, H: int = 4, H_k: int = 2,
    seed: int = 0,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Normal values."""
    draw = Draw(B, H_k, H // H_k, n_q, n_k, seed=seed)
    return fa3_cases.inputs(torch, draw, d, dtype_of(torch, dtype), "cuda")


def options(mask: str, window: tuple[int, int] = (0, 0), softcap: float = 0.0) -> dict[str, Any]:
    """Arguments of `attention` for a mask by name."""
    given: dict[str, Any] = {"method": "fa3", "return_lse": True}
    if mask in ("causal", "skip"):
        given["causal"] = "skip" if mask == "skip" else True
    if mask == "window":
        given["window"] = window
    return given | ({"softcap": softcap} if softcap else {})


def bits(torch: Any, x: Any) -> Any:
    """As integers, so that NaN equals NaN."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def same(torch: Any, a: Any, b: Any) -> bool:
    return bool(torch.equal(bits(torch, a), bits(torch, b)))


# ---- any problem ------------------------------------------------------------------------------

HEAD_DIMS = (
    8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 104, 112, 128, 136, 160, 192, 200, 224, 256
)  # fmt: skip
MASKS = ("none", "causal", "window", "skip")
# d, dtype, mask, softcap, scale positive: each head dimension twice, in both dtypes.
GROUPS = [
    (d, dtype, MASKS[(n + 2 * turn) % 4], 20.0 if (n + turn) % 5 == 0 else 0.0, (n + turn) % 7 != 3)
    for turn, dtype in enumerate(("bf16", "fp16"))
    for n, d in enumerate(HEAD_DIMS)
]

edges = st.sampled_from((1, 2, 63, 64, 65, 95, 96, 127, 128, 129, 191, 192, 193, 255, 256, 257))
lengths = edges | st.integers(1, 400)
reach = st.sampled_from((-1, 0, 1, 127, 128)) | st.integers(-1, 400)
draws = st.builds(
    Draw,
    B=st.integers(1, 2),
    H_k=st.integers(1, 3),
    group=st.sampled_from((1, 1, 2, 3)),
    N_q=lengths,
    N_k=lengths,
    window=st.tuples(reach, reach),
    scale=st.sampled_from((None, None, 0.02, 0.5, 1.0)),
    q=st.sampled_from(LAYOUTS),
    k=st.sampled_from(LAYOUTS),
    v=st.sampled_from(LAYOUTS),
    out=st.sampled_from(OUTS),
    values=st.sampled_from(VALUES),
    seed=st.integers(0, 2**31 - 1),
)


@pytest.mark.parametrize(
    ("d", "dtype", "mask", "softcap", "positive"), GROUPS, ids=lambda x: str(x).lower()
)
# rows without keys before those with, and one key
@example(Draw(N_q=300, N_k=1, window=(0, 0)))
@example(Draw(N_q=1, N_k=400, window=(-1, -1)))
@forall(90, draws)  # 540 of each in the profile "gpu", 21,600 together
def test_equals_float64(
    torch: Any, d: int, dtype: str, mask: str, softcap: float, positive: bool, draw: Draw
) -> None:
    # One kernel a group: a scale that is not positive has another.
    scale = (draw.scale or 1 / math.sqrt(d)) * (1 if positive else -1)
    plain = fa3_cases.inputs(torch, draw, d, dtype_of(torch, dtype), "cpu")

    def on_gpu(x: Any, layout: str) -> tuple[Any, Any]:
        return fa3_cases.moved(*fa3_cases.placed(torch, x, layout), "cuda")

    q, k, v = (
        on_gpu(x, layout)[0] for x, layout in zip(plain, (draw.q, draw.k, draw.v), strict=True)
    )
    given = options(mask, draw.window, softcap) | {"scale": scale}
    into, around = None, None
    if draw.out != "new":
        into, around = on_gpu(torch.full_like(plain[0], math.nan), draw.out)
        given["out"] = into
    out, lse = api.attention(q, k, v, **given)
    assert into is None or out is into
    out, around = fa3_cases.moved(out, out if around is None else around, "cpu")
    assert int(around.isnan().sum()) == around.numel() - out.numel()  # nothing beside it
    fa3_cases.check(
        torch, out, lse.cpu(), *plain, mask=mask, window=draw.window, scale=scale,
        softcap=softcap, dtype=dtype,
    )  # fmt: skip


# ---- the grids of other projects' tests -------------------------------------------------------
# Lengths, head dimensions, softcap and head counts that flash-attention's tests of FlashAttention-3
# and -4 use (hopper/test_flash_attn.py, tests/cute), those of its causal, varlen, key-value-cache
# and split tests, and xformers' odd lengths.

OUTPUT = (
    (1, 1), (3, 3), (64, 32), (64, 128), (128, 128), (128, 192), (256, 256), (239, 1), (799, 3),
    (113, 203), (113, 128), (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128),
    (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
)  # fmt: skip
OTHERS = (
    (1, 239), (3, 799), (127, 512), (127, 513), (1, 3), (2, 1), (511, 1), (3, 513), (307, 256),
    (1, 339), (3, 1024), (64, 800), (64, 2048), (97, 97), (200, 200),
    (768, 768), (2, 31), (15, 34), (68, 72), (90, 132), (136, 15),
)  # fmt: skip
LONG = ((2048, 2048), (2048, 3577), (4096, 4096), (4224, 4224), (16, 20000), (1, 131072))
HEADS = ((6, 6), (6, 2), (6, 1))  # MHA, GQA, MQA


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(
    ("d", "dtype"), [(64, "bf16"), (96, "fp16"), (128, "bf16"), (192, "fp16"), (256, "bf16")]
)
def test_output_grid(torch: Any, d: int, dtype: str, mask: str) -> None:
    for n, (n_q, n_k) in enumerate(OUTPUT + OTHERS):
        H, H_k = HEADS[n % 3]
        three = qkv(torch, n_q, n_k, d, dtype, H=H, H_k=H_k, seed=n)
        out, lse = api.attention(*three, **options(mask))
        fa3_cases.check(torch, out, lse, *three, mask=mask, dtype=dtype)


@one_worker
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_long_output_grid(torch: Any, mask: str) -> None:
    need(torch, 20)
    for n_q, n_k in LONG:
        three = qkv(torch, n_q, n_k, 128, "bf16", H=2, H_k=1)
        out, lse = api.attention(*three, **options(mask))
        fa3_cases.check(torch, out, lse, *three, mask=mask, dtype="bf16")


@pytest.mark.parametrize(("d", "dtype"), [(64, "fp16"), (128, "bf16")])
def test_softcap_grid(torch: Any, d: int, dtype: str) -> None:
    """15 is FlashAttention-3's, 1, 30 and 50 are flashinfer's: a number is no other kernel."""
    for softcap in (1.0, 15.0, 30.0, 50.0):
        for n_q, n_k in ((1, 17), (17, 81), (81, 987), (987, 987), (113, 203), (1023, 1024)):
            three = qkv(torch, n_q, n_k, d, dtype)
            out, lse = api.attention(*three, **options("causal", softcap=softcap))
            fa3_cases.check(
                torch, out, lse, *three, mask="causal", softcap=softcap, dtype=dtype
            )  # fmt: skip


def test_window_grid(torch: Any) -> None:
    """flashinfer's windows."""
    for left in (3, 13, 23, 37, 43, 33, 111, 233, 533):
        for right in (0, left // 2, -1):
            three = qkv(torch, 577, 1024, 128, "bf16", H=2)
            out, lse = api.attention(*three, **options("window", (left, right)))
            fa3_cases.check(
                torch, out, lse, *three, mask="window", window=(left, right), dtype="bf16"
            )


# ---- bytes that are not ours, and values that nobody sees -------------------------------------

FEW = [(64, "fp16", "causal"), (128, "bf16", "window")]
of_few = pytest.mark.parametrize(("d", "dtype", "mask"), FEW)
WINDOW = (100, 20)


@of_few
def test_rows_behind_the_last_are_neither_read_nor_written(
    torch: Any, d: int, dtype: str, mask: str
) -> None:
    """N_q and N_k rows of larger buffers, the rest of which is NaN: a tile ends in the middle."""
    kind = dtype_of(torch, dtype)
    for n_q, n_k in ((100, 100), (129, 65), (192, 257), (1, 130)):
        three = qkv(torch, n_q, n_k, d, dtype, B=2)
        buffers = [
            torch.full((*x.shape[:2], x.shape[2] + 300, d), math.nan, dtype=kind, device="cuda")
            for x in (*three, three[0])
        ]
        views = [b[:, :, : x.shape[2]] for b, x in zip(buffers, (*three, three[0]), strict=True)]
        for view, x in zip(views, three, strict=False):
            view.copy_(x)
        out, lse = api.attention(*views[:3], out=views[3], **options(mask, WINDOW))
        fa3_cases.check(torch, out, lse, *three, mask=mask, window=WINDOW, dtype=dtype)
        assert bool(buffers[3][:, :, n_q:].isnan().all())
        new, lse_new = api.attention(*three, **options(mask, WINDOW))
        assert same(torch, new, out) and same(torch, lse_new, lse)


@pytest.mark.parametrize("mask", ["none", "causal"])  # three consumers, and two
@pytest.mark.parametrize(("d", "dtype"), [(64, "bf16"), (40, "fp16"), (8, "bf16")])
def test_boxes_of_the_output_end_where_it_ends(torch: Any, d: int, dtype: str, mask: str) -> None:
    """O is the middle of a buffer of NaN: boxes of 16 x 64 reach past its rows and columns."""
    kind = dtype_of(torch, dtype)
    for n in (1, 15, 17, 100, 203, 392):
        three = qkv(torch, n, n, d, dtype, B=2)
        buffer = torch.full((2, 4, n + 48, d + 72), math.nan, dtype=kind, device="cuda")
        out = buffer[:, :, 16 : 16 + n, 8 : 8 + d]
        _, lse = api.attention(*three, out=out, **options(mask))
        fa3_cases.check(torch, out, lse, *three, mask=mask, dtype=dtype)
        assert int(buffer.isnan().sum()) == buffer.numel() - out.numel()


@of_few
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_masked_keys_never_reach_the_output(
    torch: Any, d: int, dtype: str, mask: str, value: float
) -> None:
    """K and V of one key hold NaN or inf: rows that do not see it are as if it were 0."""
    for n, at in ((300, 200), (300, 299), (500, 130)):
        q, k, v = qkv(torch, n, n, d, dtype)
        clean_k, clean_v = k.clone(), v.clone()
        clean_k[:, :, at], clean_v[:, :, at] = 0, 0
        k[:, :, at], v[:, :, at] = value, value
        out, lse = api.attention(q, k, v, **options(mask, WINDOW))
        sees = fa3_cases.seen(torch, mask, WINDOW, n, n, "cuda")[:, at]
        assert bool(sees.any()) and not bool(sees.all())
        fa3_cases.check(
            torch, out, lse, q, clean_k, clean_v, mask=mask, window=WINDOW, dtype=dtype,
            rows=~sees,
        )  # fmt: skip
        if math.isnan(value):
            assert bool(out[:, :, sees].isnan().all()) and bool(lse[:, :, sees].isnan().all())


@of_few
def test_an_infinite_value_that_is_seen_is_infinite(
    torch: Any, d: int, dtype: str, mask: str
) -> None:
    """In its own column, for rows that see it; everywhere else nothing changes."""
    n, at, column = 300, 150, 5
    q, k, v = qkv(torch, n, n, d, dtype)
    v[:, :, at, column] = math.inf
    out, lse = api.attention(q, k, v, **options(mask, WINDOW))
    sees = fa3_cases.seen(torch, mask, WINDOW, n, n, "cuda")[:, at]
    assert bool((out[:, :, sees, column] == math.inf).all())
    clean = v.clone()
    clean[:, :, at, column] = 0
    fa3_cases.check(torch, out, lse, q, k, clean, mask=mask, window=WINDOW, dtype=dtype, rows=~sees)
    others = torch.where(sees[:, None] & (torch.arange(d, device="cuda") == column), 0, out)
    assert bool(torch.isfinite(others).all())


def test_rows_without_keys(torch: Any) -> None:
    for d, dtype in ((64, "fp16"), (128, "bf16")):
        for n_q, n_k in ((300, 40), (257, 1), (1000, 129)):
            three = qkv(torch, n_q, n_k, d, dtype)
            out, lse = api.attention(*three, **options("causal"))
            before = n_q - n_k
            assert not bool(out[:, :, :before].any())
            assert bool((lse[:, :, :before] == -math.inf).all())
            fa3_cases.check(torch, out, lse, *three, mask="causal", dtype=dtype)


@pytest.mark.parametrize(("n_q", "n_k"), [(5, 0), (0, 5), (0, 0)])
def test_nothing_to_see_through_auto(torch: Any, n_q: int, n_k: int) -> None:
    q, k = (torch.ones((2, 4, n, 64), dtype=torch.bfloat16, device="cuda") for n in (n_q, n_k))
    out, lse = api.attention(q, k, k, causal=True, return_lse=True)
    assert out.shape == (2, 4, n_q, 64) and not bool(out.any())
    assert lse.shape == (2, 4, n_q) and bool((lse == -math.inf).all())


def test_auto_is_fa3_where_it_can(torch: Any) -> None:
    q, k, v = qkv(torch, 200, 200, 64, "fp16")
    auto, named = (api.attention(q, k, v, causal=True, method=m) for m in ("auto", "fa3"))
    assert same(torch, auto, named)
    assert api.measure(q, k, v, causal=True).problem.method == "fa3"
    for options_ in ({"mask": torch.ones((200, 200), dtype=torch.bool, device="cuda")},
                     {"alibi_slopes": np.ones(4, np.float32)}):  # fmt: skip
        assert {row.method for row in api.predict(q, k, v, **options_)} == {"fa2"}
    with pytest.raises(TypeError, match="q: got dtype fp32 with method=fa3"):
        api.attention(q.float(), k.float(), v.float(), method="fa3")
    with pytest.raises(ValueError, match="k: got address"):
        shifted = torch.zeros(k.numel() + 1, dtype=k.dtype, device="cuda")[1:].view(k.shape)
        api.attention(q, shifted, v, method="fa3")


def test_one_head_for_all(torch: Any) -> None:
    """Stride 0 along heads and along rows."""
    q, k, v = qkv(torch, 200, 300, 64, "fp16", H=4, H_k=4)
    heads = [x[:, :1].expand(-1, 4, -1, -1) for x in (k, v)]
    rows = [x[:, :, :1].expand(-1, -1, 300, -1) for x in (k, v)]
    for views in (heads, rows):
        want = api.attention(q, *(x.contiguous() for x in views), **options("causal"))
        got = api.attention(q, *views, **options("causal"))
        assert all(same(torch, a, b) for a, b in zip(got, want, strict=True))


# ---- again and again, and far away ------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "dtype", "mask"), [(64, "fp16", "causal"), (64, "bf16", "none"), (128, "bf16", "window")]
)
@pytest.mark.parametrize(("n_q", "n_k"), [(239, 1), (3, 799), (1024, 128), (257, 257)])
def test_250_runs_agree_bitwise(
    torch: Any, d: int, dtype: str, mask: str, n_q: int, n_k: int
) -> None:
    """A race would show; the shapes are those of flash-attention's race test."""
    three = qkv(torch, n_q, n_k, d, dtype, B=60, H=4, H_k=4)
    out, lse = api.attention(*three, **options(mask, WINDOW))
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(250):
        again, lse_again = api.attention(*three, **options(mask, WINDOW))
        differing += (bits(torch, again) != bits(torch, out)).sum()
        differing += (bits(torch, lse_again) != bits(torch, lse)).sum()
    assert int(differing) == 0


@one_worker
@pytest.mark.parametrize(("d", "mask"), [(64, "causal"), (128, "window")])
def test_batch_stride_beyond_32_bits(torch: Any, d: int, mask: str) -> None:
    """Two batches, 2**31 elements apart in the same buffer."""
    need(torch, 12)
    B, H, n, stride = 2, 2, 200, 2**31
    size = H * n * d
    inputs, outputs = (
        torch.zeros(stride + places * size, dtype=torch.bfloat16, device="cuda")
        for places in (4, 1)
    )

    def view(memory: Any, place: int) -> Any:
        return memory.as_strided((B, H, n, d), (stride, n * d, d, 1), place * size)

    views, out = [view(inputs, place) for place in range(3)], view(outputs, 0)
    three = qkv(torch, n, n, d, "bf16", B=B, H=H, H_k=H)
    for x, values in zip(views, three, strict=True):
        x.copy_(values)
    _, lse = api.attention(*views, out=out, **options(mask, WINDOW))
    fa3_cases.check(torch, out, lse, *three, mask=mask, window=WINDOW, dtype="bf16")


@one_worker
def test_row_stride_beyond_32_bits(torch: Any) -> None:
    """Rows of a wide concatenation: the last is beyond 2**31 elements."""
    need(torch, 6)
    n, d = 66, 64
    step = 2**31 // (n - 2) // 8 * 8
    memory = torch.zeros((n, step), dtype=torch.float16, device="cuda")
    views = [memory[None, None, :, place * d : (place + 1) * d] for place in range(3)]
    three = qkv(torch, n, n, d, "fp16", H=1, H_k=1)
    for x, values in zip(views, three, strict=True):
        x.copy_(values)
    out, lse = api.attention(*views, **options("causal"))
    fa3_cases.check(torch, out, lse, *three, mask="causal", dtype="fp16")


@pytest.mark.parametrize(("B", "H"), [(70_000, 1), (1, 65_536)])
def test_many_heads(torch: Any, B: int, H: int) -> None:
    three = qkv(torch, 2, 3, 64, "fp16", B=B, H=H, H_k=1)
    out, lse = api.attention(*three, **options("causal"))
    fa3_cases.check(torch, out, lse, *three, mask="causal", dtype="fp16")


# ---- counts -----------------------------------------------------------------------------------

COUNTED = (  # B, H, H_k, N_q, N_k
    (1, 1, 1, 1, 1),
    (1, 2, 2, 128, 128),
    (2, 4, 2, 300, 300),
    (1, 6, 1, 257, 770),
    (2, 3, 3, 770, 257),  # rows without keys
    (1, 4, 4, 1000, 1000),
    (3, 8, 4, 65, 129),
    (1, 2, 1, 1, 2000),
)


@pytest.mark.parametrize(
    ("d", "dtype", "mask"),
    [(64, "fp16", "causal"), (128, "bf16", "window"), (72, "bf16", "none"), (128, "fp16", "skip")],
)
def test_counted_equals_predicted(torch: Any, d: int, dtype: str, mask: str) -> None:
    """And the counting kernel gives the bits of the plain one."""
    for n, (B, H, H_k, n_q, n_k) in enumerate(COUNTED):
        three = qkv(torch, n_q, n_k, d, dtype, B=B, H=H, H_k=H_k, seed=n)
        layout = LAYOUTS[n % 3]
        q, k, v = (fa3_cases.placed(torch, x, layout)[0] for x in three)
        given = options(mask, WINDOW)
        del given["return_lse"]
        measured = api.measure(q, k, v, **given)
        assert traffic.differences(measured.rows, io_model.predict(measured.problem)) == []
        assert traffic.differences(measured.rows, api.predict(q, k, v, **given)) == []
        out, lse = api.attention(q, k, v, return_lse=True, **given)
        assert same(torch, out, measured.out) and same(torch, lse, measured.lse)
        fa3_cases.check(torch, out, lse, *three, mask=mask, window=WINDOW, dtype=dtype)


# ---- as accurate as another implementation ----------------------------------------------------


def rms(torch: Any, out: Any, q: Any, k: Any, v: Any, mask: str) -> float:
    """Of the error against float64."""
    visible = fa3_cases.seen(torch, mask, (0, 0), q.shape[2], k.shape[2], "cuda")
    want = fa3_cases.allowed(torch, q, k, v, visible, 1 / math.sqrt(q.shape[-1]), 0.0, "bf16")
    return float((out.double() - want.O).square().mean().sqrt())


def assert_as_accurate(torch: Any, three: tuple[Any, ...], mask: str) -> None:
    """As torch's FlashAttention-2, within 1%."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ours = api.attention(*three, method="fa3", causal=mask == "causal")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *three, is_causal=mask == "causal"
        )
    mine, other = (rms(torch, out, *three, mask) for out in (ours, theirs))
    print(f"d={three[0].shape[-1]} {mask}: rms error {mine:.4e}, torch's flash {other:.4e}")
    assert mine <= 1.01 * other


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(
    ("d", "dtype"), [(64, "bf16"), (128, "bf16"), (256, "bf16"), (128, "fp16")]
)
def test_as_accurate_as_torch(torch: Any, d: int, dtype: str, mask: str) -> None:
    # So many heads that torch has blocks enough: with few it splits the keys, and of each part the
    # largest P is 1, which is exact.
    three = qkv(torch, 1024, 1024, d, dtype, B=4, H=8, H_k=8)
    assert_as_accurate(torch, three, mask)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_as_accurate_on_real_activations(torch: Any, dtype: str, mask: str) -> None:
    path = importlib.resources.files("fa2_numba") / "data" / "minilm_qkv.npz"
    with path.open("rb") as file, np.load(file) as data:
        layers = [[data[f"layer{n}_{x}"] for x in "qkv"] for n in (0, 5)]
    for layer in layers:
        three = tuple(torch.from_numpy(x).cuda().to(dtype_of(torch, dtype)) for x in layer)
        out, lse = api.attention(*three, **options(mask))
        fa3_cases.check(torch, out, lse, *three, mask=mask, dtype=dtype)
        assert_as_accurate(torch, three, mask)
