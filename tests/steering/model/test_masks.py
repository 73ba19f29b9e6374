"""Masks of wrappers that say no more than the engine's own are recognised, so that prompts are cut into chunks."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from steering import Request, Sampling
from steering.model.masks import SLIDING, WrapperMasks
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.inside import sequences
from tests.steering.interventions.pushes import assert_same

LENGTH, WINDOW = 12, 5


def built(length: int = LENGTH, window: int = WINDOW) -> dict[str, torch.Tensor | None]:
    """Return the masks that transformers builds for a text in layers with a window and without."""
    config = Gemma3TextConfig(sliding_window=window, attn_implementation="sdpa")
    given = {"config": config, "inputs_embeds": torch.zeros(1, length, 8), "attention_mask": None, "cache": None}
    return {"full_attention": create_causal_mask(**given), SLIDING: create_sliding_window_causal_mask(**given)}


def causal() -> torch.Tensor:
    return torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()


def test_causal_masks_are_left_out() -> None:
    masks = WrapperMasks(WINDOW)
    assert masks.read(None, LENGTH, images=True) is None
    assert masks.read(torch.ones(1, LENGTH), LENGTH, images=True) is None  # marks padding
    assert built()[SLIDING] is not None
    assert masks.read(built(), LENGTH, images=True) is None
    assert masks.read(built() | {"full_attention": causal()}, LENGTH, images=False) is None
    assert masks.read(causal(), LENGTH, images=False) is None
    assert masks.read(dict.fromkeys(built()), LENGTH, images=False) is None


@pytest.mark.parametrize("place", [(2, 7), (11, 3)])
@pytest.mark.parametrize("kind", ["full_attention", SLIDING])
def test_any_other_mask_is_kept(kind: str, place: tuple[int, int]) -> None:
    given = built() | {"full_attention": causal()}
    mask = given[kind]
    assert mask is not None
    mask[0, 0, place[0], place[1]] ^= True
    assert WrapperMasks(WINDOW).read(given, LENGTH, images=False) is given


def test_masks_of_another_window_type_or_size_are_kept() -> None:
    assert WrapperMasks(WINDOW).read(given := built(window=WINDOW + 1), LENGTH, images=False) is given
    assert WrapperMasks(WINDOW).read(given := {"chunked_attention": built()[SLIDING]}, LENGTH, images=False) is given
    scores = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~causal(), -torch.inf)
    for other in (scores, causal()[..., :-1], causal().expand(2, -1, -1, -1)):
        assert WrapperMasks(None).read(other, LENGTH, images=False) is other


def test_masks_of_images_are_compared_until_one_is_not_causal() -> None:
    """A comparison waits for a GPU, which may still encode the images."""
    masks, own = WrapperMasks(WINDOW), torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    assert masks.read(causal(), LENGTH, images=True) is None
    assert masks.read(own, LENGTH, images=False) is own
    assert masks.read(causal(), LENGTH, images=True) is None
    assert masks.read(own, LENGTH, images=True) is own
    given = causal()
    assert masks.read(given, LENGTH, images=True) is given
    assert masks.read(causal(), LENGTH, images=False) is None


@pytest.mark.parametrize(("family", "pictures"), [("gemma3", 0), ("gemma4", 0), ("gemma4", 2)])
def test_chunks_of_such_prompts_give_the_same_answers(
    family: str, pictures: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    chats = [
        families.example_messages(family, pictures, text=text, seed=seed)
        for seed, text in enumerate(["What colour is the small ball, and what is behind it?", "How many?"])
    ]
    engine = make_engine(family, slots=3, prefill_budget=11)
    requests = [Request(chat, Sampling(max_tokens=4, ignore_eos=True, logprobs=3)) for chat in chats]
    turn = engine.submit(requests[0])
    engine.step()
    (sequence,) = sequences(turn)
    assert 0 < sequence.computed < sequence.prompt.length, "it is cut into chunks"
    while not turn.done:
        engine.step()
    for chat, result in zip(chats, [engine.result_of(turn), *engine.generate(requests[1:])], strict=True):
        assert_same(result.choices[0], load_plain(family).answer(chat, 4))
