"""attention for torch: recorded by autograd and traced by torch.compile.

Two custom operators, ``fa2_numba::attention_forward`` and ``fa2_numba::attention_backward``, wrap
`api.attention` and `backward.attention_backward`. Tracing sees their shapes alone, autograd the
first with the second as its derivative. CUDA tensors go to the kernels as they are; under the
simulator CPU tensors do, as NumPy arrays over the same memory.
"""

from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa2_numba import api, backward

# Written out: what torch infers from annotations differs from version to version.
_OPTIONS = (
    "Tensor? mask, Tensor? alibi_slopes, bool causal, SymInt[]? window, float? softcap, "
    "float? scale, str method, bool deterministic"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    method: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """softmax(scale Q K^T) V, exactly, with gradients by q, k and v.

    Parameters
    ----------
    q : torch.Tensor, (N_q, d), (H, N_q, d) or (B, H, N_q, d)
        Queries. fp32, fp64, fp16 or bf16; any strides; on a CUDA device, under the simulator on the
        CPU. Inside ``torch.autocast`` q, k and v are cast to its dtype, unless they are fp64.
    k, v : torch.Tensor, (N_k, d), (H_k, N_k, d) or (B, H_k, N_k, d)
        Keys and values, as `q`.
    causal, window, softcap, scale
        As for `api.attention`. Bottom-right aligned: the last query stands at the last key.
    mask : boolean torch.Tensor, optional
        True is visible; broadcasts to (..., N_q, N_k).
    alibi_slopes : torch.Tensor, (H,) or (B, H), optional
        As for `api.attention`: a constant, without gradient.
    method : str
        Of the forward pass, as for `api.attention`. The backward pass takes the one of the same
        name, and "auto" where there is none ("fa3").
    deterministic : bool
        Give the same gradients, bit for bit, each time. Also set by
        ``torch.use_deterministic_algorithms(True)``.
    return_lse : bool
        Also return the natural-log LSE of each row; it has gradients, too.

    Returns
    -------
    out : torch.Tensor, q's shape and dtype
        Its axes lie in memory in the order of q's.
    lse : torch.Tensor, q's shape without d; fp32 (fp64 for fp64 inputs)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        Before any launch; the message names the argument, what was given and what is accepted.
    NotImplementedError
        `alibi_slopes` that require grad; in forward-mode derivatives; in a double backward.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("mask", mask), ("alibi_slopes", alibi_slopes)):
        if not isinstance(x, Tensor) and not (x is None and name in ("mask", "alibi_slopes")):
            raise TypeError(f"{name}: got {type(x).__qualname__}, accepted: torch.Tensor")
        _refuse_tangent(name, x)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: got {causal!r}, accepted: True, False")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise NotImplementedError("alibi_slopes: requires grad, accepted: slopes without gradient")
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    q, k, v = (_autocast(x) for x in (q, k, v))
    out, lse = attention_forward(
        q, k, v, mask, alibi_slopes, causal, window, softcap, scale, method, deterministic
    )
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As ``torch.nn.functional.scaled_dot_product_attention``, its causal mask included.

    Parameters
    ----------
    query : torch.Tensor, (L, E), (H, L, E) or (B, H, L, E)
        As q of `attention`.
    key, value : torch.Tensor, (S, E), (H_k, S, E) or (B, H_k, S, E)
        H_k is H, or with `enable_gqa` a divisor of it. Equal in shape.
    attn_mask : boolean torch.Tensor, optional
        True is visible; broadcasts to (..., L, S).
    dropout_p : float
        0.
    is_causal : bool
        Query i sees the keys 0 .. i: top-left aligned, unlike `attention`, where L is not S.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    enable_gqa : bool
        Whether query heads may share a key head.

    Returns
    -------
    torch.Tensor
        query's shape and dtype; 0 in a row without a visible key.

    Raises
    ------
    NotImplementedError
        Dropout; a mask that is not boolean.
    TypeError, ValueError
        `is_causal` with `attn_mask`; fewer key heads without `enable_gqa`; and as `attention`.
    """
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p: got {dropout_p}, accepted: 0")
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise NotImplementedError(
            f"attn_mask: got dtype {attn_mask.dtype}, accepted: None or bool (True is visible)"
        )
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal: got True beside attn_mask, accepted: one of the two")
    if not enable_gqa and query.dim() > 2 and key.shape[:-2] != query.shape[:-2]:
        raise ValueError(
            f"key: got shape {tuple(key.shape)}, accepted: batch and heads of query, "
            f"{tuple(query.shape[:-2])}, or fewer heads with enable_gqa=True"
        )
    beyond = 0
    if is_causal:
        # Row i stands at i + S - L here. With L < S the keys after the first L are seen by none;
        # with L > S it sees to key i, L - S beyond its place.
        L = query.shape[-2]
        key, value = key[..., :L, :], value[..., :L, :]
        beyond = L - key.shape[-2]
    return attention(
        query,
        key,
        value,
        mask=attn_mask,
        causal=is_causal and beyond == 0,
        window=(-1, beyond) if beyond else None,
        scale=scale,
    )


def _refuse_tangent(name: str, x: Tensor | None) -> None:
    """Refuse forward mode, in which torch takes the derivative of a custom operator for 0."""
    if x is None or torch.compiler.is_compiling():
        return
    if forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            f"{name}: got a tensor with a tangent (forward mode), accepted: backward mode alone"
        )


def _autocast(x: Tensor) -> Tensor:
    """As torch casts the arguments of its own attention."""
    device = x.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return x
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


# ---- the two operators ------------------------------------------------------------------------


@torch.library.custom_op(
    "fa2_numba::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: bool,
    window: list[int] | None,
    softcap: float | None,
    scale: float | None,
    method: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Out and LSE. `deterministic` is for the backward pass."""
    out = torch.empty_like(q)
    _, lse = api.attention(
        *map(_array, (q, k, v)),
        causal=causal,
        window=_pair(window),
        mask=_array(mask),
        softcap=softcap,
        alibi_slopes=_array(alibi_slopes),
        scale=scale,
        method=method,
        return_lse=True,
        out=_array(out),
    )
    return out, _tensor(lse)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=lse)


@torch.library.custom_op(
    "fa2_numba::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: bool,
    window: list[int] | None,
    softcap: float | None,
    scale: float | None,
    method: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v. `method` is the forward pass's; for "fa3" it is "auto"."""
    if dout.stride(-1) != 1:
        dout = dout.contiguous()  # a sum's gradient has stride 0: nothing would move it at once
    dq, dk, dv = backward.attention_backward(
        *map(_array, (dout, q, k, v, out, lse)),
        causal=causal,
        window=_pair(window),
        mask=_array(mask),
        softcap=softcap,
        alibi_slopes=_array(alibi_slopes),
        scale=scale,
        # Not every dout is what fa3 takes, and whoever asked for it forward has no say in that.
        method="auto" if method == "fa3" else method,
        dlse=_array(dlse),
        deterministic=deterministic,
    )
    return _tensor(dq), _tensor(dk), _tensor(dv)


@attention_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, alibi_slopes, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, mask, alibi_slopes)
    ctx.set_materialize_grads(False)  # the LSE has a gradient only where the loss uses it


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, mask, alibi_slopes = ctx.saved_tensors
    none = (None,) * (2 + len(ctx.options))
    if dout is None and dlse is None:
        return None, None, None, *none
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = attention_backward(dout, dlse, q, k, v, out, lse, mask, alibi_slopes, *ctx.options)
    return *gradients, *none


def _refuse(ctx: Any, *gradients: Tensor) -> NoReturn:
    raise NotImplementedError(
        "attention: a gradient of its gradients (double backward), accepted: first derivatives"
    )


attention_forward.register_autograd(_differentiate, setup_context=_save)
attention_backward.register_autograd(_refuse)


# ---- tensors and arrays -----------------------------------------------------------------------


def _pair(window: list[int] | None) -> Any:
    """The window as `api` takes it; one of another length is left to its checks."""
    return None if window is None else tuple(window)


def _array(x: Tensor | None) -> Any:
    """What `api` takes: the tensor; under the simulator the NumPy array over a CPU tensor."""
    if x is None:
        return None
    if x.requires_grad:  # recorded already, by the operator; and a Parameter becomes a Tensor
        x = x.detach()
    if x.device.type != "cpu" or api.backend() != "simulator":
        return x
    if x.dtype == torch.bfloat16:  # which NumPy does not know
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _tensor(x: Any) -> Tensor:
    """What `api` returned as a tensor."""
    if isinstance(x, Tensor):
        return x
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
