"""Bad input: the exact type of error, a message that names the argument, what was given and what
is accepted, and no launch.

A row of a table is (arguments that differ from a good call, error, what the message says).
"""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from strategies import Backend

from fa2_numba import api, launch, masking, simulator
from fa2_numba.tiling import Tiling

ROWS, KEYS, HEADS, D = 5, 7, 4, 8


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any launch fails the test."""

    def launched(*args: Any) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(launch, "launch", launched)


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def good() -> dict[str, Any]:
    """A call that is accepted."""
    return {
        "q": array(2, HEADS, ROWS, D),
        "k": array(2, 2, KEYS, D),
        "v": array(2, 2, KEYS, D),
    }


def same_k_and_v(*shape: int, dtype: Any = np.float32) -> dict[str, Any]:
    return {"k": array(*shape, dtype=dtype), "v": array(*shape, dtype=dtype)}


def refused(function: Any, arguments: dict[str, Any], error: type, said: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        function(**arguments)
    assert caught.type is error
    for part in said:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


def test_the_good_call_is_launched() -> None:
    if simulator.ACTIVE:
        with pytest.raises(AssertionError, match="a kernel was launched"):
            api.attention(**good())


ACCEPTED_SHAPES = "(N, d), (H, N, d) or (B, H, N, d)"
DTYPES = "float32, float64, float16, bfloat16"

ARRAYS: dict[str, tuple[dict[str, Any], type, tuple[str, ...]]] = {
    "q is a list": ({"q": [[1.0]]}, TypeError, ("q: got list", "NumPy arrays")),
    "k is None": ({"k": None}, TypeError, ("k: got NoneType", "NumPy arrays")),
    "v is a number": ({"v": 1.0}, TypeError, ("v: got float", "NumPy arrays")),
    "q has one axis": ({"q": array(8)}, ValueError, ("q: got shape (8,)", ACCEPTED_SHAPES)),
    "q has no axis": ({"q": array()}, ValueError, ("q: got shape ()", ACCEPTED_SHAPES)),
    "k has five axes": (
        {"k": array(1, 1, 1, 1, 8)},
        ValueError,
        ("k: got shape (1, 1, 1, 1, 8)", ACCEPTED_SHAPES),
    ),
    "k has fewer axes": (
        same_k_and_v(2, KEYS, D),
        ValueError,
        ("k: got shape (2, 7, 8)", "as many axes as q"),
    ),
    "integers": (
        {n: x.astype(np.int32) for n, x in good().items()},
        TypeError,
        ("q: got dtype int32", DTYPES),
    ),
    "complex": (
        {"q": array(2, HEADS, ROWS, D, dtype=complex)},
        TypeError,
        ("q: got dtype", DTYPES),
    ),
    "booleans": ({"q": array(2, HEADS, ROWS, D, dtype=bool)}, TypeError, ("q: got dtype", DTYPES)),
    "float8": (
        {"q": array(2, HEADS, ROWS, D, dtype=ml_dtypes.float8_e4m3fn)},
        TypeError,
        ("q: got dtype float8_e4m3fn", DTYPES),
    ),
    "big-endian": (
        {"q": array(2, HEADS, ROWS, D, dtype=">f4")},
        TypeError,
        ("q: got dtype >f4", DTYPES),
    ),
    "mixed dtypes": (
        {"k": array(2, 2, KEYS, D, dtype=np.float16)},
        TypeError,
        ("k: got dtype fp16", "q's, fp32"),
    ),
    "v alone in another dtype": (
        {"v": array(2, 2, KEYS, D, dtype=ml_dtypes.bfloat16)},
        TypeError,
        ("v: got dtype bf16", "q's, fp32"),
    ),
    "another batch": (same_k_and_v(3, 2, KEYS, D), ValueError, ("k: got batch 3", "q's, 2")),
    "another head dimension": (
        same_k_and_v(2, 2, KEYS, 4),
        ValueError,
        ("k: got head dimension 4", "q's, 8"),
    ),
    "no head dimension": (
        {n: x[..., :0] for n, x in good().items()},
        ValueError,
        ("q: got head dimension 0", "1 to 256"),
    ),
    "a long head dimension": (
        {"q": array(2, 4, 1, 257), **same_k_and_v(2, 2, 1, 257)},
        ValueError,
        ("q: got head dimension 257", "1 to 256"),
    ),
    "v shorter than k": (
        {"v": array(2, 2, KEYS - 1, D)},
        ValueError,
        ("v: got shape (2, 2, 6, 8)", "k's, (2, 2, 7, 8)"),
    ),
    "heads that do not divide": (
        same_k_and_v(2, 3, KEYS, D),
        ValueError,
        ("k: got 3 heads for q's 4", "a divisor of 4"),
    ),
    "more key heads than query heads": (
        same_k_and_v(2, 8, KEYS, D),
        ValueError,
        ("k: got 8 heads for q's 4", "a divisor of 4"),
    ),
    "no key head": (same_k_and_v(2, 0, KEYS, D), ValueError, ("k: got 0 heads for q's 4",)),
}

nan, inf = float("nan"), float("inf")
OPTIONS: dict[str, tuple[dict[str, Any], type, tuple[str, ...]]] = {
    "scale is NaN": ({"scale": nan}, ValueError, ("scale: got nan", "a finite number")),
    "scale is infinite": ({"scale": -inf}, ValueError, ("scale: got -inf", "a finite number")),
    "scale is text": ({"scale": "0.5"}, TypeError, ("scale: got '0.5'", "a number")),
    "scale is a boolean": ({"scale": True}, TypeError, ("scale: got True", "a number")),
    "scale is an array": ({"scale": array(1)}, TypeError, ("scale: got", "a number")),
    "causal is text": ({"causal": "top"}, ValueError, ("causal: got 'top'", '"bound", "skip"')),
    "causal is 1": ({"causal": 1}, ValueError, ("causal: got 1", "True, False")),
    "causal is None": ({"causal": None}, ValueError, ("causal: got None", "True, False")),
    "window is a number": ({"window": 3}, TypeError, ("window: got 3", "a pair (left, right)")),
    "window of three": ({"window": (1, 2, 3)}, TypeError, ("window: got (1, 2, 3)", "a pair")),
    "window of fractions": ({"window": (1.5, 0)}, TypeError, ("window: got (1.5, 0)", "integers")),
    "window of None": ({"window": (None, 0)}, TypeError, ("window: got (None, 0)", "integers")),
    "window of booleans": ({"window": (True, 0)}, TypeError, ("window: got (True, 0)", "integers")),
    "negative window": (
        {"window": (-2, 0)},
        ValueError,
        ("window: got (-2, 0)", "-1 (unbounded), 0 or more"),
    ),
    "mask of integers": (
        {"mask": np.ones((ROWS, KEYS), np.int64)},
        TypeError,
        ("mask: got dtype int64", "bool (True is visible)"),
    ),
    "mask of floats": (
        {"mask": np.zeros((ROWS, KEYS), np.float32)},
        TypeError,
        ("mask: got dtype float32", "bool (True is visible)"),
    ),
    "mask is a list": ({"mask": [[True]]}, TypeError, ("mask: got list", "boolean array")),
    "mask is a function": ({"mask": max}, TypeError, ("mask: got", "masking.Mask")),
    # pytorch#139462: a mask made for more keys than there are
    "mask with more keys": (
        {"mask": np.ones((ROWS, 256), bool)},
        ValueError,
        ("mask: got shape (5, 256)", "broadcasts to (2, 4, 5, 7)"),
    ),
    "mask with fewer rows": (
        {"mask": np.ones((ROWS - 1, KEYS), bool)},
        ValueError,
        ("mask: got shape (4, 7)", "broadcasts to (2, 4, 5, 7)"),
    ),
    "mask with kv heads": (
        {"mask": np.ones((2, 2, ROWS, KEYS), bool)},
        ValueError,
        ("mask: got shape (2, 2, 5, 7)", "broadcasts to (2, 4, 5, 7)"),
    ),
    "mask with five axes": (
        {"mask": np.ones((1, 1, 1, ROWS, KEYS), bool)},
        ValueError,
        ("mask: got shape (1, 1, 1, 5, 7)", "broadcasts to (2, 4, 5, 7)"),
    ),
    "masking.boolean of another shape": (
        {"mask": masking.causal() & masking.boolean(np.ones((ROWS, KEYS + 1), bool))},
        ValueError,
        ("mask: got shape (5, 8)", "broadcasts to (2, 4, 5, 7)"),
    ),
    "masking.boolean of integers": (
        {"mask": masking.boolean(np.ones((ROWS, KEYS), int))},
        TypeError,
        ("mask: got dtype int64", "bool"),
    ),
    "documents of another length": (
        {"mask": masking.documents(np.zeros(KEYS + 1, int))},
        ValueError,
        ("mask: documents for shape (1, 8)", "(7,) or (2, 7)"),
    ),
    "documents of another batch": (
        {"mask": masking.window(1, 1) & masking.documents(np.zeros((3, KEYS), int))},
        ValueError,
        ("mask: documents for shape (3, 7)", "(7,) or (2, 7)"),
    ),
    "softcap of 0": ({"softcap": 0.0}, ValueError, ("softcap: got 0.0", "a positive number")),
    "negative softcap": ({"softcap": -1}, ValueError, ("softcap: got -1", "a positive number")),
    "softcap is NaN": ({"softcap": nan}, ValueError, ("softcap: got nan", "a finite number")),
    "softcap is text": ({"softcap": "5"}, TypeError, ("softcap: got '5'", "a number")),
    "slopes of another length": (
        {"alibi_slopes": array(HEADS + 1)},
        ValueError,
        ("alibi_slopes: got shape (5,)", "(4,) or (2, 4)"),
    ),
    "slopes per kv head": (
        {"alibi_slopes": array(2, 2)},
        ValueError,
        ("alibi_slopes: got shape (2, 2)", "(4,) or (2, 4)"),
    ),
    "slopes of integers": (
        {"alibi_slopes": np.ones(HEADS, int)},
        TypeError,
        ("alibi_slopes: got dtype int64", "accepted: float32, float64, float16, bfloat16"),
    ),
    "one slope": ({"alibi_slopes": 0.5}, ValueError, ("alibi_slopes: got shape ()", "(4,)")),
    "score is a function": ({"score": max}, TypeError, ("score: got", "masking.Score")),
    "unknown method": (
        {"method": "fa9"},
        ValueError,
        ("method: got 'fa9'", "auto, standard, fa1, fa2"),
    ),
    "method is None": ({"method": None}, ValueError, ("method: got None", "auto")),
    "tiling is a tuple": ({"tiling": (8, 8, 4, 8)}, TypeError, ("tiling: got tuple", "Tiling")),
}

like_q = array(2, HEADS, ROWS, D)
read_only = np.ones_like(like_q)
read_only.setflags(write=False)
OUTS: dict[str, tuple[Any, type, tuple[str, ...]]] = {
    "a list": ([1.0], TypeError, ("out: got list", "NumPy arrays")),
    "another shape": (
        array(2, HEADS, ROWS, D + 1),
        ValueError,
        ("out: got shape (2, 4, 5, 9)", "q's, (2, 4, 5, 8)"),
    ),
    "fewer axes": (array(HEADS, ROWS, D), ValueError, ("out: got shape (4, 5, 8)", "q's")),
    "another dtype": (
        like_q.astype(np.float16),
        ValueError,
        ("out: got", "fp16", "q's", "fp32"),
    ),
    "read-only": (read_only, ValueError, ("out: got a read-only array", "a writable one")),
    "stride 0": (
        np.lib.stride_tricks.as_strided(like_q, like_q.shape, (0, *like_q.strides[1:])),
        ValueError,
        ("out: got strides", "with stride 0", "elements of their own"),
    ),
}


@pytest.mark.skipif(not simulator.ACTIVE, reason="NumPy arrays: NUMBA_ENABLE_CUDASIM=1")
@pytest.mark.parametrize("function", [api.attention, api.measure, api.predict])
@pytest.mark.parametrize("what", ARRAYS)
def test_arrays(function: Any, what: str) -> None:
    changes, error, said = ARRAYS[what]
    if function is api.predict and any(x is None for x in changes.values()):
        pytest.skip("for predict, None is not given")
    refused(function, good() | changes, error, said)


@pytest.mark.skipif(not simulator.ACTIVE, reason="NumPy arrays: NUMBA_ENABLE_CUDASIM=1")
@pytest.mark.parametrize("function", [api.attention, api.measure, api.predict])
@pytest.mark.parametrize("what", OPTIONS)
def test_options(function: Any, what: str) -> None:
    changes, error, said = OPTIONS[what]
    if function is api.predict and "scale" in changes:
        pytest.skip("predict has no scale: it moves nothing")
    refused(function, good() | changes, error, said)


@pytest.mark.skipif(not simulator.ACTIVE, reason="NumPy arrays: NUMBA_ENABLE_CUDASIM=1")
@pytest.mark.parametrize("function", [api.attention, api.measure])
@pytest.mark.parametrize("what", OUTS)
def test_outs(function: Any, what: str) -> None:
    out, error, said = OUTS[what]
    refused(function, good() | {"out": out}, error, said)


@pytest.mark.skipif(not simulator.ACTIVE, reason="NumPy arrays: NUMBA_ENABLE_CUDASIM=1")
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_over_an_input(name: str) -> None:
    arguments = good()
    arguments["k"], arguments["v"] = (array(2, HEADS, ROWS, D) for _ in range(2))
    refused(
        api.attention,
        arguments | {"out": arguments[name]},
        ValueError,
        (f"out: its memory range overlaps {name}'s", "one of its own"),
    )


@pytest.mark.skipif(not simulator.ACTIVE, reason="NumPy arrays: NUMBA_ENABLE_CUDASIM=1")
@pytest.mark.parametrize("method", api.PORTABLE)
def test_a_tiling_that_does_not_fit(method: str) -> None:
    tiling = Tiling(256, 256, 8, 32)
    need, limit = tiling.shared_bytes(D, "fp32", method), launch.shared_limit(None)
    refused(
        api.attention,
        good() | {"tiling": tiling, "method": method},
        ValueError,
        ("tiling", str(tiling), str(need), str(limit), "d=8", "fp32", method),
    )


def test_more_blocks_than_a_launch_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    if not simulator.ACTIVE:
        pytest.skip("NumPy arrays: NUMBA_ENABLE_CUDASIM=1")
    monkeypatch.setattr(launch, "MAX_BLOCKS", 7)  # 2 * 4 blocks of one row tile
    refused(api.attention, good(), ValueError, ("fa2", "8 blocks exceed the 7 of one launch"))


@pytest.mark.parametrize("function", [api.attention, api.measure, api.predict])
def test_what_is_not_an_argument_is_not_ignored(function: Any) -> None:
    # Megatron-LM#53: an adapter dropped a mask silently
    for name in ("attn_mask", "dropout_p", "is_causal"):
        with pytest.raises(TypeError, match=name):
            function(**good(), **{name: None})


def test_all_but_q_k_v_is_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        api.attention(*good().values(), True)  # type: ignore[misc]


# ---- predict by shape -------------------------------------------------------------------------

SHAPES: dict[str, tuple[dict[str, Any], type, tuple[str, ...]]] = {
    "nothing": ({}, ValueError, ("predict: give q, k and v, or shape",)),
    "both": (good() | {"shape": (4, 8)}, ValueError, ("predict: give q, k and v, or shape",)),
    "q alone": ({"q": array(4, 8)}, ValueError, ("predict: give q, k and v, or shape",)),
    "one axis": ({"shape": (8,)}, ValueError, ("shape: got (8,)", ACCEPTED_SHAPES)),
    "negative": ({"shape": (-1, 8)}, ValueError, ("shape: got (-1, 8)", "each 0 or more")),
    "fractions": ({"shape": (4.0, 8)}, ValueError, ("shape: got (4.0, 8)", ACCEPTED_SHAPES)),
    "dtype": (
        {"shape": (4, 8), "dtype": "float32"},
        ValueError,
        ("dtype: got 'float32'", "fp64, fp32, fp16, bf16"),
    ),
    "method": ({"shape": (4, 8), "method": "x"}, ValueError, ("method: got 'x'", "auto")),
    "head dimension": ({"shape": (4, 300)}, ValueError, ("got head dimension 300", "1 to 256")),
    "window": (
        {"shape": (4, 8), "window": (-3, 0)},
        ValueError,
        ("window: got (-3, 0)", "0 or more"),
    ),
    "tiling": (
        {"shape": (4, 8), "tiling": Tiling(1024, 8, 4, 8)},
        ValueError,
        ("tiling", "bytes of shared memory"),
    ),
}


@pytest.mark.skipif(not simulator.ACTIVE, reason="asks the device for its limits")
@pytest.mark.parametrize("what", SHAPES)
def test_predict_by_shape(what: str) -> None:
    arguments, error, said = SHAPES[what]
    refused(api.predict, arguments, error, said)


@pytest.mark.skipif(not simulator.ACTIVE, reason="asks the device for its limits")
@pytest.mark.parametrize(
    ("changes", "name"),
    [({"heads_kv": 3}, "heads_kv"), ({"heads_kv": -1}, "heads_kv"), ({"n_k": -1}, "n_k")],
)
def test_predict_names_its_own_arguments(changes: dict[str, Any], name: str) -> None:
    refused(api.predict, {"shape": (4, 5, 8)} | changes, ValueError, (f"{name}: got",))


@pytest.mark.skipif(not simulator.ACTIVE, reason="NumPy arrays: NUMBA_ENABLE_CUDASIM=1")
@pytest.mark.parametrize(
    "value", [10**400, 1e300, np.complex64(1)], ids=["integer", "float", "complex"]
)
def test_a_scale_that_no_float32_holds(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="scale: got"):
        api.attention(**good(), scale=value)


# ---- the wrong kind of array for this process -------------------------------------------------


@pytest.mark.codegen  # any process that is not the simulator
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_numpy_arrays_without_the_simulator(name: str) -> None:
    """No GPU where one is needed: the message says what to do."""
    if simulator.ACTIVE:
        pytest.skip("not the simulator")
    with pytest.raises(TypeError) as error:
        api.arrays.operand(name, array(4, 8))
    assert re.match(f"{name}: got a NumPy array, accepted: CuPy, torch or Numba", str(error.value))
    assert "NUMBA_ENABLE_CUDASIM=1" in str(error.value)


@pytest.mark.codegen
def test_what_is_no_array_without_the_simulator() -> None:
    with pytest.raises(TypeError, match="q: got list, accepted: CuPy, torch or Numba arrays"):
        api.attention([1.0], [1.0], [1.0])


class OnDevice:
    """Like an array of CuPy or torch."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012


def test_arrays_on_a_device_under_the_simulator() -> None:
    if not simulator.ACTIVE:
        pytest.skip("the simulator")
    refused(
        api.attention,
        good() | {"v": OnDevice()},
        TypeError,
        ("v: got OnDevice", "accepted under the simulator: NumPy arrays"),
    )


# ---- good input that looks odd ----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"scale": np.float32(0.5)},
        {"scale": 1},
        {"scale": -0.5},
        {"window": [np.int64(3), -1]},
        {"window": np.array([3, 0])},
        {"softcap": np.float64(2)},
        {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
        {"alibi_slopes": np.ones((2, 4), np.float16)},
        {"mask": np.True_ & np.ones(1, bool)},
        {"mask": np.ones((1, KEYS), bool)},
        {"causal": "bound"},
        {"method": "auto"},
    ],
    ids=str,
)
def test_accepted(backend: Backend, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    monkeypatch.undo()
    q, k, v = good().values()
    out, _ = backend.attention(options.pop("method", "fa2"), q, k, v, **options)
    np.testing.assert_allclose(out, 1, rtol=1e-6)  # all values are 1


@pytest.mark.skipif(not simulator.ACTIVE, reason="NumPy arrays: NUMBA_ENABLE_CUDASIM=1")
@pytest.mark.parametrize("extra", [{"dtype": "fp16"}, {"n_k": 7}, {"heads_kv": 1}])
def test_predict_ignores_nothing_beside_arrays(extra: dict[str, Any]) -> None:
    (name,) = extra
    with pytest.raises(ValueError, match=f"^{name}: got .* only with shape"):
        api.predict(**good(), **extra)


@pytest.mark.skipif(not simulator.ACTIVE, reason="NumPy arrays: NUMBA_ENABLE_CUDASIM=1")
def test_an_output_whose_rows_overlap_is_refused() -> None:
    q = np.ones((3, 4), np.float32)
    out = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (3, 4), (4, 4))
    with pytest.raises(ValueError, match="out: got strides"):
        api.attention(q, q, q, out=out)


@pytest.mark.skipif(not simulator.ACTIVE, reason="asks the device for its limits")
def test_numpy_integers_and_booleans_are_taken() -> None:
    assert api.predict(shape=(np.int64(9), 4), causal=np.True_) == api.predict(
        shape=(9, 4), causal=True
    )
    with pytest.raises(TypeError, match=r"n_k: got 16\.5"):
        api.predict(shape=(9, 4), n_k=16.5)
