"""The measurements of a probe, compared with numpy and with numbers by hand."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from probes.vector.direction import Direction, Moments, Tally


def measured(queries: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Direction:
    """Tally (h(text instruction), h(vision instruction), h(plain prompt)) of each query, each (layers, d)."""
    tally = Tally()
    for states in queries:
        tally.add(*states)
    return tally.direction()


def test_running_moments_equal_numpy() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, (50, 4, 5))
    moments = Moments()
    for value in values:
        moments.add(torch.from_numpy(value))
    np.testing.assert_allclose(moments.mean.numpy(), values.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.std.numpy(), values.std(0), rtol=1e-12)


def test_moments_do_not_cancel_far_from_zero() -> None:
    moments = Moments()
    for value in (1e9 + 1, 1e9 + 2, 1e9 + 3):
        moments.add(torch.tensor(value, dtype=torch.float64))
    assert float(moments.std) == pytest.approx((2 / 3) ** 0.5, rel=1e-6)


def test_moments_without_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="No value"):
        _ = Moments().mean


def by_hand() -> Direction:
    """Two layers of two dimensions, two queries. At layer 0 v = (2, -4) and (4, -2), at layer 1 (1, 1) and (3, 3)."""
    return measured(
        [
            (
                torch.tensor([[3.0, 1.0], [2.0, 2.0]]),
                torch.tensor([[1.0, 5.0], [1.0, 1.0]]),
                torch.tensor([[4.0, -2.0], [6.0, 0.0]]),
            ),
            (
                torch.tensor([[5.0, 1.0], [4.0, 4.0]]),
                torch.tensor([[1.0, 3.0], [1.0, 1.0]]),
                torch.tensor([[0.0, 2.0], [-6.0, 4.0]]),
            ),
        ]
    )


def test_direction_and_score_by_hand() -> None:
    direction = by_hand()
    assert direction.queries == 2
    assert direction.v.tolist() == [[3.0, -3.0], [2.0, 2.0]]
    # |v| per query: 3 and 3 at layer 0; 1 and 3 at layer 1, with mean 2 and deviation 1.
    assert direction.mean_abs.tolist() == [3.0, 2.0]
    assert direction.std.tolist() == [0.0, 1.0]
    # mean |h| of the instructed: layer 0 has 3 1 1 5 5 1 1 3 = 20 / 8, layer 1 has 2 2 1 1 4 4 1 1 = 16 / 8.
    assert direction.instructed.tolist() == [2.5, 2.0]
    # of the plain ones: layer 0 has 4 2 0 2 = 8 / 4, layer 1 has 6 0 6 4 = 16 / 4.
    assert direction.plain.tolist() == [2.0, 4.0]
    assert direction.score[1].item() == pytest.approx(2.0)
    assert direction.ranking() == [0, 1]
    assert direction.ranking([1]) == [1]


def test_both_readings_of_the_weight_and_both_states_by_hand() -> None:
    direction = by_hand()
    # the mean over queries of |v(q)| is 3 and 2; |mean v| is the same here, since no element changes its sign
    assert direction.weight().tolist() == pytest.approx([2 / 3, 4 / 2])
    assert direction.weight("queries", "instructed").tolist() == pytest.approx([2.5 / 3, 2 / 2])
    assert direction.weight("mean", "plain").tolist() == pytest.approx([2 / 3, 4 / 2])
    # v = (4, 0) and (-2, 2): mean (1, 1), so |mean v| is 1 while the queries' |v(q)| are 2 and 2
    zero, states = torch.zeros(1, 2), torch.tensor([[3.0, 5.0]])
    disagreeing = measured([(torch.tensor([[4.0, 0.0]]), zero, states), (torch.tensor([[-2.0, 2.0]]), zero, states)])
    assert disagreeing.weight("queries", "plain").tolist() == pytest.approx([4 / 2])
    assert disagreeing.weight("mean", "plain").tolist() == pytest.approx([4 / 1])
    # instructed states: 4 0 0 0 2 2 0 0 = 8 / 8
    assert disagreeing.weight("queries", "instructed").tolist() == pytest.approx([1 / 2])
    assert disagreeing.weight("mean", "instructed").tolist() == pytest.approx([1 / 1])
    # only with |mean v| what is added has the states' size
    added = disagreeing.weight("mean", "plain")[:, None] * disagreeing.v
    assert added.abs().mean().item() == pytest.approx(float(states.mean()))


def test_the_reading_by_l2_norms_by_hand() -> None:
    # v has norms sqrt(20) twice at layer 0, sqrt(2) and sqrt(18) at layer 1; plain states sqrt(20), 2 and 6, sqrt(52)
    plain = [(20**0.5 + 2) / 2 / 20**0.5, (6 + 52**0.5) / 2 / 8**0.5]
    assert by_hand().weight("l2").tolist() == pytest.approx(plain)
    # instructed states: sqrt(10), sqrt(26), sqrt(26), sqrt(10) and sqrt(8), sqrt(2), sqrt(32), sqrt(2)
    instructed = [(10**0.5 + 26**0.5) / 2 / 20**0.5, (8**0.5 + 32**0.5 + 2 * 2**0.5) / 4 / 8**0.5]
    assert by_hand().weight("l2", "instructed").tolist() == pytest.approx(instructed)


def test_tiny_differences_rank_behind_large_ones_however_steady_they_are() -> None:
    """Layer 0 differs by a thousandth of its states, by exactly as much for every query; layer 1 by as much as they are."""
    zero = torch.ones(2, 2)
    queries = [
        (zero + torch.stack([torch.full((2,), 1e-3), torch.full((2,), size)]), zero, zero) for size in (0.8, 1.0, 1.2)
    ]
    direction = measured(queries)
    assert direction.score[0] > 100 * direction.score[1]
    assert direction.agreement.tolist() == pytest.approx([1.0, 1.0])
    assert direction.ranking() == [1, 0]
    assert direction.ranking([0]) == [0]


def test_queries_that_cancel_have_no_weight_by_their_mean() -> None:
    one, zero = torch.tensor([[2.0, -2.0]]), torch.zeros(1, 2)
    direction = measured([(one, zero, one), (-one, zero, one)])
    assert direction.weight("queries").tolist() == [1.0]
    assert direction.weight("mean").tolist() == [0.0]


def test_queries_that_disagree_rank_last() -> None:
    steady, none = torch.tensor([1.0, 0.0]), torch.zeros(2, 2)
    queries = [
        (torch.stack([steady * (1 + 0.5 * sign), steady * sign * 9]), none, torch.ones(2, 2)) for sign in (1.0, -1.0)
    ]
    direction = measured(queries)
    assert direction.agreement.tolist() == pytest.approx([1.0, 0.0])
    assert direction.score[1] > direction.score[0]
    assert direction.ranking() == [0, 1]


def test_a_layer_without_any_difference_has_weight_and_score_zero() -> None:
    states = torch.ones(1, 3)
    direction = measured([(states, states, states)])
    assert direction.weight().tolist() == [0.0]
    assert direction.score.tolist() == [0.0]


def test_a_single_query_has_no_score_and_the_largest_direction_comes_first() -> None:
    tally = Tally()
    small, large = torch.zeros(3, 4), torch.ones(3, 4)
    large[1] = 5.0
    tally.add(large, small, large)
    assert tally.direction().score.tolist() == [0.0] * 3
    assert tally.direction().ranking() == [1, 0, 2]
