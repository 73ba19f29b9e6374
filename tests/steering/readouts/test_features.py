"""Features of a sparse dictionary equal those of plain transformers' hidden states, encoded by plain matrix products."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from steering import Diagnose, Request, RequestError, Steer, VectorStore
from steering.readouts import residual
from steering.vectors.sparse import SparseDictionary
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.readouts.matrices import SAMPLING, STEPS, chats
from tests.steering.vectors.made import dictionary

LAYER = 1


def encoded(made: SparseDictionary, states: torch.Tensor) -> torch.Tensor:
    of = load_file(Path(made.folder) / "sae_weights.safetensors")
    return ((states - of["b_dec"]) @ of["W_enc"] + of["b_enc"]).clamp(min=0)


@pytest.mark.parametrize("positions", ["last", "generated", [2, 7]])
def test_features_are_those_of_the_plain_model(
    positions: Any, make_engine: MakeEngine, load_plain: LoadPlain, tmp_path: Path
) -> None:
    engine, plain = make_engine("qwen2_vl"), load_plain("qwen2_vl")
    made = dictionary(tmp_path / "a", engine.mllm.hidden_size)
    ask = {"dictionary": made, "positions": positions}
    for chat in chats():
        answer = plain.answer(chat, STEPS)
        n = answer.prompt_length
        first, end = (
            {"last": (n - 1, n), "generated": (n, None)}.get(positions, positions)
            if isinstance(positions, str)
            else positions
        )
        expected = encoded(made, answer.hidden[LAYER, first:end])
        requests = [
            Request(chat, SAMPLING, diagnose=Diagnose(["features"], features=ask | more))
            for more in ({}, {"ids": [0, 5, 7]})
        ]
        top, chosen = (result.choices[0].diagnostics["features"] for result in engine.generate(requests))
        assert top["positions"] == [first, first + len(expected)]
        assert top["active"] == pytest.approx(float((expected > 0).sum(-1).float().mean()))
        order = expected.mean(0).argsort(descending=True)[:10].tolist()
        assert [one["id"] for one in top["features"]] == order
        assert [one["id"] for one in chosen["features"]] == [0, 5, 7]
        for one in (*top["features"], *chosen["features"]):
            values = expected[:, one["id"]]
            assert one["mean"] == pytest.approx(float(values.mean()), rel=1e-4, abs=1e-4)
            assert one["max"] == pytest.approx(float(values.max()), rel=1e-4, abs=1e-4)
            assert one["share"] == float((values > 0).float().mean())


def test_a_feature_steers_as_its_row_added_by_a_plain_hook(
    make_engine: MakeEngine, load_plain: LoadPlain, tmp_path: Path
) -> None:
    """Beside states of other layers, which another readout wants of the same answer."""
    engine, plain = make_engine("qwen2_vl"), load_plain("qwen2_vl")
    mllm = engine.mllm
    made = dictionary(tmp_path / "a", mllm.hidden_size)
    vector = VectorStore(tmp_path, fingerprint=mllm.fingerprint, layers=mllm.num_layers).get("sae:a/5")
    steer, (chat, *_) = Steer(vector, 6.0), chats()
    diagnose = Diagnose(["states", "features"], features={"dictionary": made, "ids": [5]}, states={"layers": [0, 2]})
    requests = [Request(chat, SAMPLING, given, diagnose=diagnose) for given in ((steer,), ())]
    steered, other = engine.generate(requests)
    expected = plain.answer(chat, STEPS, add=[(steer.delta, "all")])
    assert list(steered.choices[0].token_ids) == expected.tokens != list(other.choices[0].token_ids)
    state = expected.hidden[LAYER, expected.prompt_length - 1] + steer.delta[LAYER]
    (feature,) = steered.choices[0].diagnostics["features"]["features"]
    assert feature["mean"] == pytest.approx(float(encoded(made, state)[5]), rel=1e-4)
    assert steered.choices[0].diagnostics["states"]["shape"] == [2, 1, mllm.hidden_size]


def test_at_most_so_many_positions_are_read(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2_vl")
    made = dictionary(tmp_path / "a", engine.mllm.hidden_size)
    monkeypatch.setattr(residual, "MOST_ENCODED", 2)
    for positions, length in (("generated", 2), ([3, 9], 2), ("last", 1)):
        wanted = Diagnose(["features"], features={"dictionary": made, "positions": positions})
        (result,) = engine.generate([Request(chats()[0], SAMPLING, diagnose=wanted)])
        first, end = result.choices[0].diagnostics["features"]["positions"]
        assert end - first == length


def test_without_a_dictionary_all_is_null(make_engine: MakeEngine) -> None:
    (result,) = make_engine("qwen2_vl").generate([Request(chats()[0], SAMPLING, diagnose=["features"])])
    assert set(result.choices[0].diagnostics["features"].values()) == {None}


def test_a_store_gives_the_dictionary_that_is_named_and_the_only_one_without_a_name(tmp_path: Path) -> None:
    store, asked = VectorStore(tmp_path), Diagnose(["features"])
    assert asked.looked_up(store).features.dictionary is None
    made = dictionary(tmp_path / "a", 8)
    assert asked.looked_up(store).features.dictionary == made
    other = dictionary(tmp_path / "b", 8)
    assert asked.looked_up(store).features.dictionary is None
    assert Diagnose(["features"], features={"dictionary": "b"}).looked_up(store).features.dictionary == other


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("a", "'diagnostics.features' must be an object; got 'a'."),
        ({"name": "a"}, "'diagnostics.features.name' is unknown; allowed: dictionary, positions, top, ids."),
        ({"dictionary": 3}, "'diagnostics.features.dictionary' must be a string; got 3."),
        ({"dictionary": "a"}, "'diagnostics.features.dictionary' must be a SparseDictionary"),
        ({"top": 0}, "'diagnostics.features.top' must be a whole number from 1 to 100; got 0."),
        ({"ids": [-1]}, "'diagnostics.features.ids' must be 1 to 100 different whole numbers of at least 0; got [-1]."),
        (
            {"ids": [3, 3]},
            "'diagnostics.features.ids' must be 1 to 100 different whole numbers of at least 0; got [3, 3].",
        ),
        ({"ids": []}, "'diagnostics.features.ids' must be 1 to 100 different whole numbers of at least 0; got []."),
        ({"positions": [3, 3]}, "'diagnostics.features.positions' must be [from, to] with 0 <= from < to; got [3, 3]."),
    ],
)
def test_a_wrong_choice_is_refused_by_name(wanted: Any, problem: str, make_engine: MakeEngine) -> None:
    with pytest.raises(RequestError, match=re.escape(problem)):
        make_engine("qwen2_vl").generate(
            [Request(chats()[0], SAMPLING, diagnose=Diagnose(["features"], features=wanted))]
        )


def test_a_dictionary_of_another_model_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine("qwen2_vl")
    for name, width, layer, ids in (
        ("a", 8, 1, None),
        ("b", engine.mllm.hidden_size, 99, None),
        ("c", engine.mllm.hidden_size, 1, [40]),
    ):
        wanted = {"dictionary": dictionary(tmp_path / name, width, layer), "ids": ids}
        with pytest.raises(RequestError, match="must be below 40" if ids else "this model has layers 0 to 2"):
            engine.generate([Request(chats()[0], SAMPLING, diagnose=Diagnose(["features"], features=wanted))])
