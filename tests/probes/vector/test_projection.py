"""Principal components against numpy's eigenvectors, and which states are projected against plain transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import steering
from probes.conflicts.degrade import degraded
from probes.conflicts.samples import messages
from probes.vector.projection import SEVERITY, Projection, components, project, settings
from tests import families
from tests.probes.conftest import make_samples
from tests.steering.plain import Plain


def _by_eigenvectors(states: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Project the states by the covariance matrix."""
    centred = states - states.mean(0)
    values, vectors = np.linalg.eigh(np.cov(centred.T, bias=True))
    return centred @ vectors[:, [-1, -2]], [values[-1] / values.sum(), values[-2] / values.sum()]


def _same_up_to_sign(points: np.ndarray, expected: np.ndarray, atol: float) -> None:
    for axis in (0, 1):
        sign = np.sign(points[:, axis] @ expected[:, axis])
        np.testing.assert_allclose(points[:, axis], sign * expected[:, axis], atol=atol)


@pytest.mark.parametrize("shape", [(40, 6), (5, 30), (3, 2)])
def test_components_are_the_first_eigenvectors_of_the_covariance(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(3.0, 1.0, shape) * np.linspace(1, 5, shape[1]) + 100
    points, explained = components(states)
    expected, shares = _by_eigenvectors(states)
    assert points.shape == (shape[0], 2)
    _same_up_to_sign(points, expected, 1e-9)
    assert explained == pytest.approx(shares)
    assert explained[0] >= explained[1]


def test_components_agree_with_torch() -> None:
    states = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9) - 20
    torch.manual_seed(0)
    left, sizes, _ = torch.pca_lowrank(states.double(), q=8, niter=10)
    points, _ = components(states.numpy())
    _same_up_to_sign(points, (left[:, :2] * sizes[:2]).numpy(), 1e-5)


def test_points_on_a_line_have_one_component() -> None:
    points, explained = components(np.outer([0.0, 1.0, 3.0], [3.0, 4.0]).astype(np.float32))
    np.testing.assert_allclose(np.abs(points[:, 0]), [20 / 3, 5 / 3, 25 / 3], rtol=1e-6)
    np.testing.assert_allclose(points[:, 1], 0, atol=1e-6)
    assert explained == pytest.approx((1.0, 0.0))


@pytest.mark.parametrize("states", [np.ones((1, 5)), np.ones((4, 5)), np.ones((1, 1))])
def test_without_any_difference_nothing_is_explained(states: np.ndarray) -> None:
    points, explained = components(states)
    assert points.tolist() == [[0.0, 0.0]] * len(states)
    assert explained == (0.0, 0.0)


def test_one_dimension_is_the_first_component() -> None:
    points, explained = components(np.array([[1.0], [2.0], [6.0]]))
    np.testing.assert_allclose(np.abs(points), [[2, 0], [1, 0], [3, 0]], atol=1e-12)
    assert explained == pytest.approx((1.0, 0.0))


def test_float32_far_from_zero_does_not_cancel() -> None:
    states = np.array([[4096.0, 0.0], [4096.5, 0.0], [4097.0, 0.0]], np.float32)
    points, _ = components(states)
    np.testing.assert_allclose(np.abs(points[:, 0]), [0.5, 0.0, 0.5], atol=1e-9)


def test_settings_are_those_of_the_paper() -> None:
    samples = make_samples(2)
    asked = settings(samples, seed=4)
    assert {name: [setting for _, setting in shown] for name, shown in asked.items()} == {
        "plain": ["plain"] * 2,
        "instructed toward vision": ["vision"] * 2,
        "instructed toward text": ["text"] * 2,
        "image with noise": ["plain"] * 2,
        "text with errors": ["plain"] * 2,
    }
    for name in ("plain", "instructed toward vision", "instructed toward text"):
        assert [sample for sample, _ in asked[name]] == samples
    for name, side in (("image with noise", "vision"), ("text with errors", "text")):
        for (sample, _), whole in zip(asked[name], samples, strict=True):
            expected = degraded(whole, side, SEVERITY, 4)
            assert sample.picture() == expected.picture()
            assert sample.context == expected.context
            assert (sample.picture() != whole.picture()) == (side == "vision")
            assert (sample.context != whole.context) == (side == "text")


@pytest.mark.parametrize("layer", [0, 2])
def test_points_are_the_last_tokens_states_after_that_layer(root: Path, tiny: steering.Engine, layer: int) -> None:
    plain, samples = Plain(families.checkpoint("qwen2_vl", root)), make_samples(3)
    asked = settings(samples, seed=1)
    states = torch.stack(
        [
            plain.answer(messages(sample, setting, False), 1).hidden[layer, -1]
            for shown in asked.values()
            for sample, setting in shown
        ]
    )
    expected, shares = _by_eigenvectors(states.double().numpy())
    found = project(tiny, samples, layer, seed=1, quiet=True)
    assert list(found.points) == list(asked)
    assert all(points.shape == (3, 2) for points in found.points.values())
    _same_up_to_sign(np.concatenate(list(found.points.values())), expected, 1e-3 * float(np.abs(expected).max()))
    assert found.explained == pytest.approx(shares, rel=1e-3)


def test_centres_are_means() -> None:
    projection = Projection({"a": np.array([[0.0, 2.0], [4.0, 6.0]]), "b": np.array([[1.0, 1.0]])}, (0.7, 0.2))
    assert projection.centres() == {"a": [2.0, 4.0], "b": [1.0, 1.0]}


def test_how_far_the_centres_shift() -> None:
    plain = np.zeros((50, 2))
    x = np.tile([3.0, 5.0], 25)
    points = {
        "plain": plain, "instructed toward vision": np.stack([-x, plain[:, 0]], 1),
        "instructed toward text": np.stack([x, plain[:, 0]], 1), "image with noise": plain + np.array([0.3, 0.4]),
    }  # fmt: skip
    found = Projection(points, (0.7, 0.2)).shifts()
    assert found["distance"] == pytest.approx(
        {"instructed toward vision": 4, "instructed toward text": 4, "image with noise": 0.5}
    )
    # The standard error of 50 values that are 3 or 5 is 1 / sqrt(50).
    expected = [4 - 1.96 / 50**0.5, 4 + 1.96 / 50**0.5]
    assert found["distance_95"]["instructed toward text"] == pytest.approx(expected, abs=0.04)
    assert found["distance_95"]["image with noise"] == pytest.approx([0.5, 0.5])
    assert (found["cosine"], found["cosine_95"]) == (pytest.approx(-1), pytest.approx([-1, -1]))
