"""Held-out questions of several kinds whose answers can be checked, on pictures from clean to hardly readable."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle

from demo.world.faithfulness import SIZE, existence_samples, noise_source, noised
from demo.world.questions import ask, pick_fact, statement
from demo.world.scenes import random_scene, render
from demo.world.targets import targets
from probes.alarm.samples import Checked

KINDS = ("color", "shape", "position", "at", "background", "count", "letter", "number")


def checked_samples(count: int, seed: int, noises: Sequence[float]) -> list[Checked]:
    """Return `count` questions: facts, existence and several pictures in turn, each with every one of the `noises` in turn.

    A noise is the standard deviation of the noise added to every pixel's values of 0 to 255.
    """
    kinds = [_facts(seed, noises), _existence(count, seed, noises), _several(seed, noises)]
    return [next(kinds[number % len(kinds)]) for number in range(count)]


def _facts(seed: int, noises: Sequence[float]) -> Iterator[Checked]:
    rng, noise_rng, number = random.Random(f"held-out checked {seed}"), noise_source(seed), 0
    while True:
        scene = random_scene(rng, rng.choice((1, 2, 3, 3)), held_out=True)
        fact = pick_fact(rng, scene, KINDS)
        if fact is None:
            continue
        noise = noises[number % len(noises)]
        number += 1
        image = noised(render(scene, SIZE, rng), noise, noise_rng)
        right = statement(fact.kind, fact.key, fact.value)
        yield Checked((image,), ask(rng, fact.kind, fact.key), (right,), "facts", f"{fact.kind} {noise:g}")


def _existence(count: int, seed: int, noises: Sequence[float]) -> Iterator[Checked]:
    drawn = [iter(existence_samples(count + 1, seed, noise=noise)) for noise in noises]
    number = 0
    while True:
        level = number % len(noises)
        for other_level, samples in enumerate(
            drawn
        ):  # every noise draws the same questions: each is kept with one noise
            sample = next(samples)
            if other_level == level:
                chosen = sample
        number += 1
        accepted = "yes" if chosen.present else "no"
        yield Checked((chosen.image,), chosen.question, (accepted,), "existence", f"{accepted} {noises[level]:g}")


def _several(seed: int, noises: Sequence[float]) -> Iterator[Checked]:
    """Yield questions whose answer is a text or the number of a picture; others' options are letters."""
    drawn = zip(*(targets(seed, noise=noise) for noise in noises), strict=True)
    askable = (samples for samples in drawn if not samples[0].choices and not samples[0].anchor)
    for samples, (level, noise) in zip(askable, cycle(enumerate(noises)), strict=False):
        sample = samples[level]
        question = "".join(sample.texts).strip()
        yield Checked(tuple(sample.images), question, (sample.response,), "several", f"{sample.task} {noise:g}")
