"""The cycle model's arithmetic: waves, places, schedules, and who visits what."""

import itertools
import math

import pytest

from fa2_numba import masking
from fa2_numba.accounting import cycles
from fa2_numba.accounting.cycles import Cost
from fa2_numba.problem import Problem
from fa2_numba.tiling import Tiling

TILING = Tiling(32, 16, 8, 8)


def problem(method: str, N_q: int = 100, N_k: int = 130, causal: bool = False) -> Problem:
    mask = masking.causal() if causal else masking.none()
    return Problem(method, "fp32", 2, 3, 3, N_q, N_k, 64, TILING, mask)


def cost(alone: float = 10, full: float = 15, places: int = 2) -> Cost:
    return Cost({"x": alone}, {"x": full}, 5, 6, places)


@pytest.mark.parametrize(("N_q", "N_k"), [(100, 130), (130, 100), (1, 1), (32, 16), (33, 200)])
def test_row_tiles_are_those_with_a_visible_key(N_q, N_k):
    expected = []
    for i in range(TILING.T_r(N_q)):
        rows = range(i * TILING.B_r, min(N_q, (i + 1) * TILING.B_r))
        keys = {j // TILING.B_c for r in rows for j in range(N_k) if j <= r + N_k - N_q}
        expected.append(len(keys))
    assert cycles.visited_tiles(problem("fa2", N_q, N_k, causal=True)) == expected
    assert cycles.visited_tiles(problem("fa2", N_q, N_k)) == [TILING.T_c(N_k)] * TILING.T_r(N_q)


def test_another_mask_is_refused():
    p = Problem("fa2", "fp32", 1, 1, 1, 64, 64, 64, TILING, masking.window(3, 3))
    with pytest.raises(ValueError, match="mask: got"):
        cycles.visited_tiles(p)


@pytest.mark.parametrize("causal", [False, True])
def test_every_method_visits_the_same_tiles(causal):
    p = {m: cycles.visits(problem(m, causal=causal)) for m in ("fa1", "fa2")}
    fa2 = sum(v["S = Q K^T"] * n for v, n in p["fa2"]["fa2"])
    fa1 = sum(v["S = Q K^T"] * n for v, n in p["fa1"]["fa1_loop"])
    assert fa1 == fa2 == 6 * sum(cycles.visited_tiles(problem("fa2", causal=causal)))


def test_the_phases_are_those_of_the_kernels():
    from fa2_numba.kernels import fa1, fa2, standard

    phases = {
        "fa2": fa2.PHASES,
        "fa1_loop": fa1.PHASES,
        "standard_scores": standard.SCORES_PHASES,
        "standard_softmax": standard.SOFTMAX_PHASES,
        "standard_output": standard.OUTPUT_PHASES,
    }
    for method in ("standard", "fa1", "fa2"):
        for kernel, blocks in cycles.visits(problem(method)).items():
            assert set(blocks[0][0]) == set(phases.pop(kernel))
    assert not phases


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 23])
def test_equal_blocks_run_in_waves(n):
    SMs, c = 4, cost()
    waves, rest = divmod(n, 8)
    tail = 0 if not rest else 5 + 30 if rest <= 4 else 6 + 45
    assert cycles.kernel_cycles([({"x": 3}, n)], c, SMs) == waves * (6 + 45) + tail


@pytest.mark.parametrize("n", [1, 5, 7, 16])
def test_the_schedule_of_equal_blocks_is_the_waves_with_one_place(n):
    c = cost(places=1)
    blocks = [{"x": 3}] * n
    expected = cycles.kernel_cycles([({"x": 3}, n)], c, 4)
    assert cycles._schedule(blocks, c, 4) == pytest.approx(expected)


def test_a_schedule_is_bounded_by_its_work_and_its_longest_block():
    c = cost(places=2)
    blocks = [({"x": n}, 1) for n in itertools.chain(range(20, 0, -1), range(5))]
    end = cycles.kernel_cycles(blocks, c, 3)
    work = sum(c.block(v, 2) for v, _ in blocks) / (3 * 2)
    longest = max(c.block(v, 2) for v, _ in blocks)
    assert max(work * 0.9, c.block({"x": 20}, 1)) <= end <= work + longest


def test_a_block_alone_on_its_sm_runs_at_its_own_pace():
    # One SM, two places: 10 and 30 units together, then the long one alone.
    c = Cost({"x": 1}, {"x": 2}, 0, 0, 2)
    end = cycles._schedule([{"x": 10}, {"x": 30}], c, 1)
    assert end == pytest.approx(20 + 20)  # 20 cycles for 10 units each, then 20 units alone


def test_nothing_takes_no_time():
    assert cycles.kernel_cycles([], cost(), 4) == 0
    assert cycles.kernel_cycles([({"x": 1}, 0)], cost(), 4) == 0


def test_errors():
    assert cycles.mean_absolute_error([1.1, 0.9], [1, 1]) == pytest.approx(0.1)
    assert cycles.largest_error([1.1, 0.5], [1, 1]) == 0.5
    assert cycles.largest_error([3.0, 0.5], [1, 1]) == 3.0


def test_fa1_adds_what_its_small_kernels_move():
    p = problem("fa1")
    c = {"fa1_loop": Cost(*(2 * [dict.fromkeys(cycles.visits(p)["fa1_loop"][0][0], 0.0)]), 0, 0, 1)}
    time = cycles.milliseconds(p, c, 1, 1.0, 1e12)
    assert math.isclose(time, 1e3 * 600 * 4 * 69 / 1e12)
