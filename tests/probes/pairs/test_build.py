"""Vectors from pairs on a tiny random model, against states that are read otherwise."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import steering
from probes.pairs.build import KIND, build
from probes.pairs.calibrate import SidePoint, SideShares, choose, unmoved
from probes.pairs.file import PromptPair, load
from tests.probes.pairs.writing import image, user, write


@pytest.fixture
def pairs(tmp_path: Path) -> list[PromptPair]:
    rows = []
    for n in range(5):
        Image.new("RGB", (56, 56), (40 * n, 5, 90)).save(tmp_path / f"{n}.png")
        rows.append({
            side: user([image(f"{n}.png"), {"type": "text", "text": f"{text} What is number {n}?"}])
            for side, text in (("toward", "Answer politely."), ("away", "Answer rudely."))
        })  # fmt: skip
    return load(write(tmp_path, rows))


def test_the_direction_is_the_mean_difference_at_the_last_token(tiny: steering.Engine, pairs: list[PromptPair]) -> None:
    made = build(tiny, pairs, name="manners", sides=("polite", "rude"), quiet=True)
    one_token = steering.Sampling(max_tokens=1)
    states = []
    for pair in pairs:  # one at a time, not in batches
        for prompt in (pair.toward, pair.away):
            (result,) = tiny.generate([steering.Request(prompt.chat(), one_token, states=True)])
            states.append(result.choices[0].states)
    read = torch.stack([one for one in states if one is not None]).double()
    toward, away = read[::2], read[1::2]
    difference = toward - away
    torch.testing.assert_close(made.direction.double(), difference.mean(0), rtol=1e-4, atol=1e-5)
    weight = (toward.abs().mean((0, 2)) + away.abs().mean((0, 2))) / 2 / difference.abs().mean((0, 2))
    torch.testing.assert_close(made.weight.double(), weight, rtol=1e-3, atol=1e-4)
    agreement = difference.mean(0).norm(dim=-1) / difference.norm(dim=-1).mean(0)
    torch.testing.assert_close(torch.tensor(made.info["agreement"]).double(), agreement, rtol=1e-3, atol=1e-4)
    assert made.info["sides"] == ["polite", "rude"]
    assert (made.kind, made.positive, made.published, made.calibrated_range) == (KIND, None, 1.0, None)
    again = steering.SteeringVector.from_bytes(made.to_bytes())
    assert again.info == made.info


def test_states_that_were_read_before_take_the_place_of_prompts(
    tiny: steering.Engine, pairs: list[PromptPair], tmp_path: Path
) -> None:
    """Files of the readout `states`, on either side of some lines; the rest of the lines have prompts."""
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    for number, side in ((0, "toward"), (0, "away"), (3, "away")):
        chat = getattr(pairs[number], side).chat()
        (result,) = tiny.generate([steering.Request(chat, steering.Sampling(max_tokens=1), diagnose=["states"])])
        (tmp_path / f"{number}-{side}.safetensors").write_bytes(
            b64decode(result.choices[0].diagnostics["states"]["safetensors"])
        )
        rows[number][side] = {"states": f"{number}-{side}.safetensors"}
    made = build(tiny, pairs, name="manners", sides=("polite", "rude"), quiet=True)
    again = build(tiny, load(write(tmp_path, rows)), name="manners", sides=("polite", "rude"), quiet=True)
    torch.testing.assert_close(again.direction, made.direction, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again.weight, made.weight, rtol=1e-4, atol=1e-5)


def test_states_of_several_positions_count_by_their_mean(tiny: steering.Engine, tmp_path: Path) -> None:
    shape = (tiny.mllm.num_layers, 4, tiny.mllm.hidden_size)
    sides = [torch.randn(shape), torch.randn(shape)]
    for name, states in zip("ab", sides, strict=True):
        save_file({"states": states}, tmp_path / f"{name}.safetensors")
    row = {"toward": {"states": "a.safetensors"}, "away": {"states": "b.safetensors"}}
    made = build(tiny, load(write(tmp_path, [row])), name="manners", sides=("polite", "rude"), quiet=True)
    torch.testing.assert_close(made.direction, sides[0].mean(1) - sides[1].mean(1), rtol=1e-5, atol=1e-6)


def test_states_of_another_model_are_refused(tiny: steering.Engine, tmp_path: Path) -> None:
    for name in "ab":
        save_file(
            {"states": torch.randn(tiny.mllm.num_layers + 1, tiny.mllm.hidden_size)}, tmp_path / f"{name}.safetensors"
        )
    row = {"toward": {"states": "a.safetensors"}, "away": {"states": "b.safetensors"}}
    with pytest.raises(ValueError, match=r"a\.safetensors has states of \(4, 64\), the model of"):
        build(tiny, load(write(tmp_path, [row])), name="manners", sides=("polite", "rude"), quiet=True)


def test_a_side_of_its_own_is_reached_by_a_scale_and_no_modality(
    tiny: steering.Engine, pairs: list[PromptPair]
) -> None:
    made = build(tiny, pairs, name="manners", sides=("polite", "rude"), layers=[1], quiet=True)
    with pytest.raises(steering.RequestError, match="signed 'scale'"):
        steering.Steer.to(made, "text")
    steered = steering.Request(pairs[0].toward.chat(), steering.Sampling(max_tokens=2), (steering.Steer(made, -1.0),))
    (result,) = tiny.generate([steered])
    assert result.choices[0].applied["steering"][0]["layers"] == [1]


def test_layers_that_are_not_there_are_refused(tiny: steering.Engine, pairs: list[PromptPair]) -> None:
    with pytest.raises(ValueError, match="'layers' must be layer numbers"):
        build(tiny, pairs, name="manners", sides=("polite", "rude"), layers=[99], quiet=True)


def test_what_was_read_is_not_read_again(
    tiny: steering.Engine, pairs: list[PromptPair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "states.safetensors"
    whole = build(tiny, pairs, name="manners", sides=("polite", "rude"), state=state, quiet=True)
    monkeypatch.setattr(type(tiny), "stream", lambda _, requests: iter([] if not list(requests) else [1 / 0]))
    again = build(tiny, pairs, name="manners", sides=("polite", "rude"), state=state, quiet=True)
    assert torch.equal(again.direction, whole.direction)
    with pytest.raises(ZeroDivisionError):
        build(tiny, pairs[:-1], name="manners", sides=("polite", "rude"), state=state, quiet=True)


def shares(toward: float, away: float, repetition: float = 0.0) -> SideShares:
    return SideShares(100, toward, away, repetition)


def test_the_strongest_strength_within_the_budget_is_chosen() -> None:
    plain = shares(0.5, 0.5)
    weak = SidePoint(1, 0.2, shares(0.6, 0.4), shares(0.4, 0.6))
    good = SidePoint(1, 0.4, shares(1.0, 0.0), shares(0.0, 1.0))
    same = SidePoint(1, 0.6, shares(1.0, 0.0), shares(0.0, 1.0))
    babble = SidePoint(1, 1.0, shares(0.9, 0.0), shares(0.0, 1.0))
    repeats = SidePoint(2, 0.1, shares(1.0, 0.0, 0.2), shares(0.0, 1.0))
    assert choose([weak, good, same, babble, repeats], plain, [2, 1]) is good
    assert choose([weak, babble], plain, [1]) is weak
    assert choose([babble], plain, [1]) is babble
    assert babble.damage(plain) == pytest.approx({"others": 0.1, "repetition": 0.0})
    assert weak.moved == pytest.approx(0.2)


def test_steering_that_moves_nothing_is_doubted(tiny: steering.Engine, pairs: list[PromptPair]) -> None:
    made = build(tiny, pairs, name="manners", sides=("polite", "rude"), quiet=True)
    assert unmoved(made, ("polite", "rude")) == []
    point = SidePoint(1, 0.2, shares(0.55, 0.45), shares(0.5, 0.5))
    made.info["calibration"] = {"range": [1, 1], "targets_reached": False, "chosen": point.to_json()}
    (doubt,) = unmoved(made, ("polite", "rude"))
    assert "0.550 of them are 'polite' toward it and 0.500 away from it" in doubt
