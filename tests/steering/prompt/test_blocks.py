"""The names of the beginnings of prompts."""

from __future__ import annotations

import torch

from steering.prompt.blocks import SIZE, block_names
from steering.prompt.spans import FIRST_IMAGE, OTHER, QUESTION, USER

IDS = torch.arange(3 * SIZE + 5)
SPANS = torch.full_like(IDS, QUESTION)


def common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    """Return the number of blocks that two prompts share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_prompts_share_what_stands_before_their_first_difference() -> None:
    names = block_names(IDS, SPANS, [])
    assert len(names) == len(set(names)) == 3
    assert [common(names, block_names(IDS[:length], SPANS[:length], [])) for length in (15, 16, 47, 48)] == [0, 1, 2, 3]
    for place in range(len(IDS)):
        changed = IDS.clone()
        changed[place] = -1
        assert common(names, block_names(changed, SPANS, [])) == min(place // SIZE, 3)


def test_the_same_block_behind_another_one_has_another_name() -> None:
    again = IDS[:SIZE].repeat(3)
    assert len(set(block_names(again, SPANS[: 3 * SIZE], []))) == 3


def test_a_picture_counts_from_its_first_column_on() -> None:
    spans = SPANS.clone()
    spans[SIZE + 3 :] = FIRST_IMAGE
    names = block_names(IDS, spans, [(SIZE + 3, b"one")])
    assert common(names, block_names(IDS, spans, [(SIZE + 3, b"other")])) == 1
    assert common(names, block_names(IDS, spans, [(SIZE + 3, b"one"), (2 * SIZE, b"second")])) == 2


def test_what_messages_say_is_told_from_the_template_and_questions_are_not_told_from_other_turns() -> None:
    names = block_names(IDS, SPANS, [])
    for span, shared in ((USER, 3), (OTHER, 1)):
        spans = SPANS.clone()
        spans[SIZE:] = span
        assert common(names, block_names(IDS, spans, [])) == shared
