"""What the tests of fa3 on a GPU draw, and how far its output may be from float64. In torch.

Everything happens on the tensors' own device. Small problems of many processes are faster on the
CPU: on one GPU their many small kernels wait for each other.
"""

import math
from dataclasses import dataclass
from typing import Any

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# Below it P~ and O may be rounded to 0: half the smallest fp16; the smallest normal fp32, below
# which ex2.approx.ftz gives 0.
TINY = {"bf16": 2.0**-126, "fp16": 2.0**-25}
FP32 = 2.0**-21  # 8 units of roundoff, for exp2, scale, division and log
STEP = 2.0**-23  # of each 16 products that the tensor cores add, which truncates the sum
SIGMAS = 2.0  # of a sum of roundings, whose own size is at most 0.58 u


@dataclass(frozen=True)
class Draw:
    """One problem in numbers and words; a failing one is printed as this."""

    B: int = 1
    H_k: int = 1
    group: int = 1
    N_q: int = 100
    N_k: int = 100
    window: tuple[int, int] = (0, 0)
    scale: float | None = None
    q: str = "BHND"
    k: str = "BHND"
    v: str = "BHND"
    out: str = "new"
    values: str = "normal"
    seed: int = 0


LAYOUTS = ("BHND", "BNHD", "sliced")
OUTS = ("new", "BHND", "BNHD", "sliced")
VALUES = ("normal", "shifted", "heavy", "peaked", "tiny", "constant")


def placed(torch: Any, values: Any, layout: str) -> tuple[Any, Any]:
    """`values` (B, H, N, d) in a layout: the view, and the buffer around it, NaN elsewhere."""
    B, H, N, d = values.shape
    new = {"dtype": values.dtype, "device": values.device}
    if layout == "BNHD":
        buffer = torch.full((B, N, H, d), math.nan, **new)
        view = buffer.transpose(1, 2)
    elif layout == "sliced":  # 16 bytes from the start of a row, rows and heads around it
        buffer = torch.full((B, H + 1, N + 3, d + 16), math.nan, **new)
        view = buffer[:, 1:, 1 : 1 + N, 8 : 8 + d]
    else:
        buffer = torch.full((B, H, N, d), math.nan, **new)
        view = buffer
    view.copy_(values)
    return view, buffer


def moved(view: Any, buffer: Any, device: Any) -> tuple[Any, Any]:
    """The view and the buffer that `placed` returns on another device, bit by bit."""
    there = buffer.to(device)
    return there.as_strided(view.shape, view.stride(), view.storage_offset()), there


def inputs(torch: Any, draw: Draw, d: int, dtype: Any, device: Any) -> tuple[Any, Any, Any]:
    """Values of q, k and v, contiguous."""
    generator = torch.Generator(device=device)
    generator.manual_seed(draw.seed)
    H = draw.H_k * draw.group
    shapes = (draw.B, H, draw.N_q, d), *((draw.B, draw.H_k, draw.N_k, d),) * 2
    q, k, v = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    if draw.values == "shifted":
        k, v = k + 0.5, v + 0.5
    elif draw.values == "heavy":
        q, k, v = q**3, k**3, v**3 * 10
    elif draw.values == "peaked":
        q = q * 8
    elif draw.values == "tiny":
        q, v = q * 1e-3, v * 1e-3
    elif draw.values == "constant":
        q, k, v = torch.ones_like(q), torch.ones_like(k), torch.full_like(v, 0.7)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def seen(torch: Any, mask: str, window: tuple[int, int], N_q: int, N_k: int, device: Any) -> Any:
    """Which keys each row sees, (N_q, N_k): docs/contract.md."""
    i = torch.arange(N_q, device=device)[:, None] + (N_k - N_q)
    j = torch.arange(N_k, device=device)[None, :]
    every = torch.ones((N_q, N_k), dtype=torch.bool, device=device)
    if mask in ("causal", "skip"):
        return j <= i
    if mask == "window":
        left, right = window
        every &= (j >= i - left) if left >= 0 else every
        every &= (j <= i + right) if right >= 0 else every
    return every


@dataclass(frozen=True)
class Expected:
    """The output and LSE in float64, and what roundings may do to them."""

    O: Any  # (B, H, N_q, d)
    lse: Any  # (B, H, N_q)
    most: Any  # of each element's error
    square: Any  # of the size of each element's error
    most_lse: Any


def allowed(
    torch: Any, q: Any, k: Any, v: Any, visible: Any, scale: float, softcap: float, dtype: str
) -> Expected:
    """Attention in float64, and how far an exact kernel may be from it.

    A kernel that multiplies in the dtype and adds in fp32 rounds every p_j and O itself, each by a
    relative u at most. That moves an element of O by at most ``u (A + |O|)``, with
    A = sum_j p_j |v_j|; and as the roundings of the keys are independent, its typical size is
    below ``u sqrt(sum_j p_j^2 v_j^2 + O^2)``. p~ below the smallest number add `TINY` |v_j| each.

    In fp32, a score errs by ``8 FP32 + (FP32 + d / 16 STEP) scale |q| . |k|`` at most; p by the
    same, relatively, O by that times ``A + |O|``, and the LSE by it alone. The sum of P V itself
    errs by ``N_k / 16 STEP A`` at most, and by far less where signs differ.
    """
    u, tiny = UNIT_ROUNDOFF[dtype], TINY[dtype]
    group = q.shape[1] // k.shape[1]
    Q, K, V = q.double(), k.double(), v.double()
    K, V = K.repeat_interleave(group, 1), V.repeat_interleave(group, 1)
    S = scale * (Q @ K.mT)
    inner = abs(scale) * (Q.abs() @ K.abs().mT)
    inner = inner.masked_fill(~visible, 0).amax(-1, keepdim=True)
    inner = 8 * FP32 + (FP32 + -(-q.shape[3] // 16) * STEP) * inner
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    S = S.masked_fill(~visible, -math.inf)
    m = S.amax(-1, keepdim=True)
    m = torch.where(m == -math.inf, torch.zeros_like(m), m)
    P = (S - m).exp()
    l = P.sum(-1, keepdim=True)
    some = torch.where(l == 0, torch.ones_like(l), l)
    O, A = P @ V / some, P @ V.abs() / some
    squares = (P * P) @ (V * V) / some**2
    small = tiny * (visible.double() @ V.abs() / some + 1)
    rounding = inner * (A + O.abs()) + small
    lse = (m + l.log())[..., 0]
    return Expected(
        O,
        lse,
        1.01 * u * (A + O.abs()) + rounding + -(-k.shape[2] // 16) * STEP * A,
        (u**2) * (squares + O * O) + rounding**2,
        inner[..., 0] + FP32 * lse.abs().nan_to_num(posinf=0),
    )


def failures(torch: Any, out: Any, lse: Any, want: Expected, rows: Any = None) -> Any:
    """Numbers above 1 are errors, in one tensor, so that a test waits for the GPU once.

    Of out: the largest error, as a share of what is allowed, and the root mean square, of
    `SIGMAS` times what is typical. Of the LSE: the largest, and whether -inf is where it should be.
    `rows` selects rows (a boolean tensor (N_q,)).
    """
    pick = slice(None) if rows is None else rows
    error = (out.double() - want.O)[:, :, pick].abs()
    most, square = want.most[:, :, pick], want.square[:, :, pick]
    share = torch.where(error == 0, error, error / most).nan_to_num(nan=math.inf)
    typical = square.mean().sqrt() * SIGMAS
    rms = error.square().mean().sqrt()
    rms = torch.where(rms == 0, rms, rms / typical).nan_to_num(nan=math.inf)
    got, ref, most_lse = lse.double()[:, :, pick], want.lse[:, :, pick], want.most_lse[:, :, pick]
    finite = torch.isfinite(ref)
    off = torch.where(finite, (got - ref).abs() / most_lse, torch.zeros_like(ref))
    places = ((got != ref) & ~finite).any().double() * math.inf
    return torch.stack(
        [share.max(), rms, off.nan_to_num(nan=math.inf).max(), places.nan_to_num(nan=0.0)]
    )


def check(
    torch: Any,
    out: Any,
    lse: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: str = "none",
    window: tuple[int, int] = (0, 0),
    scale: float | None = None,
    softcap: float = 0.0,
    dtype: str,
    rows: Any = None,
) -> None:
    """Assert that out and LSE are right; the message has the shares of what is allowed."""
    assert out.dtype == q.dtype and out.shape == q.shape and lse.dtype == torch.float32
    visible = seen(torch, mask, window, q.shape[2], k.shape[2], q.device)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    want = allowed(torch, q, k, v, visible, factor, softcap, dtype)
    found = failures(torch, out, lse, want, rows).tolist()
    names = ("largest error", "rms error", "error of the LSE", "places of -inf")
    shares = dict(zip(names, (round(x, 3) for x in found), strict=True))
    assert max(found) <= 1, f"shares of what is allowed: {shares}"
