"""Fits, sums over the table, input files and the exactness check: plain NumPy, no kernel runs."""

import json
import math
import re

import ml_dtypes
import numpy as np
import pytest

from fa2_numba import reference
from fa2_numba.accounting import sweep, tables
from fa2_numba.accounting.exactness import Expected, sample_rows
from fa2_numba.accounting.fits import fit_exponent
from fa2_numba.accounting.inputs import InputError, Inputs, read, shipped
from fa2_numba.accounting.shapes import Shape, tiling_with
from fa2_numba.accounting.tables import Setting
from fa2_numba.io_model import closed_form, predict
from fa2_numba.tiling import Tiling

SETTING = Setting(16, Tiling(8, 8, 4, 8))


# --- fits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0, 1, 2, 3])
def test_a_power_law_is_fitted_exactly(power):
    N = [2**n for n in range(3, 11)]
    fit = fit_exponent(N, [7 * n**power for n in N])
    assert fit.slope == pytest.approx(power, abs=1e-12)
    assert fit.half_width == pytest.approx(0, abs=1e-12)
    assert fit.last == pytest.approx(power, abs=1e-12)
    assert (fit.first_N, fit.last_N, fit.points) == (8, 1024, 8)


def test_a_mixture_lies_between_its_powers_and_its_last_slope_is_nearer_the_larger():
    N = [2**n for n in range(3, 11)]
    fit = fit_exponent(N, [n**2 + 100 * n for n in N])
    assert 1 < fit.slope < fit.last < 2
    assert 0 < fit.half_width < 1
    assert fit.interval == (fit.slope - fit.half_width, fit.slope + fit.half_width)


def test_the_interval_is_students():
    N, y = [1, 2, 4], [1, 2 * 2, 4]
    x, z = np.log(N), np.log(y)
    slope = np.polyfit(x, z, 1)[0]
    residual = z - np.polyval(np.polyfit(x, z, 1), x)
    error = math.sqrt((residual**2).sum() / 1 / ((x - x.mean()) ** 2).sum())
    fit = fit_exponent(N, y)
    assert fit.slope == pytest.approx(slope)
    assert fit.half_width == pytest.approx(12.706 * error)


def test_zeros_are_on_no_power_law():
    assert fit_exponent([1, 2, 4], [0, 0, 0]) is None
    assert fit_exponent([1, 2, 4], [0, 3, 0]) is None
    assert fit_exponent([1, 2, 4], [0, 2, 4]).slope == pytest.approx(1)
    assert fit_exponent([1, 2], [1, 4]).half_width == math.inf


@pytest.mark.parametrize(("N", "y"), [([1, 2], [1]), ([0, 1], [1, 1]), ([1, 2], [1, -1])])
def test_what_has_no_logarithm_is_refused(N, y):
    with pytest.raises(ValueError, match="N, y"):
        fit_exponent(N, y)


# --- sums over the table ---------------------------------------------------------------------


@pytest.mark.parametrize("v", tables.VARIANTS, ids=lambda v: v.label)
@pytest.mark.parametrize("quantity", ["total", "writes", "workspace"])
def test_the_leading_term_is_what_the_prediction_nears(v, quantity):
    choice = {"total": tables.TOTAL, "writes": tables.WRITES, "workspace": tables.is_workspace}
    for setting in (SETTING, Setting(32, Tiling(16, 8, 4, 8), "fp16")):
        N = 2**15
        rows = predict(sweep.problem(v.method, v.causal, N, setting))
        c, p = tables.leading(v, setting, quantity)
        assert tables.total(rows, choice[quantity]) == pytest.approx(c * N**p, rel=0.01)


@pytest.mark.parametrize("v", tables.VARIANTS, ids=lambda v: v.label)
def test_extra_memory_is_the_size_of_the_workspace(v):
    N = 40
    problem = sweep.problem(v.method, v.causal, N, Setting(16, Tiling(8, 8, 4, 8), "fp16"))
    names = {"standard": "SPL", "fa1": ("O_acc", "l", "m", "L"), "fa2": "L"}[v.method]
    size = sum(math.prod(a.shape) * a.itemsize for a in map(problem.layout, names))
    assert tables.total(predict(problem), tables.is_workspace) == size


def test_causal_visits_half_of_the_tiles_and_the_diagonal():
    rows = predict(sweep.problem("fa2", True, 64, SETTING))
    assert tables.visited_tiles(rows) == {64: 8 * 9 / 2}


def test_growth_is_honest_about_flash_attention_2():
    rows = [
        row for N in (4096, 8192, 16384) for row in predict(sweep.problem("fa2", False, N, SETTING))
    ]
    fits = {g.quantity: g for g in tables.growth(rows, SETTING)}
    assert fits["stores"].fit.slope == pytest.approx(1, abs=1e-9)
    assert fits["extra memory"].fit.slope == pytest.approx(1, abs=1e-9)
    assert fits["loads of K and V"].fit.slope == pytest.approx(2, abs=1e-9)
    assert fits["loads and stores"].fit.slope == pytest.approx(2, abs=0.01)
    assert not fits["S and P"].moves
    assert fits["S and P"].fit is None
    json.dumps([g.as_dict() for g in fits.values()], allow_nan=False)


@pytest.mark.parametrize("v", tables.DRAWN, ids=lambda v: v.label)
def test_the_formulas_on_the_page_have_the_closed_forms_value(v):
    from fa2_numba.accounting.page import formulas

    N, d, B = 64, 16, 8
    names = {"N": N, "d": d, "T_r": N // B, "T_c": N // B, "B_r": B}
    values = closed_form(sweep.problem(v.method, v.causal, N, SETTING))
    for op, formula in zip(("load", "store"), formulas(v, SETTING.tiling), strict=True):
        code = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula.replace("²", "**2"))
        value = eval(code, {}, names)
        assert value == sum(n for name, n in values.items() if name.endswith(op)), code


# --- exactness -------------------------------------------------------------------------------


def columns(method="fa2"):
    return sweep.problem(method, False, 6, SETTING).columns()


def test_the_reference_itself_is_exact_and_a_wrong_key_is_not():
    q, k, v = (np.asarray(reference.WORKED_EXAMPLE[n], np.float32) for n in "qkv")
    expected = Expected(q, k, v)
    out, lse = reference.attention_same_precision(q, k, v)
    good = expected.compare(out, lse, "here", columns())
    assert good.exact
    assert good.used <= 1
    assert good.message == ""
    out[2] += 1e-3
    bad = expected.compare(out, lse, "here", columns())
    assert not bad.exact
    assert bad.used > 1
    assert "out" in bad.message
    assert expected.compare(np.full_like(out, np.nan), lse, "here", columns()).exact is False


def test_sampled_rows_are_the_same_rows():
    q, k, v = sweep.random_qkv(100, 4)
    rows = sample_rows(100, 8)
    assert {0, 99} <= set(rows)
    assert len(set(rows)) == 8
    assert sample_rows(8, 8) is None
    out, lse = reference.attention_same_precision(q, k, v)
    found = Expected(q, k, v, rows).compare(out, lse, "here", columns())
    assert found.exact
    assert found.rows_checked == 8


# --- files -----------------------------------------------------------------------------------


def arrays(dtype=np.float32, shape=(2, 3, 5, 4)):
    rng = np.random.default_rng(0)
    return {c: rng.standard_normal(shape).astype(dtype) for c in "qkv"}


def safetensors(path, tensors, header_bytes=None):
    """Write a file of the format, from its definition."""
    names = {
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float64": "F64",
        "bool": "BOOL",
    }
    header, raw = {"__metadata__": {"made": "here"}}, b""
    for name, x in tensors.items():
        data = x.tobytes()
        header[name] = {
            "dtype": names[x.dtype.name],
            "shape": x.shape,
            "data_offsets": [len(raw), len(raw) + len(data)],
        }
        raw += data
    text = json.dumps(header).encode() if header_bytes is None else header_bytes
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw)
    return path


def same(x, y):
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_every_format_gives_the_arrays_back(tmp_path, dtype):
    x = arrays(dtype)
    np.savez(tmp_path / "a.npz", **x)
    np.save(tmp_path / "a.npy", np.stack(list(x.values())))
    for c in "qkv":
        np.save(tmp_path / f"{c}.npy", x[c])
    files = [
        [tmp_path / "a.npz"],
        [tmp_path / "a.npy"],
        [tmp_path / f"{c}.npy" for c in "qkv"],
        [safetensors(tmp_path / "a.safetensors", x)],
    ]
    for paths in files:
        (found,) = read(paths)
        assert all(same(getattr(found, c), x[c]) for c in "qkv"), paths
        assert found.mask is None


def test_prefixes_are_problems_and_share_the_mask(tmp_path):
    x, mask = arrays(), np.ones((2, 5), bool)
    several = {f"{p}{c}": a for p in ("layer0_", "layer5_") for c, a in x.items()}
    np.savez(tmp_path / "a.npz", **several, mask=mask, layer5_out=x["q"])
    first, second = read([tmp_path / "a.npz"])
    assert first.name == "a.npz, layer0"
    assert first.mask.shape == (2, 1, 1, 5)  # (B, N_k): padding
    assert first.out is None
    assert second.out is not None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": None}, "q, v"),
        ({"q": arrays(np.int32)["q"]}, "int32"),
        ({"q": arrays(np.float16)["q"]}, "one dtype"),
        ({"v": arrays(shape=(2, 3, 6, 4))["v"]}, "k and v alike"),
        ({"q": arrays(shape=(2, 4, 5, 4))["q"]}, "multiple of H_k"),
        ({"mask": np.ones((2, 5), np.float32)}, "mask: got float32"),
        ({"mask": np.ones((3, 5), bool)}, "mask: got"),
        ({"out": np.ones((1, 5), np.float32)}, "out: got"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, change, says):
    x = {name: a for name, a in {**arrays(), **change}.items() if a is not None}
    np.savez(tmp_path / "a.npz", **x)
    with pytest.raises(InputError, match=says):
        read([tmp_path / "a.npz"])


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors", "a.bin", "absent.npz"])
def test_broken_files_are_refused_by_name(tmp_path, name):
    for text in (b"", b"\x93NUMPY", b"PK\x03\x04 no archive", b"\xff" * 40):
        if "absent" not in name:
            (tmp_path / name).write_bytes(text)
        with pytest.raises(InputError, match="FILE") as caught:
            read([tmp_path / name])
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"q": 3}',
        b'{"q": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}',
        b'{"q": {"dtype": "F32", "shape": [2], "data_offsets": [0, 999999]}}',
        b'{"q": {"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}}',
    ],
)
def test_broken_safetensors_headers_are_refused(tmp_path, header):
    with pytest.raises(InputError, match="FILE"):
        read([safetensors(tmp_path / "a.safetensors", arrays(), header)])


def test_pickles_are_not_opened(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(InputError):
        read([tmp_path / "a.npy"])


# --- parts -----------------------------------------------------------------------------------


def test_the_shipped_input_is_cut_across_its_padding():
    for x in map(lambda x: sweep.cut(x, (2, 1, 48)), shipped()):
        assert x.q.shape == x.k.shape == (2, 1, 48, 32)
        assert x.mask.shape == (2, 1, 1, 48)
        assert x.mask.sum(axis=-1).ravel().tolist() == [48, 24]
        assert x.part.endswith("token 130-177 of 256")
        assert x.out is None


def test_query_heads_keep_their_key_head():
    q, k = np.zeros((1, 6, 5, 4), np.float32), np.zeros((1, 2, 5, 4), np.float32)
    q += np.arange(6)[:, None, None]
    k += np.arange(2)[:, None, None]
    for head in range(6):
        for heads in (1, 2, 3, 6):
            x = Inputs("x", q, k, k).cut(1, heads, 5, head=head)
            group = x.q.shape[1] // x.k.shape[1]
            assert x.q.shape[1] % x.k.shape[1] == 0
            for h in range(x.q.shape[1]):
                assert x.q[0, h, 0, 0] // 3 == x.k[0, h // group, 0, 0]


def test_a_whole_input_is_not_cut():
    x = Inputs("x", *arrays().values(), out=arrays()["q"])
    assert sweep.cut(x, None).part == ""
    assert sweep.cut(x, (2, 3, 5)).out is not None
    assert sweep.cut(x, (1, 3, 5)).part == "batch 0 of 2"


# --- shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"B": 0}, "--batch"),
        ({"N_q": -1}, "--n"),
        ({"d": 257}, "--d"),
        ({"H": 3, "H_k": 2}, "--heads-kv"),
        ({"window": (-2, 0)}, "--window"),
    ],
)
def test_impossible_shapes_name_their_option(change, flag):
    good = {"B": 1, "H": 1, "H_k": 1, "N_q": 4, "N_k": 4, "d": 4}
    with pytest.raises(ValueError, match=flag):
        Shape(**{**good, **change})


@pytest.mark.parametrize("B_r", [1, 2, 3, 8, 24, 64, 128])
@pytest.mark.parametrize("B_c", [1, 6, 8, 32, 96])
def test_a_thread_grid_is_found_for_any_tile(B_r, B_c):
    for default in (Tiling(16, 16, 4, 8), Tiling(128, 64, 16, 8)):
        found = tiling_with(B_r, B_c, default)
        assert (found.B_r, found.B_c) == (B_r, B_c)
    assert tiling_with(None, None, default) == default
