"""The size of a model's states, against plain transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PIL import Image

import steering
from tests.steering.conftest import MakeEngine
from tests.steering.plain import Plain


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
@pytest.mark.parametrize("started", [False, True])
def test_magnitudes_are_the_mean_size_of_the_plain_states_of_a_short_prompt(
    family: str, started: bool, make_engine: MakeEngine, load_plain: Callable[[str], Plain]
) -> None:
    engine = make_engine(family)
    if started:
        engine.start()
    found = steering.magnitudes(engine)
    if started:
        engine.stop()
    picture = {"type": "image", "image": Image.linear_gradient("L").resize((112, 84)).convert("RGB")}
    chat = [{"role": "user", "content": [picture, {"type": "text", "text": "What is this?"}]}]
    answer = load_plain(family).answer(chat, 1)
    expected = answer.hidden[:, answer.prompt_length - 1].abs().mean(-1)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-4)
