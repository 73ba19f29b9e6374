"""Prices of passes, learned from times that are made up."""

from __future__ import annotations

import random

import pytest

from steering.core.price import BLIND, RECENT, STALE, Price

FIXED, EACH = 0.030, 0.00002
"""The prices of an H100 with a 7B model, in seconds."""


def learned(price: Price, sizes: list[int], fixed: float = FIXED, each: float = EACH, noise: float = 0.0) -> Price:
    """Return the price after passes of these sizes."""
    draw = random.Random(0)
    for size in sizes:
        price.learn(size, (fixed + each * size) * (1 + draw.uniform(-noise, noise)))
    price.refresh()
    return price


def test_two_sizes_tell_both_parts() -> None:
    price = learned(Price(), [300, 300, 100])
    assert (price.fixed, price.each) == (pytest.approx(FIXED), pytest.approx(EACH))
    assert price.of(2000) == pytest.approx(0.070)
    assert price.worth == pytest.approx(1500)


def test_passes_of_one_size_are_taken_to_cost_in_proportion() -> None:
    price = learned(Price(), [300] * 5)
    assert not price.measured
    assert price.of(300) == pytest.approx(0.036)
    assert price.of(100) == pytest.approx(0.012)
    assert price.worth == 0
    flat = learned(Price(guess=1.0), [1, 1, 1])
    assert flat.of(64) == pytest.approx(flat.of(1))


def test_noise_moves_it_little() -> None:
    draw = random.Random(1)
    price = learned(Price(), [draw.choice([60, 200, 440, 880, 1320]) for _ in range(200)], noise=0.1)
    for size in (60, 440, 1320):
        assert price.of(size) == pytest.approx(FIXED + EACH * size, rel=0.05)


def test_a_pause_and_a_few_compilations_change_nothing() -> None:
    price = learned(Price(), [440, 880] * 20)
    for size in (440, 880, 440):
        price.learn(size, 60.0)
        learned(price, [440, 880, 100])
    assert price.fixed == pytest.approx(FIXED, rel=0.05)
    assert price.each == pytest.approx(EACH, rel=0.1)


def test_the_first_pass_of_all_warms_up() -> None:
    price = Price()
    price.learn(440, 2.0)
    learned(price, [440, 100])
    assert (price.fixed, price.each) == (pytest.approx(FIXED), pytest.approx(EACH))


def test_it_follows_a_machine_that_changes() -> None:
    """Compiled steps come into use."""
    price = learned(Price(), [100, 440, 880] * 20)
    learned(price, [100, 440, 880] * 6, fixed=0.012)
    assert price.fixed == pytest.approx(0.012, rel=0.02)


def test_the_last_passes_tell_how_fast_the_machine_is() -> None:
    price = learned(Price(), [100, 440, 880] * 20)
    learned(price, [440] * RECENT, fixed=2 * FIXED, each=2 * EACH)
    assert price.of(440) == pytest.approx(2 * (FIXED + 440 * EACH), rel=0.01)
    assert price.of(880) == pytest.approx(2 * (FIXED + 880 * EACH), rel=0.1)


def test_passes_of_one_size_alone_leave_it_blind() -> None:
    price = Price()
    assert price.blind
    learned(price, [440, 440, 440])
    assert price.blind
    learned(price, [220])
    assert not price.blind
    learned(price, [440] * BLIND)
    assert not price.blind
    learned(price, [440] * 8)
    assert price.blind
    learned(price, [440] * STALE)
    assert price.worth == pytest.approx(1500, rel=0.01), "what was known is kept"
    learned(price, [220, 220, 220, 220])
    assert not price.blind


def test_a_price_is_never_negative() -> None:
    """Larger passes that are faster, by compiled steps or by chance; and such as take longer a token the larger they are."""
    faster = Price()
    for _ in range(20):
        faster.learn(100, 0.030)
        faster.learn(400, 0.025)
    assert faster.each > 0
    assert 0.02 < faster.of(200) < 0.04
    bent = Price()
    for size in (10, 100, 1000) * 10:
        bent.learn(size, 1e-6 * size**2)
    assert bent.fixed == 0
    assert bent.each > 0


def test_the_spread_is_that_of_slow_passes_and_not_of_outliers() -> None:
    assert learned(Price(), [100, 440] * 16).spread == pytest.approx(1.0)
    noisy = learned(Price(), [100, 440] * 16, noise=0.15)
    assert 1.1 < noisy.spread < 1.4
    wild = learned(Price(), [100, 440] * 16)
    for _ in range(3):
        wild.learn(440, 9.0)
    learned(wild, [440])
    assert wild.spread == pytest.approx(1.0)
