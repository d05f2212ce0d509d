"""The DRAM model, the memory levels and their figures. No GPU: `hardware.profile` is replaced."""

import json
import math
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import strategies as st
from strategies import forall

from fa2_numba import io_model, masking, simulator
from fa2_numba.accounting import hardware, levels, plots
from fa2_numba.io_model import STREAMING, closed_form, compulsory, dram, predict, total
from fa2_numba.kernels import standard
from fa2_numba.problem import PORTABLE, Problem
from fa2_numba.tiling import DTYPE_BYTES, Tiling
from fa2_numba.traffic import COLUMNS

L2 = 62_914_560  # of an H200
HUGE = 2**62
T = Tiling(4, 2, 4, 2)
SLOTS = {
    "fa2": 264, "fa1_init": 2112, "fa1_loop": 132, "fa1_finish": 2112,
    "standard_scores": 528, "standard_softmax": 2112, "standard_output": 528,
}  # fmt: skip

simulated = pytest.mark.skipif(
    not simulator.ACTIVE, reason="runs on the simulator: NUMBA_ENABLE_CUDASIM=1"
)


@st.composite
def problems(draw, methods=PORTABLE, causal=(False, True)):
    """Small problems: ragged lengths, grouped heads, more rows than keys and fewer."""
    method = draw(st.sampled_from(methods))
    mask = masking.causal() if draw(st.sampled_from(causal)) else masking.none()
    H_k, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Problem(
        method, draw(st.sampled_from(("fp32", "fp16"))), draw(st.integers(1, 2)), H_k * group, H_k,
        draw(st.integers(0, 23)), draw(st.integers(0, 23)), draw(st.sampled_from((1, 4, 5))),
        draw(st.sampled_from((T, Tiling(2, 4, 2, 4), Tiling(8, 8, 4, 8)))), mask,
    )  # fmt: skip


slots_of_one = st.integers(1, 20)


def all_slots(W):
    return {name: W for names in STREAMING.values() for name in names}


def moved(model, op="load", array=None):
    return sum(n for (_, a, o), n in model.items() if o == op and array in (None, a))


def needed(p):
    """What must be read, if anything sees it."""
    return sum(compulsory(p)[name] for name in "QKV")


# --- the model against a walk over the blocks -------------------------------------------------


def tiles_seen(p, i):
    """Key tiles that row tile i visits, asked row by row and key by key."""
    B_r, B_c = p.tiling.B_r, p.tiling.B_c
    rows = range(i * B_r, min((i + 1) * B_r, p.N_q))
    causal = p.mask.rule is not masking.none().rule
    seen = {
        key // B_c
        for row in rows
        for key in range(p.N_k)
        if not causal or key <= row + p.N_k - p.N_q
    }
    return set(range(max(seen) + 1)) if seen else set()


def blocks(p):
    """(key/value head, key tiles) of each block of fa2, in the order of their launch."""
    T_r = p.tiling.T_r(p.N_q)
    for block in range(T_r * p.H * p.B):
        i, h, b = T_r - 1 - block % T_r, block // T_r % p.H, block // (T_r * p.H)
        yield (b, h // (p.H // p.H_k)), tiles_seen(p, i)


def keys_of(p, tiles):
    return sum(min(p.tiling.B_c, p.N_k - j * p.tiling.B_c) for j in tiles)


@forall(60, problems(("fa2",)), slots_of_one)
def test_fa2_reads_what_each_wave_sees_once(p, W):
    order = list(blocks(p))
    keys = 0
    for first in range(0, len(order), W):
        seen = {}
        for head, tiles in order[first : first + W]:
            seen.setdefault(head, set()).update(tiles)
        keys += sum(keys_of(p, tiles) for tiles in seen.values())
    model, e = dram(p, {"fa2": W}), DTYPE_BYTES[p.dtype]
    assert moved(model, array="K") == moved(model, array="V") == keys * p.d * e
    assert moved(model, array="Q") == p.B * p.H * p.N_q * p.d * e
    assert moved(model, "store") == compulsory(p)["O"] + compulsory(p)["L"]


@forall(60, problems(("fa2",), causal=(False,)), slots_of_one, st.integers(1, 40))
def test_a_cache_finds_no_more_than_lru_would(p, W, tiles_held):
    """Waves one after the other, each in step, on an LRU cache: the model is never below."""
    p = Problem(p.method, p.dtype, p.B, p.H, p.H_k, p.N_q, p.N_k // 4 * 4, p.d, T)
    order, misses, cache = list(blocks(p)), 0, OrderedDict()
    for first in range(0, len(order), W):
        seen = dict(order[first : first + W])
        for j in range(T.T_c(p.N_k)):
            for head in seen:
                misses += (head, j) not in cache
                cache[head, j] = None
                cache.move_to_end((head, j))
                if len(cache) > tiles_held:
                    cache.popitem(last=False)
    tile = 2 * T.B_c * p.d * DTYPE_BYTES[p.dtype]
    model = dram(p, {"fa2": W}, tiles_held * tile)
    assert moved(model, array="K") + moved(model, array="V") >= misses * tile
    if p.B * p.H_k == 1:  # one stream is found whole or not at all
        assert moved(model, array="K") + moved(model, array="V") == misses * tile


@forall(60, problems(("fa1",)), slots_of_one, st.booleans())
def test_fa1_moves_its_rows_at_every_visit_or_once(p, W, kept):
    model = dram(p, {"fa1_loop": W}, HUGE if kept else 0)
    heads = [(b, h) for b in range(p.B) for h in range(p.H)]
    rows = keys = 0
    for first in range(0, len(heads), W):
        wave = heads[first : first + W]
        keys += len({(b, h // (p.H // p.H_k)) for b, h in wave}) * p.N_k * (p.N_q > 0)
        for _ in wave:
            for i in range(p.tiling.T_r(p.N_q)):
                size = min(p.tiling.B_r, p.N_q - i * p.tiling.B_r)
                visits = len(tiles_seen(p, i))
                rows += size * (min(visits, 1) if kept else visits)
    e = DTYPE_BYTES[p.dtype]
    loop = {key[1:]: n for key, n in model.items() if key[0] == "fa1_loop"}
    assert loop.get(("K", "load"), 0) == loop.get(("V", "load"), 0) == keys * p.d * e
    assert loop.get(("Q", "load"), 0) == rows * p.d * e
    for op in ("load", "store"):
        assert loop.get((p.o_acc_name, op), 0) == rows * p.d * 4
        assert loop.get(("l", op), 0) == loop.get(("m", op), 0) == rows * 4


@forall(60, problems())
def test_blocks_on_their_own_read_what_they_issue(p):
    """One block at a time and no cache: DRAM moves what the closed form, that is the kernel, does.

    Except for Q of `standard`, which neighbouring blocks share at all times.
    """
    widths = {name: p.layout(name).itemsize for name in ("Q", "K", "V", "O", "L", "S", "P", "l")}
    widths |= {"m": widths["l"], "O_acc": 4}
    issued = {
        tuple(name.split()): n * widths[name.split()[0]] for name, n in closed_form(p).items()
    }
    sums = {}
    for (_, array, op), n in dram(p, all_slots(1)).items():
        sums[array, op] = sums.get((array, op), 0) + n
    if p.method == "standard":
        del issued["Q", "load"]
        sums.pop(("Q", "load"), None)
    assert sums == {key: n for key, n in issued.items() if n}


@forall(40, problems())
def test_more_cache_or_a_longer_wave_never_reads_more(p):
    caches = (0, 100, 1000, 10_000, HUGE)
    read = [moved(dram(p, all_slots(3), cache)) for cache in caches]
    assert all(a >= b for a, b in pairwise(read))
    if p.method == "fa2":
        read = [moved(dram(p, all_slots(W))) for W in (1, 2, 4, 8, 16, 32)]
        assert all(a >= b for a, b in pairwise(read))


@forall(40, problems(("fa2",), causal=(False,)))
def test_one_wave_reads_what_must_be_read(p):
    if p.N_q == 0:
        assert dram(p, {"fa2": HUGE}) == {}
        return
    assert moved(dram(p, {"fa2": HUGE})) == needed(p)
    assert moved(dram(p, {"fa2": 1}, HUGE)) == needed(p)


@pytest.mark.parametrize("N", [4, 12, 100, 400])
@pytest.mark.parametrize("W", [1, 2, 7, 25, 100])
def test_the_closed_form_of_one_head(N, W):
    p = Problem("fa2", "fp32", 1, 1, 1, N, N, 8, T)
    assert moved(dram(p, {"fa2": W})) == N * 8 * 4 * (1 + 2 * -(-T.T_r(N) // W))


def test_standard_reads_s_again_where_the_rows_in_flight_do_not_fit():
    p = Problem("standard", "fp32", 1, 2, 2, 40, 60, 8, T)
    S = 2 * 40 * 60 * 4
    in_flight = 3 * 4 * 60 * 4  # 3 blocks of 4 rows
    slots = {"standard_softmax": 3, "standard_output": 2}
    assert moved(dram(p, slots, in_flight - 1), array="S") == 2 * S
    assert moved(dram(p, slots, in_flight), array="S") == S
    model = dram(p, slots, HUGE)
    assert moved(model) == needed(p) + 2 * S
    assert moved(model, "store") == 2 * S + compulsory(p)["O"] + compulsory(p)["L"]


def test_the_softmax_of_the_model_is_the_kernels():
    assert io_model.SOFTMAX_ROWS == standard.SOFTMAX_WARPS


@pytest.mark.parametrize("method", PORTABLE)
@pytest.mark.parametrize("slots", [{}, {"fa3": 4}, all_slots(0)])
def test_blocks_in_flight_are_asked_for_by_name(method, slots):
    p = Problem(method, "fp32", 1, 1, 1, 8, 8, 4, T)
    with pytest.raises(ValueError, match=f"slots: got .*{STREAMING[method][0]}"):
        dram(p, slots)


def test_a_method_without_a_model_is_refused():
    p = Problem("fa3", "bf16", 1, 1, 1, 8, 8, 4, Tiling(128, 128, 64, 4))
    with pytest.raises(ValueError, match="method: got 'fa3', accepted: standard, fa1, fa2"):
        dram(p, {"fa3": 1})


def test_a_mask_without_a_closed_form_is_refused():
    p = Problem("fa2", "fp32", 1, 1, 1, 8, 8, 4, T, masking.window(1, 1))
    with pytest.raises(ValueError, match="mask: got window"):
        dram(p, {"fa2": 1})


# Read once from an H200's counters (dram__bytes_read, caches emptied before): a kernel that only
# streams, with fa2's grid, B_r = 64, d = 64, fp32, 4 blocks on each of 132 SMs.
STREAMED = {
    (1, 32768): 25_178_624,
    (1, 65536): 84_073_728,
    (1, 131072): 303_162_880,
    (1, 262144): 1_145_048_064,
    (1, 524288): 4_448_107_776,
    (8, 32768): 315_300_000,  # rounded
}


@pytest.mark.parametrize(("heads", "N"), STREAMED)
def test_the_model_is_what_an_h200_read(heads, N):
    p = levels.problem("fa2", False, N, Tiling(64, 64, 8, 16), heads=heads)
    ratio = STREAMED[heads, N] / levels.modelled(p, {"fa2": 528}, L2)["loads"]
    assert ratio == pytest.approx(1, abs=0.005 if levels.in_domain(p, {"fa2": 528}, L2) else 0.02)


# --- the domain -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "causal", "heads", "N", "inside"),
    [
        ("fa2", False, 1, 32_768, True),  # one wave
        ("fa2", False, 1, 65_536, False),  # K and V would fit all of L2, and do not fit a quarter
        ("fa2", False, 1, 131_072, False),  # several waves, which drift
        ("fa2", False, 8, 16_384, False),
        ("fa2", True, 1, 32_768, True),
        ("fa2", True, 1, 524_288, False),
        ("fa1", False, 1, 16_384, False),
        ("fa1", False, 8, 8_192, False),
        ("fa1", False, 8, 16_384, False),
        ("standard", False, 1, 2_048, False),
        ("standard", False, 1, 8_192, True),
    ],
)
def test_where_the_model_has_one_answer(method, causal, heads, N, inside):
    p = levels.problem(method, causal, N, Tiling(128, 64, 16, 8), heads=heads)
    assert levels.in_domain(p, SLOTS, L2) is inside


def test_waves_that_drift_may_find_all_of_k_and_v():
    p = levels.problem("fa2", True, 4096, Tiling(128, 64, 16, 8), d=16, heads=20)
    assert levels.waves(p, SLOTS) == 3
    assert levels.in_domain(p, SLOTS, 4 * 2 * 20 * 4096 * 16 * 4)
    assert not levels.in_domain(p, SLOTS, 2 * 20 * 4096 * 16 * 4)


def test_machine_code_is_loaded_once():
    p = levels.problem("fa2", False, 1024, Tiling(128, 64, 16, 8))
    bare, with_code = (levels.modelled(p, SLOTS, L2, code) for code in (0, 70_000))
    assert with_code == {"loads": bare["loads"] + 70_000, "stores": bare["stores"]}


def recorded_points():
    """The points of the recorded sweeps that lie in the domain."""
    for path in sorted((Path(__file__).parent.parent / "benchmarks/results").glob("*/levels.json")):
        yield from (p for p in json.loads(path.read_text())["points"] if p["in_domain"])


def test_a_recorded_sweep_agrees_with_the_model_in_its_domain():
    ratios = [p["ratio"] for p in recorded_points()]
    assert len(ratios) >= 20
    assert ratios == pytest.approx([1] * len(ratios), abs=0.01)
    assert {p["method"] for p in recorded_points()} == {"fa2", "standard"}


def test_waves_are_those_of_the_kernel_that_streams():
    t = Tiling(128, 64, 16, 8)
    assert levels.waves(levels.problem("fa2", False, 264 * 128, t), SLOTS) == 1
    assert levels.waves(levels.problem("fa2", False, 264 * 128 + 1, t), SLOTS) == 2
    assert levels.waves(levels.problem("fa1", False, 128, t, heads=133), SLOTS) == 2
    assert levels.waves(levels.problem("standard", False, 528 * 128, t), SLOTS) == 1


# --- what the counters read, as rows ----------------------------------------------------------


def fake_launch(p, kernel, case=0, off=1.002):
    """What `hardware.profile` might say: issued bytes up to L2, the model's in DRAM."""
    issued, model = predict(p), dram(p, SLOTS, L2 // 2)
    launch = {"case": case, "kernel": kernel}
    for level, (load, store, width) in levels.COUNTERS.items():
        for op, metric in (("load", load), ("store", store)):
            sums = moved(model, op) * off if level == "DRAM" else total(issued, op=op)
            launch[metric] = round(sums * (0.3 if level == "L2 lookups" else 1)) // width
    return launch


def test_rows_say_what_the_counters_know_and_no_more():
    p = levels.problem("fa2", True, 64, T, heads=2)
    launch = {"case": 0, "kernel": "fa2"} | {m: 3 * n for n, m in enumerate(levels.METRICS, 1)}
    rows = levels.hardware_rows(p, [launch])
    assert [(r.level, r.op, r.bytes, r.sectors) for r in rows] == [
        ("L2 to SM", "load", 96, 3), ("L2 to SM", "store", 192, 6),
        ("L2 lookups", "load", 288, 9), ("L2 lookups", "store", 384, 12),
        ("DRAM", "load", 15, 0), ("DRAM", "store", 18, 0),
    ]  # fmt: skip
    for row in rows:
        assert (row.elements, row.requests, row.cycles) == (None, None, None)
        assert (row.source, row.array, row.phase) == ("hardware", "all", "fa2")
        assert (row.method, row.causal, row.heads, row.n_q, row.block_r) == ("fa2", True, 2, 64, 4)
        assert list(row.as_dict()) == COLUMNS
    with pytest.raises(TypeError):  # an unknown number is not added up as 0
        total(rows, "elements")


def test_levels_are_read_for_all_problems_in_one_run(monkeypatch):
    asked = []

    def profile(cases, metrics, *, cache_control):
        asked.append((list(cases), tuple(metrics), cache_control))
        return [
            fake_launch(p, kernel, n)
            for n, p in enumerate(some)
            for kernel in ("one", "two")[: n + 1]
        ]

    monkeypatch.setattr(hardware, "profile", profile)
    t = Tiling(8, 16, 8, 4)
    some = [
        levels.problem("fa2", True, 64, t),
        levels.problem("fa1", False, 32, t, heads=3, batch=2),
    ]
    found = levels.measure(some)
    sizes = [(1, 1, 1, 64, 64, 64), (2, 3, 3, 32, 32, 64)]
    tiles = {"tiling": (8, 16, 8, 4)}
    assert asked == [
        (
            [
                hardware.Case("fa2", "fp32", *sizes[0], True, **tiles),
                hardware.Case("fa1", "fp32", *sizes[1], False, **tiles),
            ],
            levels.METRICS,
            "all",
        )
    ]
    assert len(set(levels.METRICS)) == 6
    assert [{r.phase for r in rows} for rows in found] == [{"one"}, {"one", "two"}]
    assert [{r.method for r in rows} for rows in found] == [{"fa2"}, {"fa1"}]


@simulated
@pytest.mark.parametrize("method", PORTABLE)
def test_the_kernels_that_the_model_names_are_launched(method):
    launches = levels.launched(levels.problem(method, True, 8, T, d=4))
    assert set(STREAMING[method]) <= {launch.kernel for launch in launches}
    kernels = {key[0] for key in dram(levels.problem(method, True, 8, T), SLOTS)}
    assert kernels == {launch.kernel for launch in launches}
    assert levels.slots(launches, 132) == dict.fromkeys(kernels, 0)  # the simulator has no SMs


# --- points, series and fits ------------------------------------------------------------------


def points_of(method, causal, heads, sizes, counted_up_to=0):
    for N in sizes:
        p = levels.problem(method, causal, N, Tiling(128, 64, 16, 8), heads=heads)
        rows = levels.hardware_rows(p, [fake_launch(p, method)])
        yield levels.point(p, rows, SLOTS, L2, counted=counted_up_to >= N)


@pytest.fixture(scope="module")
def record():
    """As levels.json has it, the counters made up."""
    sizes = [2**n for n in range(10, 20)]
    points = [
        *points_of("fa2", False, 1, sizes, 4096),
        *points_of("fa2", True, 1, reversed(sizes)),
        *points_of("fa1", False, 1, sizes[:5]),
        *points_of("standard", False, 1, sizes[:6]),
        *points_of("fa2", False, 8, sizes[:7]),
    ]
    made = {"gpu": "a GPU", "l2_bytes": L2, "points": points, "fits": levels.fits(points)}
    return json.loads(json.dumps(made, allow_nan=False))


def test_a_point_has_every_level(record):
    point = record["points"][0]
    p = levels.problem("fa2", False, 1024, Tiling(128, 64, 16, 8))
    assert tuple(point["loads"]) == tuple(point["stores"]) == levels.LEVELS
    assert point["loads"]["issued"] == total(predict(p), op="load")
    assert point["stores"]["issued"] == total(predict(p), op="store")
    assert point["model"]["loads"] == point["compulsory"] == 3 * 1024 * 64 * 4
    assert point["ratio"] == pytest.approx(1.002, abs=1e-4)
    assert (point["counted"], point["in_domain"], point["waves"]) == (True, True, 1)
    assert point["slots"] == {"fa2": 264}


def test_series_are_in_the_order_of_n(record):
    found = levels.series(record["points"])
    assert set(found) == {
        ("fa2", False, 1), ("fa2", True, 1), ("fa1", False, 1), ("standard", False, 1),
        ("fa2", False, 8),
    }  # fmt: skip
    for line in found.values():
        assert [p["n_q"] for p in line] == sorted(p["n_q"] for p in line)


def test_one_kernel_has_an_exponent_at_each_level(record):
    fits = {
        (f["method"], f["causal"], f["heads"], f["level"], f["part"]): f for f in record["fits"]
    }
    fa2 = {key[3:]: fit["slope"] for key, fit in fits.items() if key[:3] == ("fa2", False, 1)}
    assert fa2["issued", "all"] == pytest.approx(2, abs=0.02)
    assert fa2["DRAM", "one wave"] == pytest.approx(1, abs=0.001)
    assert fa2["DRAM", "more waves"] == pytest.approx(2, abs=0.1)
    assert 1 < fa2["DRAM", "all"] < 2
    assert fits["fa1", False, 1, "DRAM", "all"]["slope"] == pytest.approx(1, abs=0.01)
    assert ("fa1", False, 1, "DRAM", "one wave") not in fits


@pytest.mark.parametrize("p", [1, 1.5, 2])
def test_a_fitted_exponent_is_the_one_put_in(p):
    rows = [
        {"method": "standard", "causal": False, "heads": 1, "n_q": N,
         "loads": dict.fromkeys(levels.LEVELS, 7 * N**p)}
        for N in (64, 16, 256)
    ]  # fmt: skip
    for fit in levels.fits(rows):
        assert fit["slope"] == pytest.approx(p)
        assert fit["half_width"] == pytest.approx(0, abs=1e-6)
    assert {fit["half_width"] for fit in levels.fits(rows[:2])} == {None}
    assert levels.fits(rows[:1]) == []


# --- Theorem 2 --------------------------------------------------------------------------------


def test_theorem_2_rows_are_within_the_theorem():
    rows = levels.theorem_2_rows()
    assert {r["source"] for r in rows} == {"predicted"}
    assert {r["method"] for r in rows} == {"fa1", "fa2"}
    for r in rows:
        assert r["M"] == 2 * r["d"] * (r["block_r"] + r["block_c"]) + r["block_r"] * r["block_c"]
        assert r["order"] == pytest.approx(float(io_model.theta("fa1", r["n"], r["d"], r["M"])))
    one = next(
        r for r in rows if (r["method"], r["n"], r["d"], r["block_r"]) == ("fa2", 1024, 64, 64)
    )
    assert one["elements"] == 2 * 1024**2 * 64 // 64 + 2 * 1024 * 64 + 1024


@pytest.mark.parametrize(("method", "constant"), [("fa1", 12), ("fa2", 8)])
def test_the_constant_nears_the_papers_where_s_is_small(method, constant):
    """Four tiles of B x d make M = 4 B d: fa1 moves 3 N^2 d / B, fa2 2 N^2 d / B."""
    rows = [r for r in levels.theorem_2_rows() if r["method"] == method]
    thin = [r for r in rows if r["n"] == 65536 and r["d"] == 128 and r["block_r"] == 16]
    assert [r["elements"] / r["order"] for r in thin] == [pytest.approx(constant, rel=0.05)]
    found = levels.order(rows)
    assert found.fit.slope == pytest.approx(1, abs=0.05)
    assert constant < found.lowest <= found.constant <= found.highest < 2.5 * constant


def test_counted_rows_are_added_up_by_problem():
    t = Tiling(128, 64, 16, 8)
    kinds = (("fa2", False, 1), ("fa2", True, 1), ("fa2", False, 2), ("standard", False, 1))
    rows = [
        r.as_dict() | {"source": source}
        for kind in kinds
        for r in predict(levels.problem(*kind[:2], 4096, t, heads=kind[2]))
        for source in ("counted", "predicted")
    ]
    counted = [r for r in levels.theorem_2_rows(rows) if r["source"] == "counted"]
    p = levels.problem("fa2", False, 4096, t)
    assert [r["elements"] for r in counted] == [total(predict(p), "elements")]
    assert counted[0]["M"] == 2 * 192 * 64 + 128 * 64


def test_an_order_is_fitted_exactly():
    rows = [{"order": x, "elements": 5 * x} for x in (1e4, 1e6, 1e9)]
    found = levels.order(rows)
    assert found.fit.slope == pytest.approx(1)
    assert found.constant == pytest.approx(found.lowest) == pytest.approx(found.highest)
    assert found.constant == pytest.approx(5)
    assert levels.order(rows[:1]) is None


# --- figures ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks_record():
    rows = [
        {"method": method, "block": B, "batch": 2, "heads": 4, "n": 1024, "d": 64, "dtype": "fp32",
         "issued": 10**9 // B, "dram_loads": 10**6, "dram_stores": 10**5, "milliseconds": 3.0}
        for method in ("fa1", "fa2") for B in (64, 16, 32)
    ]  # fmt: skip
    return {"gpu": "a GPU", "rounds": 5, "rows": rows}


def test_every_figure_is_drawn_and_saved(record, blocks_record, tmp_path):
    drawings = plots.draw_recorded(record, blocks_record)
    names = ["levels", "levels_8_heads", "dram_residuals", "block_sizes", "theorem_2"]
    assert [d.name for d in drawings] == names
    for d in drawings:
        for path in plots.save(d, tmp_path):
            assert path.stat().st_size > 10_000
        assert "level" in d.caption.lower() or "DRAM" in d.caption


def test_without_results_the_theorem_alone_is_drawn():
    assert [d.name for d in plots.draw_recorded()] == ["theorem_2"]
    assert plots.theorem_2([]) is None
    assert plots.block_sizes({"rows": []}) is None
    assert plots.residuals({"points": []}) is None
    assert plots.four_levels({"points": []}, 1) is None


def lines(ax):
    """x of the drawn points, in order, by colour and face."""
    found = {}
    for line in ax.get_lines():
        if line.get_marker() != "None":
            key = line.get_color(), line.get_markerfacecolor()
            found[key] = sorted([*found.get(key, []), *line.get_xdata()])
    return found


def test_a_panel_shows_what_was_counted_and_the_thresholds(record):
    drawing = plots.four_levels(record, 1)
    panels = {ax.get_title(): ax for ax in drawing.figure.axes}
    assert set(panels) == {"standard", "FA1", "FA2", "FA2 causal"}
    fa2 = panels["FA2"]
    issued = plots.LEVEL_COLOURS["issued"]
    assert lines(fa2)[issued, issued] == [1024, 2048, 4096]  # counted
    assert lines(fa2)[issued, plots.PAPER][0] == 8192
    texts = [t.get_text() for t in fa2.get_legend().get_texts()]
    assert texts[-1].startswith("DRAM: 1.00 ± 0.00 → ")
    assert {t.get_text() for t in fa2.texts} == {"one wave", "K + V = L2"}
    vertical = sorted(
        line.get_xdata()[0] for line in fa2.get_lines() if len(set(line.get_xdata())) == 1
        and line.get_marker() == "None"
    )  # fmt: skip
    assert vertical == [128 * 264, L2 / 512]
    assert not panels["FA1"].texts


def test_points_outside_the_domain_are_hollow(record):
    drawing = plots.residuals(record)
    everything, inside = drawing.figure.axes
    blue = plots.COLOURS["fa2"]
    assert 65536 in lines(everything)[blue, plots.PAPER]
    assert 524288 in lines(everything)[blue, plots.PAPER]
    assert 32768 in lines(everything)[blue, blue]
    assert not any(x for (_, face), x in lines(inside).items() if face == plots.PAPER)


# --- the benchmarks ---------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch):
    """benchmarks.levels with tiny groups, on the simulator's kernels and made-up counters."""
    bench = pytest.importorskip("benchmarks.levels")
    small = {
        "first": [("fa2", False, 1, [8, 16]), ("standard", False, 1, [8])],
        "second": [("fa2", True, 2, [8, 16, 32])],
    }
    monkeypatch.setattr(bench, "GROUPS", small)
    monkeypatch.setattr(bench, "D", 4)
    monkeypatch.setattr(bench, "choose", lambda *_: T)
    monkeypatch.setattr(levels, "device", lambda: (132, L2))
    monkeypatch.setattr(levels, "slots", lambda launches, SMs: SLOTS)
    monkeypatch.setattr(levels, "launched", lambda p: [])
    monkeypatch.setattr(
        levels,
        "measure",
        lambda some: [levels.hardware_rows(p, [fake_launch(p, p.method)]) for p in some],
    )
    return bench


@simulated
def test_the_sweep_goes_group_by_group_and_counts_last(bench, tmp_path):
    sweep = bench.Sweep(max_n=16, seconds=1000)
    assert [said.rpartition(" (")[0] for said in sweep.run()] == [
        "first", "second", "counted", "done",
    ]  # fmt: skip
    bench.write_record(sweep.record({"gpu": "a GPU"}), tmp_path / "levels.json")
    found = json.loads((tmp_path / "levels.json").read_text())
    assert [(p["method"], p["n_q"], p["counted"]) for p in found["points"]] == [
        ("fa2", 8, True), ("fa2", 16, True), ("standard", 8, True), ("fa2", 8, False),
        ("fa2", 16, False),
    ]  # fmt: skip
    assert {r["source"] for r in found["traffic"]} == {"hardware", "counted"}
    assert found["l2_bytes"] == L2
    assert found["notes"] == []
    assert plots.draw_recorded(found)


def test_the_sweep_stops_when_its_time_is_over(bench):
    sweep = bench.Sweep(max_n=16, seconds=-1)
    assert len(list(sweep.run())) == 1
    assert len(sweep.notes) == 3


def test_a_group_that_fails_is_noted(bench, monkeypatch):
    def measure(some):
        raise hardware.HardwareError("ncu: not in PATH")

    monkeypatch.setattr(levels, "measure", measure)
    sweep = bench.Sweep(max_n=16, seconds=1000)
    list(sweep.run())
    assert sweep.notes == ["first: ncu: not in PATH", "second: ncu: not in PATH"]
    assert sweep.record({})["points"] == []


def test_the_sweeps_sizes_are_powers_of_two():
    bench = pytest.importorskip("benchmarks.levels")
    assert bench.powers(1024, 8192) == [1024, 2048, 4096, 8192]
    cases = [case for group in bench.GROUPS.values() for case in group]
    seen = [(m, c, h, N) for m, c, h, sizes in cases for N in sizes]
    assert len(seen) == len(set(seen))
    assert ("fa2", False, 1, 524_288) in seen


def test_the_block_sizes_fit():
    fig2 = pytest.importorskip("benchmarks.fig2")
    for p in fig2.problems(list(fig2.TILINGS)):
        assert p.tiling.fits(p.d, p.dtype, p.method, 232_448)
        assert p.tiling.B_r == p.tiling.B_c


def test_a_row_of_the_block_sizes_is_plain(monkeypatch):
    fig2 = pytest.importorskip("benchmarks.fig2")
    monkeypatch.setattr(levels, "launched", lambda p: [])
    monkeypatch.setattr(levels, "slots", lambda launches, SMs: SLOTS)
    p = fig2.problems([64])[0]
    row = json.loads(json.dumps(fig2.row(p, [3.0, 1.0, 2.0], 132, L2)))
    times = (row["milliseconds_min"], row["milliseconds"], row["milliseconds_max"])
    assert times == (1.0, 2.0, 3.0)
    assert row["issued"] == total(predict(p))
    assert math.isfinite(row["model"]["loads"])
