"""fa3's gradients on a GPU of compute capability 9.0: any size, the same bits, counts, memory.

References are float64 (`fa3_cases`), on the CPU where problems are drawn. Compiling takes 5 to 8 s
a kernel, and what decides it is parametrised: head dimension, dtype, mask, softcap, and whether the
arrays are contiguous. The tests of one such choice run in one worker. Streams, graphs and replays:
`test_plan_gpu.py`.
"""

import math
from typing import Any

import fa3_cases
import pytest
from fa3_cases import Draw
from hypothesis import example
from hypothesis import strategies as st
from strategies import forall
from test_fa3_gpu import bits, dtype_of, need, one_worker, same
from test_fa3_gpu import torch as torch

from fa2_numba import attention, backward, io_model, plan, traffic
from fa2_numba.kernels import fa3_gradients
from fa2_numba.tiling import ceil_div, hopper_backward

pytestmark = pytest.mark.gpu

KERNELS = [  # d, dtype, mask, layout of dout, q, k and v
    (64, "bf16", "none", "BHND"),
    (64, "fp16", "causal", "sliced"),
    (128, "bf16", "causal", "BHND"),
    (128, "fp16", "window", "sliced"),
    (96, "bf16", "none", "BNHD"),
    (256, "bf16", "causal", "BHND"),
    (40, "bf16", "window", "BHND"),
]
WINDOW = (100, 20)


def of_kernels(*kernels: tuple[Any, ...]) -> Any:
    """Parametrise d, dtype, mask and layout; one worker has all tests of one of them."""
    return pytest.mark.parametrize(
        ("d", "dtype", "mask", "layout"),
        [
            pytest.param(*kernel, marks=pytest.mark.xdist_group(f"fa3_backward {kernel}"))
            for kernel in kernels
        ],
        ids=str,
    )


CAUSAL_64, CAUSAL_128, WINDOW_128, LARGE = KERNELS[1], KERNELS[2], KERNELS[3], KERNELS[5]
group_of_64 = pytest.mark.xdist_group(f"fa3_backward {CAUSAL_64}")


def on_gpu(given: tuple[Any, ...], layout: str = "BHND") -> tuple[Any, ...]:
    """dout, q, k, v, out, LSE and dlse on the GPU, the first four in a layout amid NaN."""
    import torch

    views = [
        fa3_cases.moved(*fa3_cases.placed(torch, x, layout), "cuda")[0].detach() for x in given[:4]
    ]
    return (*views, *(None if x is None else x.cuda() for x in given[4:]))


def options(mask: str, window: tuple[int, int] = WINDOW, softcap: float = 0.0) -> dict[str, Any]:
    """Arguments of `attention_backward` for a mask by name."""
    given: dict[str, Any] = {"method": "fa3"}
    given |= {"causal": True} if mask == "causal" else {}
    given |= {"window": window} if mask == "window" else {}
    return given | ({"softcap": softcap} if softcap else {})


def run(given: tuple[Any, ...], **how: Any) -> tuple[Any, Any, Any]:
    return backward.attention_backward(*given[:6], dlse=given[6], **how)


def problem(
    torch: Any, d: int, dtype: str, mask: str, n_q: int, n_k: int, B: int = 1, H_k: int = 2,
    group: int = 2, seed: int = 0, dlse: bool = True, device: str = "cuda", softcap: float = 0.0,
) -> tuple[Any, ...]:  # fmt: skip
    """What a backward call gets."""
    draw = Draw(B, H_k, group, n_q, n_k, WINDOW, seed=seed)
    kind = dtype_of(torch, dtype)
    how: dict[str, Any] = {"mask": mask, "softcap": softcap, "dlse": dlse}
    return fa3_cases.backward_inputs(torch, draw, d, kind, device, **how)


# ---- any problem ------------------------------------------------------------------------------

edges = st.sampled_from((2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257))
lengths = edges | st.integers(2, 400)
reach = st.sampled_from((-1, 0, 1, 127, 128)) | st.integers(-1, 400)
draws = st.builds(
    Draw,
    B=st.integers(1, 2),
    H_k=st.integers(2, 3),
    group=st.sampled_from((1, 1, 2, 3)),
    N_q=lengths,
    N_k=lengths,
    window=st.tuples(reach, reach),
    scale=st.sampled_from((None, None, 0.02, 0.3, -0.1)),
    values=st.sampled_from([values for values in fa3_cases.VALUES if values != "heavy"]),
    seed=st.integers(0, 2**31 - 1),
)


@of_kernels(*KERNELS)
# rows without keys before those with; one tile of each; many key tiles to each row tile
@example(Draw(H_k=2, N_q=300, N_k=40), True)
@example(Draw(H_k=2, N_q=64, N_k=128), False)
@example(Draw(H_k=2, group=3, N_q=70, N_k=1000, window=(-1, -1)), True)
@forall(20, draws, st.booleans())
def test_equals_float64(
    torch: Any, d: int, dtype: str, mask: str, layout: str, draw: Draw, with_dlse: bool
) -> None:
    kind = dtype_of(torch, dtype)
    plain = fa3_cases.backward_inputs(
        torch, draw, d, kind, "cpu", mask=mask, scale=draw.scale, dlse=with_dlse
    )
    how = options(mask, draw.window) | {"scale": draw.scale}
    got = tuple(x.cpu() for x in run(on_gpu(plain, layout), **how))
    about = {"mask": mask, "window": draw.window, "scale": draw.scale, "dtype": dtype}
    fa3_cases.check_gradients(torch, got, plain, **about)
    unseeing = plain[5] == -math.inf
    assert not bool(got[0][unseeing].any())


@of_kernels((64, "bf16", "causal", "BHND"), (256, "bf16", "causal", "BHND"))
def test_softcap(torch: Any, d: int, dtype: str, mask: str, layout: str) -> None:
    for n_q, n_k in ((1, 17), (81, 300), (300, 81), (257, 256)):
        given = problem(torch, d, dtype, mask, n_q, n_k, softcap=20.0)
        got = run(given, **options(mask, softcap=20.0))
        fa3_cases.check_gradients(torch, got, given, mask=mask, softcap=20.0, dtype=dtype)


@of_kernels(CAUSAL_128)
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (300, 1), (1, 300), (2048, 2048), (16, 9000)])
def test_short_and_long(
    torch: Any, d: int, dtype: str, mask: str, layout: str, n_q: int, n_k: int
) -> None:
    """With one key P is 1 and dS the rounding of out: dQ and dK are 0 but for it."""
    given = problem(torch, d, dtype, mask, n_q, n_k)
    got = run(given, **options(mask))
    fa3_cases.check_gradients(torch, got, given, mask=mask, dtype=dtype)


@of_kernels(CAUSAL_64, CAUSAL_128, LARGE)
def test_a_loss_of_the_lse_alone(torch: Any, d: int, dtype: str, mask: str, layout: str) -> None:
    """dV is 0, exactly; flash-attention#889."""
    given = problem(torch, d, dtype, mask, 200, 300)
    given = on_gpu((torch.zeros_like(given[0]).cpu(), *(x.cpu() for x in given[1:])), layout)
    dq, dk, dv = got = run(given, **options(mask))
    fa3_cases.check_gradients(torch, got, given, mask=mask, dtype=dtype)
    assert not bool(dv.any()) and bool(dq.any()) and bool(dk.any())


# ---- values that nobody sees ------------------------------------------------------------------


@of_kernels(WINDOW_128, CAUSAL_64, LARGE)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_nobody_sees_may_hold_anything(
    torch: Any, d: int, dtype: str, mask: str, layout: str, value: float
) -> None:
    """Keys in a tile with others, and rows without keys: as if they held numbers; zeros there."""
    n_q, n_k = (130, 500) if mask == "window" else (300, 170)
    plain = problem(torch, d, dtype, mask, n_q, n_k, device="cpu")
    visible = fa3_cases.seen(torch, mask, WINDOW, n_q, n_k, "cpu")
    keys, rows = ~visible.any(0), ~visible.any(1)
    assert bool(keys.any()) == (mask == "window") and bool(rows.any()) == (mask == "causal")
    spoilt = [x.clone() for x in plain]
    for n, places in ((0, rows), (1, rows), (2, keys), (3, keys), (6, rows)):
        spoilt[n][:, :, places] = value
    for deterministic in (False, True)[: 2 if d == 64 else 1]:
        got = run(on_gpu(tuple(spoilt), layout), deterministic=deterministic, **options(mask))
        dq, dk, dv = got = tuple(x.cpu() for x in got)
        fa3_cases.check_gradients(
            torch, got, plain, mask=mask, window=WINDOW, dtype=dtype
        )  # fmt: skip
        assert not bool(dq[:, :, rows].any())
        assert not bool(dk[:, :, keys].any()) and not bool(dv[:, :, keys].any())


@of_kernels(CAUSAL_128)
def test_nan_reaches_whom_the_formula_takes_it_to(
    torch: Any, d: int, dtype: str, mask: str, layout: str
) -> None:
    """NaN in one row of a partly masked tile: its dQ, and dK and dV of the keys that it sees."""
    n, at = 300, 150
    given = problem(torch, d, dtype, mask, n, n)
    before = run(given, **options(mask))
    for x in (given[0], given[1], given[4], given[5]):
        x[:, :, at] = math.nan
    dq, dk, dv = run(given, **options(mask))
    place = torch.arange(n, device="cuda")
    assert bool((dq.isnan().all(-1) == (place == at)).all())
    for x in (dk, dv):
        assert bool((x.isnan().all(-1) == (place <= at)).all())
        assert bool((x.isnan().any(-1) == (place <= at)).all())
    for x, y in ((dk, before[1]), (dv, before[2])):
        # Other keys of the tile are computed again, in another order; those behind it are not.
        step = 2 * float(torch.finfo(y.dtype).eps * y.abs().max())
        torch.testing.assert_close(x[:, :, at + 1 :], y[:, :, at + 1 :], rtol=0, atol=step)
        assert same(torch, x[:, :, 256:], y[:, :, 256:])


@of_kernels((64, "bf16", "none", "BHND"), LARGE)
def test_a_row_whose_lse_is_minus_infinity_counts_for_nothing(
    torch: Any, d: int, dtype: str, mask: str, layout: str
) -> None:
    """Whatever the mask says: a visible score of -inf may have made it so."""
    given = problem(torch, d, dtype, mask, 200, 300)
    given[5][:, :, 150] = -math.inf
    got = run(given, **options(mask))
    assert not bool(got[0][:, :, 150].any())
    fa3_cases.check_gradients(torch, got, given, mask=mask, dtype=dtype)


# ---- again and again --------------------------------------------------------------------------


@of_kernels(CAUSAL_64, CAUSAL_128, LARGE)
@pytest.mark.parametrize("deterministic", [True, False])
def test_200_runs_agree_bitwise(
    torch: Any, d: int, dtype: str, mask: str, layout: str, deterministic: bool
) -> None:
    """A race would show. What is added in the order of chance is dQ alone, up to d = 128."""
    given = problem(torch, d, dtype, mask, 700, 900, B=4, H_k=4, group=2, device="cpu")
    given = on_gpu(given, layout)
    how = options(mask) | {"deterministic": deterministic}
    first = run(given, **how)
    fa3_cases.check_gradients(torch, first, given, mask=mask, dtype=dtype)
    differing = torch.zeros(3, dtype=torch.int64, device="cuda")
    for _ in range(200):
        again = run(given, **how)
        differing += torch.stack(
            [(bits(torch, a) != bits(torch, b)).sum() for a, b in zip(again, first, strict=True)]
        )
    by_chance = not deterministic and d <= 128
    assert differing.tolist()[by_chance:] == [0] * (3 - by_chance)
    if by_chance:
        step = float(torch.finfo(first[0].dtype).eps)
        assert float((again[0] - first[0]).abs().max()) <= step * float(first[0].abs().max())


@of_kernels(CAUSAL_64, LARGE, WINDOW_128)
def test_a_block_that_takes_many_tiles_gives_the_same_bits(
    torch: Any, monkeypatch: pytest.MonkeyPatch, d: int, dtype: str, mask: str, layout: str
) -> None:
    """Of one gradient a kernel: as many blocks as SMs take all tiles, some without steps."""
    given = problem(torch, d, dtype, mask, 400, 1300, B=2, H_k=2, device="cpu")
    given = on_gpu(given, layout)
    how = options(mask) | {"deterministic": True}
    first = run(given, **how)  # a block a tile: there are fewer than SMs
    monkeypatch.setattr(fa3_gradients, "processors", lambda device: 3)
    monkeypatch.setattr(plan, "_plans", plan.Plans(plan.KEPT))
    again = run(given, **how)
    fa3_cases.check_gradients(torch, again, given, mask=mask, window=WINDOW, dtype=dtype)
    assert all(same(torch, a, b) for a, b in zip(first, again, strict=True))


@of_kernels(WINDOW_128)
def test_tiles_that_no_row_sees_beside_many_others(
    torch: Any, d: int, dtype: str, mask: str, layout: str
) -> None:
    """Blocks that end at once, more than fit the GPU: what they loaded must not reach the next."""
    for seed in range(3):
        given = problem(torch, d, dtype, mask, 300, 6000, B=2, H_k=4, seed=seed, device="cpu")
        given = on_gpu(given, layout)
        got = run(given, **options(mask))
        fa3_cases.check_gradients(torch, got, given, mask=mask, window=WINDOW, dtype=dtype)


@of_kernels(CAUSAL_64, CAUSAL_128)
def test_a_batch_alone_and_among_many(
    torch: Any, d: int, dtype: str, mask: str, layout: str
) -> None:
    """With 4,096 blocks copies are slow: what is read, or reported, before them would show."""
    need(torch, 4)
    torch.manual_seed(3)
    shape, kind = (16, 32, 1024, d), dtype_of(torch, dtype)
    dout, q, k, v = (torch.randn(shape, dtype=kind, device="cuda") for _ in range(4))
    out, lse = attention(q, k, v, causal=True, method="fa3", return_lse=True)
    given = (dout, q, k, v, out, lse, None)
    alone = tuple(x if x is None else x[5:6].clone() for x in given)
    want = run(alone, **options(mask))
    for _ in range(5):
        got = run(given, **options(mask))
        assert all(same(torch, a[5:6], b) for a, b in zip(got[1:], want[1:], strict=True))
        difference = (got[0][5:6] - want[0]).abs().max()  # added in the order of chance
        assert float(difference) <= float(torch.finfo(q.dtype).eps) * float(want[0].abs().max())


# ---- where arrays lie -------------------------------------------------------------------------


@group_of_64
def test_auto_is_fa3_where_it_can(torch: Any) -> None:
    given = problem(torch, 64, "fp16", "causal", 200, 300)

    def method(*arrays: Any, **how: Any) -> str:
        rows = backward.predict_backward(*arrays[:6], dlse=arrays[6], causal=True, **how)
        (name,) = {row.method for row in rows}
        return name

    assert method(*given) == "fa3_backward"
    assert method(*given, deterministic=True) == "fa3_backward_deterministic"
    assert method(*given, mask=torch.ones((200, 300), dtype=torch.bool, device="cuda")) == (
        "fa2_backward"
    )
    for n, name in enumerate(("dout", "q", "k", "v")):
        x = given[n]
        shifted = torch.zeros(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
        one_number = x[:1, :1, :1, :1].expand(x.shape)
        for bad, said in ((shifted, "got address"), (one_number, "got strides")):
            arrays = [bad if m == n else y for m, y in enumerate(given)]
            assert method(*arrays) == "fa2_backward"
            with pytest.raises(ValueError, match=f"^{name}: {said}"):
                run(tuple(arrays), **options("causal"))
    with pytest.raises(TypeError, match="q: got dtype fp32 with method=fa3"):
        run(tuple(x.float() for x in given), **options("causal"))


@of_kernels(CAUSAL_64)
def test_one_row_for_all(torch: Any, d: int, dtype: str, mask: str, layout: str) -> None:
    """dout with stride 0 along batch, heads and rows, as the gradient of a sum over them has."""
    plain = problem(torch, d, dtype, mask, 200, 300, B=2, device="cpu")
    dout = plain[0][:1, :1, :1].expand(plain[0].shape)
    given = on_gpu((dout, *plain[1:]), layout)
    how = options(mask) | {"deterministic": True}
    want = run(given, **how)
    got = run((given[0][:1, :1, :1].expand(dout.shape), *given[1:]), **how)
    assert all(same(torch, a, b) for a, b in zip(got, want, strict=True))


@of_kernels((64, "bf16", "none", "BHND"))
@pytest.mark.parametrize("method", ["fa3", "auto"])
def test_a_sum_through_autograd(
    torch: Any, d: int, dtype: str, mask: str, layout: str, method: str
) -> None:
    """Its dout has stride 0 everywhere, which fa3 does not take: it is made contiguous."""
    from fa2_numba.adapters import torch as adapter

    leaves = [x.requires_grad_() for x in problem(torch, d, dtype, mask, 200, 300)[1:4]]
    out, lse = adapter.attention(*leaves, method=method, return_lse=True)
    out.sum().backward()
    plain = [x.detach() for x in (*leaves, out, lse)]
    want = run((torch.ones_like(plain[3]), *plain, None), **options(mask))
    assert all(same(torch, x.grad, y) for x, y in zip(leaves[1:], want[1:], strict=True))
    step = float(torch.finfo(want[0].dtype).eps)
    assert float((leaves[0].grad - want[0]).abs().max()) <= step * float(want[0].abs().max())


@one_worker
@of_kernels(CAUSAL_64)
def test_batch_stride_beyond_32_bits(
    torch: Any, d: int, dtype: str, mask: str, layout: str
) -> None:
    """Two batches, 2**31 elements apart in the same buffer."""
    need(torch, 6)
    B, H, n, stride = 2, 2, 200, 2**31
    size = H * n * d
    memory = torch.zeros(stride + 4 * size, dtype=dtype_of(torch, dtype), device="cuda")
    given = problem(torch, d, dtype, mask, n, n, B=B, H_k=H, group=1)
    views = [
        memory.as_strided((B, H, n, d), (stride, n * d, d, 1), place * size) for place in range(4)
    ]
    for view, values in zip(views, given[:4], strict=True):
        view.copy_(values)
    got = run((*views, *given[4:]), **options(mask))
    fa3_cases.check_gradients(torch, got, given, mask=mask, dtype=dtype)


@of_kernels(CAUSAL_64)
def test_many_batches(torch: Any, d: int, dtype: str, mask: str, layout: str) -> None:
    given = problem(torch, d, dtype, mask, 2, 3, B=70_000, H_k=1, group=1, device="cpu")
    got = tuple(x.cpu() for x in run(on_gpu(given, layout), **options(mask)))
    fa3_cases.check_gradients(torch, got, given, mask=mask, dtype=dtype)


# ---- counts and memory ------------------------------------------------------------------------

COUNTED = (  # B, H_k, group, N_q, N_k
    (1, 1, 1, 1, 1),
    (1, 2, 1, 128, 128),
    (2, 2, 2, 300, 300),
    (1, 1, 6, 257, 770),
    (2, 3, 1, 770, 257),  # rows without keys
    (1, 4, 1, 1000, 1000),
    (3, 4, 2, 65, 129),
    (1, 1, 2, 1, 2000),
)


@of_kernels(CAUSAL_64, (128, "bf16", "window", "BHND"), LARGE)
@pytest.mark.parametrize("deterministic", [False, True])
def test_counted_equals_predicted(
    torch: Any, d: int, dtype: str, mask: str, layout: str, deterministic: bool
) -> None:
    """Elements, requests, sectors and bulk adds; and the counting kernels' gradients are right."""
    if d > 128 and deterministic:
        pytest.skip("the same kernels")
    for n, (B, H_k, group, n_q, n_k) in enumerate(COUNTED):
        plain = problem(
            torch, d, dtype, mask, n_q, n_k, B, H_k, group, seed=n, dlse=bool(n % 2), device="cpu"
        )
        given = on_gpu(plain, layout)
        how = options(mask) | {"deterministic": deterministic}
        measured = backward.measure_backward(*given[:6], dlse=given[6], **how)
        assert traffic.differences(measured.rows, io_model.predict(measured.problem)) == []
        from_arrays = backward.predict_backward(*given[:6], dlse=given[6], **how)
        assert traffic.differences(measured.rows, from_arrays) == []
        adds = {row.array for row in measured.rows if row.op == "atomic"}
        assert adds == (set() if deterministic or d > 128 else {"dQ_acc"})
        got = tuple(x.cpu() for x in (measured.dq, measured.dk, measured.dv))
        fa3_cases.check_gradients(
            torch, got, plain, mask=mask, window=WINDOW, dtype=dtype
        )  # fmt: skip


@of_kernels(CAUSAL_64, CAUSAL_128, LARGE)
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_memory_it_needs(
    torch: Any, d: int, dtype: str, mask: str, layout: str, deterministic: bool
) -> None:
    """Besides the gradients, D; and where dQ is added, its accumulator in fp32."""
    B, H_k, group, n_q, n_k = 2, 2, 2, 1000, 1100
    given = problem(torch, d, dtype, mask, n_q, n_k, B, H_k, group, device="cpu")
    given = on_gpu(given, layout)
    how = options(mask) | {"deterministic": deterministic}
    run(given, **how)  # compiled
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = [*run(given, **how)]
    torch.cuda.synchronize()
    H, tile = H_k * group, hopper_backward(d).B_r * ceil_div(d, 64) * 64
    sizes = [x.numel() * x.element_size() for x in got] + [4 * B * H * n_q]
    if not deterministic and d <= 128:
        sizes.append(4 * B * H * ceil_div(n_q, hopper_backward(d).B_r) * tile)
    blocks = sum(ceil_div(size, 512) * 512 for size in sizes)  # torch's allocator rounds up
    assert torch.cuda.max_memory_allocated() - before == blocks
