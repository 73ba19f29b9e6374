"""Logistic regression with a ridge penalty, as a linear probe of states needs it: few samples of many dimensions."""

from __future__ import annotations

import numpy as np

STEPS = 100
TOLERANCE = 1e-10


def fit(states: np.ndarray, positive: np.ndarray, ridge: float = 1.0) -> tuple[np.ndarray, float]:
    """Return weights (d,) and bias of P(positive) = 1 / (1 + exp(-(w x + b))) for states (samples, d).

    It minimises sum log loss + ridge / 2 |w'|^2, with w' the weights of states that are centred and divided by the root of
    their mean square, so that the penalty means the same for every layer; of these, ridge 1 is scikit-learn's C = 1.
    The bias is not penalised. The optimum lies in the span of the samples, in which Newton's method finds it.
    """
    middle = states.mean(0)
    size = float(np.sqrt(np.mean((states - middle) ** 2))) or 1.0
    scaled = (states - middle) / size
    _, values, axes = np.linalg.svd(scaled, full_matrices=False)
    axes = axes[values > values[0] * 1e-12] if values[0] > 0 else axes[:0]
    design = np.hstack([scaled @ axes.T, np.ones((len(states), 1))])
    penalty = np.full(design.shape[1], ridge)
    penalty[-1] = 0.0
    labels = positive.astype(float)

    def loss(weights: np.ndarray) -> float:
        logits = design @ weights
        return float(np.logaddexp(0, logits).sum() - labels @ logits + (penalty * weights**2).sum() / 2)

    weights = np.zeros(design.shape[1])
    for _ in range(STEPS):
        chances = 1 / (1 + np.exp(-np.clip(design @ weights, -700, 700)))
        slope = design.T @ (chances - labels) + penalty * weights
        if np.abs(slope).max() < TOLERANCE:
            break
        curvature = (design * (chances * (1 - chances))[:, None]).T @ design + np.diag(penalty)
        step = np.linalg.solve(curvature + 1e-12 * np.eye(len(weights)), slope)
        length, before = 1.0, loss(weights)
        while loss(weights - length * step) > before + 1e-12 and length > 1e-8:
            length /= 2  # a full step from far away overshoots
        weights = weights - length * step
    own = weights[:-1] @ axes / size
    return own, float(weights[-1] - own @ middle)
