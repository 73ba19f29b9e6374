"""Vectors add, scale and negate as by hand, and say of what they were composed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from steering import Steer, SteeringVector, VectorError
from tests.steering.vectors.made import LAYERS, WIDTH, make


def small() -> SteeringVector:
    return make(
        direction=torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.5, 0.0]]),
        weight=torch.tensor([2.0, 0.5, 4.0]),
        mean_abs=torch.tensor([1.5, 3.5, 0.25]),
        std=torch.tensor([0.1, 0.2, 0.3]),
        layers=(0, 2),
    )


def test_delta_is_scale_times_weight_times_direction_at_the_chosen_layers() -> None:
    expected = torch.tensor([[-3.0, -6.0], [0.0, 0.0], [-3.0, 0.0]])
    torch.testing.assert_close(small().delta(-1.5), expected)
    torch.testing.assert_close(small().delta(2.0, layers=[1]), torch.tensor([[0.0, 0.0], [3.0, -4.0], [0.0, 0.0]]))


def test_scaling_and_negating_are_strengths_to_the_last_bit() -> None:
    vector = small()
    for factor in (2.0, 0.3, -1.7, 0.0, 3):
        for scaled in (vector * factor, factor * vector):
            assert torch.equal(scaled.delta(1.0), vector.delta(factor))
            # What was measured stays; only how much of it is added changes.
            for name in ("direction", "mean_abs", "std"):
                assert torch.equal(getattr(scaled, name), getattr(vector, name))
            assert (scaled.name, scaled.layers, scaled.kind) == (vector.name, vector.layers, vector.kind)
            assert scaled.fingerprint == vector.fingerprint
    torch.testing.assert_close((2.0 * vector).delta(1.0), torch.tensor([[4.0, 8.0], [0.0, 0.0], [4.0, 0.0]]))
    assert torch.equal((-vector).delta(1.0), -vector.delta(1.0))


def test_adding_and_subtracting_do_what_both_do() -> None:
    one = small()
    other = dataclasses.replace(
        small(), name="other", direction=torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), weight=torch.ones(3),
        layers=(1, 2),
    )  # fmt: skip
    total = one + other
    # Layer 0: 2 * (1, 2); layer 1: (1, 1); layer 2: 4 * (0.5, 0) + (1, 1).
    assert torch.equal(total.delta(1.0), torch.tensor([[2.0, 4.0], [1.0, 1.0], [3.0, 1.0]]))
    assert (total.name, total.layers) == ("preference", (0, 1, 2))
    torch.testing.assert_close(total.mean_abs, torch.tensor([3.0, 1.0, 2.0]))
    # Layer 0: 2 * 0.1; layer 1: 0.2; layer 2: 4 * 0.3 + 0.3.
    torch.testing.assert_close(total.std, torch.tensor([0.2, 0.2, 1.5]))
    assert torch.equal((one - other).delta(1.0), one.delta(1.0) - other.delta(1.0))
    torch.testing.assert_close((total * 0.5).delta(2.0), total.delta(1.0))


@pytest.mark.parametrize("factor", [0.5, -1.3, 0.1])
def test_a_sum_with_factors_adds_exactly_in_every_layer(factor: float) -> None:
    one, other = make("one", seed=1, layers=(0, 1)), make("other", seed=2, layers=(1, 3))
    total = one + factor * other
    assert torch.equal(total.delta(1.0), one.delta(1.0) + other.delta(factor))
    torch.testing.assert_close(total.delta(1.0), one.delta(1.0) + factor * other.delta(1.0))
    assert total.layers == (0, 1, 3)
    assert not total.delta(1.0, layers=[2]).any()


def test_a_composed_vector_says_of_what_and_forgets_the_calibration() -> None:
    one, other = make("one"), make("other", seed=1, kind="different")
    total = (2.0 * (one - 0.5 * other) + one).named("mixture")
    terms = [("one", 2.0), ("other", -1.0), ("one", 1.0)]
    assert total.info == {"composed_of": [{"name": name, "scale": scale} for name, scale in terms]}
    assert (total.name, total.kind, (one + one).kind) == ("mixture", "composed", one.kind)
    assert all(vector.calibrated_range is None for vector in (total, -one, 1.0 * one))
    again = SteeringVector.from_bytes(total.to_bytes())
    assert (again.info, torch.equal(again.delta(1.0), total.delta(1.0))) == (total.info, True)


def test_a_rename_changes_the_name_alone() -> None:
    one = make()
    renamed = one.named("other")
    assert (renamed.name, renamed.calibrated_range, renamed.info) == ("other", (0.5, 1.5), one.info)
    assert torch.equal(renamed.delta(0.7), one.delta(0.7))
    with pytest.raises(VectorError) as refused:
        one.named("../other")
    assert refused.value.code == "bad_vector_name"


def test_vectors_of_different_models_do_not_add() -> None:
    with pytest.raises(VectorError, match="different models: fingerprints abc and def") as refused:
        make() + make("other", fingerprint="def")
    assert refused.value.code == "wrong_model"
    wide = make("wide", direction=torch.zeros(LAYERS, WIDTH + 1))
    with pytest.raises(VectorError, match=r"different shapes: \(4, 7\) and \(4, 6\)") as refused:
        wide - make()
    assert refused.value.code == "wrong_shape"


def test_vectors_add_to_vectors_and_scale_by_numbers_only() -> None:
    vector: Any = make()
    for compute in (
        lambda: vector + 1,
        lambda: 1 + vector,
        lambda: vector - 1,
        lambda: vector * "2",
        lambda: vector * vector,
        lambda: vector * True,
        lambda: vector * None,
    ):
        with pytest.raises(TypeError):
            compute()
    for factor in (float("nan"), float("inf"), 1e300):
        with pytest.raises(VectorError, match="weight must be finite"):
            vector * factor


def test_what_a_vector_is_composed_of_is_bounded() -> None:
    vector = make()
    for _ in range(10):
        vector = vector + vector
    assert len(vector.info["composed_of"]) == 1024
    with pytest.raises(VectorError, match="at most 1024 terms"):
        vector + vector


@pytest.mark.parametrize(
    ("info", "published"),
    [
        ({"published": 1.0}, 1.0),
        ({"published": 1.0, "calibration": {"range": [1, 2], "factor": 0.4}}, 0.4),
        ({"calibration": {"range": [1, 2], "factor": 0.25}}, 0.25),
        ({"calibration": {"range": [1, 2]}}, None),
        ({"published": 0}, None),
        ({}, None),
    ],
)
def test_strength_one_in_published_units(info: dict[str, Any], published: float | None) -> None:
    vector = make(info=info)
    assert vector.published == published
    assert SteeringVector.from_bytes(vector.to_bytes()).published == published
    steer = Steer.to(vector, "vision", 2.5)
    assert steer.published == (None if published is None else 2.5 * published)
    assert steer.settings["published"] == steer.published


def test_a_scaled_vector_still_knows_its_strength_in_published_units() -> None:
    vector = make(info={"calibration": {"range": [1, 2], "factor": 0.5}})
    assert (3.0 * vector).published == 1.5
    assert (-vector).published == 0.5
    assert (0.0 * vector).published is None
    assert (2.0 * make(info={})).published is None


def test_multiples_of_one_direction_add_up_to_a_multiple_in_published_units() -> None:
    vector = make(info={"calibration": {"range": [1, 2], "factor": 0.5}})
    for factor, published in ((0.5, 0.75), (1.0, 1.0), (10.0, 5.5), (-0.5, 0.25), (-3.0, 1.0)):
        assert (vector + factor * vector).published == pytest.approx(published)
        assert (factor * vector + vector).published == pytest.approx(published)
    total = 0.1 * vector + (0.2 * vector).named("other") + 0.3 * (vector + vector)
    assert total.published == pytest.approx(0.45)
    assert SteeringVector.from_bytes(total.to_bytes()).published == total.published
    assert (vector - vector).published is None
    for other in (make(seed=1, info=vector.info), make(layers=(1,), info=vector.info), make(info={})):
        assert (vector + other).published is None


def test_sizes_by_hand() -> None:
    """The numbers are weight 2 and -3, mean |v| 1.5 and 2, states of 4 and 12."""
    vector = make(
        direction=torch.tensor([[1.0, -2.0], [4.0, 0.0]]), weight=torch.tensor([2.0, -3.0]),
        mean_abs=torch.ones(2), std=torch.ones(2), layers=(0,),
    )  # fmt: skip
    assert vector.sizes(torch.tensor([4.0, 12.0])).tolist() == [0.75, 0.5]
