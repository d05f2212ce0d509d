"""Bugs that a reading of the code found, each with half a line of history."""

import numpy as np
import pytest

from fa2_numba import api, io_model, masking, simulator, traffic
from fa2_numba.tiling import Tiling

pytestmark = pytest.mark.skipif(not simulator.ACTIVE, reason="NumPy arrays: NUMBA_ENABLE_CUDASIM=1")


def test_slopes_given_as_a_score_are_checked_too() -> None:
    """Too few slopes were read out of bounds; slopes of a list stayed float64."""
    q = np.ones((2, 5, 4), np.float32)
    with pytest.raises(ValueError, match="alibi_slopes: slopes for shape"):
        api.attention(q, q, q, score=masking.alibi(np.ones(1, np.float32)))
    one = api.attention(q, q, q, score=masking.alibi([0.5, 0.25]))
    other = api.attention(q, q, q, alibi_slopes=np.array([0.5, 0.25], np.float32))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("fraction", [24 / 47, 8 / 47])
def test_a_float_of_a_mask_is_one_number_for_kernel_and_model(fraction: float) -> None:
    """The kernel got float32, the model float64: int(i * 24/47) differed."""

    def bounds(args, b, h, i, N_k):
        return 0, int(i * args[0]) + 1

    q = np.ones((48, 4), np.float32)
    mask = masking.Mask("fraction", masking.Rule(bounds), (fraction,))
    m = api.measure(q, q, q, mask=mask, tiling=Tiling(8, 8, 4, 8))
    assert traffic.differences(m.rows, io_model.predict(m.problem)) == []


def test_an_own_table_may_have_any_name() -> None:
    """Tables were taken for documents by the beginning of their name."""

    def listed(args, b, h, i, j):
        return args[0][j] > 0

    q = np.ones((5, 4), np.float32)
    table = masking.Table("documents of mine", np.ones(5, np.int32))
    np.testing.assert_array_equal(api.attention(q, q, q, mask=masking.custom(listed, table)), q)
