"""Samples with one modality degraded, mildly (errors, noise) or completely, or only worded unusually.

The degraded setting of the modality-preference paper's section 4.4 (image noise, texts with syntax errors), and the data of
its appendix E.5, where only one modality of a sample is reliable and the true answer is that modality's.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
from dataclasses import replace
from typing import Literal

import numpy as np
from PIL import Image

from probes.conflicts.samples import ConflictSample

Modality = Literal["vision", "text"]

_ARTICLES = frozenset(("a", "an", "the"))
_PAIRS = (("is", "are"), ("was", "were"), ("has", "have"), ("does", "do"))
_DISAGREEING = {word: opposite for pair in _PAIRS for word, opposite in (pair, pair[::-1])}


def degraded(sample: ConflictSample, modality: Modality, severity: float, seed: int) -> ConflictSample:
    """Return the sample with its image `noisy` ("vision") or its context `ungrammatical` ("text"), the rest unchanged.

    Errors and noise depend on the seed and the sample's id, so that one seed serves a whole set. A degraded image is made
    anew whenever it is shown, so that a set of them needs no memory. Raises ValueError for another modality or severity.
    """
    _check(severity)
    sample_seed = _own_seed(sample, seed)
    if modality == "vision":
        return replace(sample, image=lambda: noisy(sample.picture(), severity, sample_seed))
    if modality == "text":
        return replace(sample, context=ungrammatical(sample.context, severity, sample_seed))
    raise ValueError(f"modality must be 'vision' or 'text', not {modality!r}")


FRAMES = (
    "A friend says: {}",
    "It was reported as follows: {}",
    "{} That is how somebody who was there wrote it down.",
    "{} So it was, as far as anybody could see.",
    "It has been established beyond reasonable doubt: {}",
)
"""Phrases around a text that leave it whole, and as true as it was."""


def reworded(sample: ConflictSample, seed: int) -> ConflictSample:
    """Return the sample with its context in one of the `FRAMES`: nothing is damaged, but few texts are worded like that.

    The choice depends on the seed and the sample's id.
    """
    return replace(sample, context=FRAMES[_own_seed(sample, seed) % len(FRAMES)].format(sample.context))


def noisy(image: Image.Image, severity: float, seed: int) -> Image.Image:
    """Return an RGB picture of the same size: (1 - severity) x image + severity x noise, rounded.

    The noise is uniform over 0..255, independent in every pixel and channel. A severity of 0 gives the same picture (as
    RGB), and 1 pure noise that depends only on the seed and the size. Raises ValueError if `severity` is not in 0..1.
    """
    _check(severity)
    pixels = np.asarray(image.convert("RGB"), np.float32)
    noise = np.random.default_rng(seed).uniform(0, 255, pixels.shape).astype(np.float32)
    return Image.fromarray(((1 - severity) * pixels + severity * noise).round().astype(np.uint8))


def ungrammatical(text: str, severity: float, seed: int) -> str:
    """Return English text with errors of grammar and spelling; from severity 0.5 on letters and word order are lost.

    With the probability `severity` each: an article is dropped; is, was, has and does take the other number, and back; two
    neighbouring letters inside a word of four or more are swapped; and with half of it two neighbouring words are swapped.
    Let loss = max(0, 2 severity - 1): each letter and digit is replaced by a random lower-case letter with the probability
    `loss`, and of n words the i-th is sorted by (1 - loss) i + loss n u, u uniform in 0..1.

    A severity of 0 returns the text itself; 0.5 has all these errors but every word can still be read; at 1 the words stand
    in random order and all their letters are random: only the number of words, articles apart, and their lengths remain.
    Punctuation around words stays in its place, white space becomes single spaces. Raises ValueError if `severity` is not in
    0..1.
    """
    _check(severity)
    if severity == 0:
        return text
    rng = random.Random(seed)
    loss = max(0.0, 2 * severity - 1)
    cut = [_cut(word) for word in text.split()]
    cut = [parts for parts in cut if not (parts[1].lower() in _ARTICLES and rng.random() < severity)]
    words = [_misspelt(_contradict(word, severity, rng), severity, rng) for _, word, _ in cut]
    words = _reorder(words, severity / 2, loss, rng)
    return " ".join(
        before + _replace_letters(word, loss, rng) + after for (before, _, after), word in zip(cut, words, strict=True)
    )


def _own_seed(sample: ConflictSample, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{sample.id}".encode(), digest_size=8).digest(), "big")


def _check(severity: float) -> None:
    if not 0 <= severity <= 1:
        raise ValueError(f"severity must be in 0..1, not {severity!r}")


def _cut(word: str) -> tuple[str, str, str]:
    """Split a word from the punctuation around it: (before, word, after)."""
    match = re.fullmatch(r"([\W_]*)(.*?)([\W_]*)", word, re.DOTALL)
    assert match is not None
    return match[1], match[2], match[3]


def _contradict(word: str, chance: float, rng: random.Random) -> str:
    opposite = _DISAGREEING.get(word.lower())
    if opposite is None or rng.random() >= chance:
        return word
    return opposite.capitalize() if word[0].isupper() else opposite


def _misspelt(word: str, chance: float, rng: random.Random) -> str:
    """Swap two unequal neighbouring letters, never the first or the last one."""
    places = [i for i in range(1, len(word) - 2) if word[i] != word[i + 1]]
    if not places or rng.random() >= chance:
        return word
    i = rng.choice(places)
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def _reorder(words: list[str], chance: float, loss: float, rng: random.Random) -> list[str]:
    """Swap neighbours, no word twice; then displace every word, by more the larger the loss."""
    words, i = list(words), 0
    while i < len(words) - 1:
        if rng.random() < chance:
            words[i], words[i + 1] = words[i + 1], words[i]
            i += 1
        i += 1
    if loss == 0:
        return words
    keys = [(1 - loss) * i + loss * len(words) * rng.random() for i in range(len(words))]
    return [word for _, word in sorted(zip(keys, words, strict=True))]


def _replace_letters(word: str, chance: float, rng: random.Random) -> str:
    if chance == 0:
        return word
    return "".join(
        rng.choice(string.ascii_lowercase) if letter.isalnum() and rng.random() < chance else letter for letter in word
    )
