"""The vector against numpy, against numbers by hand, and against plain transformers on a tiny random model."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import steering
from probes.conflicts import samples as mc2
from probes.vector import build as module
from probes.vector.build import Recipe, build, grow
from probes.vector.direction import Tally
from steering.model.processor import load_processor
from tests import families
from tests.probes.conftest import make_samples


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wording": "v3"}, "'wording' must be one of paper, v2, v1; got 'v3'"),
        ({"size": "norm"}, "'size' must be one of queries, mean"),
        ({"states": "all"}, "'states' must be one of plain, instructed"),
        ({"position": 0}, "'position' counts from the prompt's end"),
        ({"position": 4}, "'position' counts from the prompt's end"),
    ],
)
def test_a_wrong_recipe_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**options)


def _plain_states(
    folder: Path, prompts: list[tuple[mc2.ConflictSample, mc2.Setting, bool]], wording: mc2.Wording, position: int
) -> torch.Tensor:
    """(prompts, layers, d) states after every layer at a position, by transformers alone, one prompt at a time."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
    processor = load_processor(folder)
    last_layer: list[torch.Tensor] = []
    # output_hidden_states gives the last layer after the final norm; a hook sees it before.
    handle = (
        model.get_decoder().layers[-1].register_forward_hook(lambda module, args, output: last_layer.append(output))
    )
    rows = []
    for sample, setting, swapped in prompts:
        chat = mc2.messages(sample, setting, swapped, wording=wording)
        inputs = processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        rows.append(torch.stack([layer[0, position] for layer in [*hidden[1:-1], last_layer.pop()]]))
    handle.remove()
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
@pytest.mark.parametrize(
    ("recipe", "budget"),
    [
        (Recipe(), 512),
        (Recipe("v1", -2, "mean", "instructed"), 512),
        (Recipe("v2", -2), 7),  # in chunks, whose last one need not hold the token
        (Recipe("paper", -20, "mean"), 7),
    ],
)
def test_vector_equals_plain_transformers(root: Path, family: str, recipe: Recipe, budget: int) -> None:
    folder = families.checkpoint(family, root)
    samples = make_samples(4)
    mllm = steering.load(folder, device="cpu")
    engine = steering.Engine(mllm, slots=3, max_length=512, prefill_budget=budget, self_check=False)
    vector = build(engine, samples, recipe=recipe, seed=5, quiet=True)

    rng = random.Random(5)  # the seed decides which option comes first, sample by sample
    orders = [rng.random() < 0.5 for _ in samples]
    settings: tuple[mc2.Setting, ...] = ("text", "vision", "plain")
    text, vision, plain = (
        _plain_states(
            folder,
            [(sample, setting, swapped) for sample, swapped in zip(samples, orders, strict=True)],
            recipe.wording,
            recipe.position,
        )
        for setting in settings
    )
    difference = (text - vision).double()
    per_query = difference.abs().mean(-1)
    instructed = torch.cat([text, vision]).double().abs().mean((0, 2))
    state = plain.double().abs().mean((0, 2)) if recipe.states == "plain" else instructed
    size = per_query.mean(0) if recipe.size == "queries" else difference.mean(0).abs().mean(-1)
    scale = float(instructed.max())
    torch.testing.assert_close(vector.direction.double(), difference.mean(0), atol=1e-5 * scale, rtol=0)
    torch.testing.assert_close(vector.mean_abs.double(), per_query.mean(0), atol=1e-5 * scale, rtol=0)
    torch.testing.assert_close(vector.std.double(), per_query.std(0, correction=0), atol=1e-5 * scale, rtol=0)
    # A window that ends before the instruction leaves Gemma's first layer no direction, and no weight.
    present = size > 1e-5 * instructed
    weight = torch.where(present, state / size, 0.0)
    torch.testing.assert_close(vector.weight.double(), weight, atol=0, rtol=2e-3)
    assert present.tolist() == [family != "gemma3", True, True]
    assert vector.fingerprint == engine.mllm.fingerprint
    told = vector.info["magnitudes"]
    assert told["states"]["plain"] == pytest.approx(plain.double().abs().mean((0, 2)).tolist(), rel=1e-4)
    assert told["states"]["instructed"] == pytest.approx(instructed.tolist(), rel=1e-4)
    assert told["direction"]["mean"][1:] == pytest.approx(difference.mean(0).abs().mean(-1).tolist()[1:], rel=1e-3)


def test_a_position_before_the_prompt_is_refused(tiny: steering.Engine) -> None:
    with pytest.raises(steering.RequestError, match=r"'state_position' must be from -\d+ to -1.*got -5000"):
        build(tiny, make_samples(1), recipe=Recipe(position=-5000), quiet=True)


def test_metadata_tells_how_the_vector_was_made(tiny: steering.Engine) -> None:
    samples = make_samples(3)
    vector = build(tiny, samples, name="mine", layers=[1], seed=2, quiet=True)
    assert vector.name == "mine"
    assert vector.layers == (1,)
    info = vector.info
    assert (info["samples"], info["tasks"], info["seed"]) == (3, ["color", "shape"], 2)
    assert info["recipe"] == {"wording": "paper", "position": -1, "size": "queries", "states": "plain"}
    assert vector.published == info["published"] == 1.0
    assert set(info["versions"]) == {"helmsight", "torch", "transformers"}
    assert steering.SteeringVector.from_bytes(vector.to_bytes()).info == info


def test_the_data_hash_changes_with_prompts_and_pictures(tiny: steering.Engine) -> None:
    def digest(samples: list[mc2.ConflictSample]) -> str:
        return str(build(tiny, samples, quiet=True).info["data_sha256"])

    assert digest(make_samples(2)) == digest(make_samples(2))
    assert digest(make_samples(2)) != digest(make_samples(2, question="Which color?"))
    assert digest(make_samples(2)) != digest(make_samples(2, shade=9))


def test_an_unreliable_direction_is_said(tiny: steering.Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RELIABLE", 1.1)
        vector = build(tiny, make_samples(2), quiet=True)
    assert vector.info["reliable"] is False
    assert "No reliable direction" in caplog.text


def test_wrong_options_are_named(tiny: steering.Engine) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        build(tiny, [], quiet=True)
    with pytest.raises(ValueError, match=r"layer numbers from 0 to 2; got \[7\]"):
        build(tiny, make_samples(1), layers=[7], quiet=True)


# -------------------------------------------------------------------------------------------------------------- sizes


def _same(one: steering.SteeringVector, other: steering.SteeringVector) -> None:
    """To the last bit or two of float32, and in everything that is told; only rounding of numbers may differ."""
    assert (one.name, one.layers, one.fingerprint) == (other.name, other.layers, other.fingerprint)
    for name in ("direction", "weight", "mean_abs", "std"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-6)
    assert set(one.info) == set(other.info)
    for name, value in one.info.items():
        if name == "magnitudes":
            for one_of, other_of in zip(_numbers(value), _numbers(other.info[name]), strict=True):
                assert other_of == pytest.approx(one_of, rel=1e-4)
            continue
        measured = name in ("agreement", "score")
        assert other.info[name] == (pytest.approx(value, rel=1e-4) if measured else value), name


def _numbers(magnitudes: dict[str, dict[str, list[float]]]) -> list[list[float]]:
    return [magnitudes[of][kind] for of in sorted(magnitudes) for kind in sorted(magnitudes[of])]


def test_vectors_of_several_sizes_are_those_of_the_first_samples_alone(tiny: steering.Engine) -> None:
    samples = make_samples(7)
    counting = Watched(tiny)
    grown = grow(counting, samples, [1, 4, 7], name="sized", layers=[2], seed=3, quiet=True)
    assert counting.taken == 3 * 7
    for size, vector in zip([1, 4, 7], grown, strict=True):
        assert vector.info["samples"] == size
        _same(vector, build(tiny, samples[:size], name="sized", layers=[2], seed=3, quiet=True))
    assert len({vector.info["data_sha256"] for vector in grown}) == 3


def test_samples_beyond_the_last_size_are_not_asked(tiny: steering.Engine) -> None:
    counting = Watched(tiny)
    (vector,) = grow(counting, make_samples(5), [2], quiet=True)
    assert counting.taken == 6
    _same(vector, build(tiny, make_samples(2), quiet=True))


@pytest.mark.parametrize("sizes", [[3, 2], [2, 2], [1, 6]])
def test_sizes_rise_and_there_are_so_many_samples(tiny: steering.Engine, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="The sizes must rise, up to the 5 samples there are"):
        grow(tiny, make_samples(5), sizes, quiet=True)


@pytest.mark.parametrize("sizes", [[], [0], [-1, 3]])
def test_no_size_is_smaller_than_one(tiny: steering.Engine, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        grow(tiny, make_samples(5), sizes, quiet=True)


# ------------------------------------------------------------------------------------------------- killed and resumed


class Stopped(Exception):
    """What ends a run."""


class Watched:
    """An engine that counts the requests it takes and, after so many pairs, is stopped."""

    def __init__(self, engine: steering.Engine, stop_after: int | None = None) -> None:
        self.mllm = engine.mllm
        self.taken = 0
        self._engine, self._stop_after = engine, stop_after

    def stream(self, requests: Iterable[steering.Request]) -> Iterator[steering.Result]:
        def counted() -> Iterator[steering.Request]:
            for request in requests:
                self.taken += 1
                yield request

        for number, result in enumerate(self._engine.stream(counted())):
            if self._stop_after is not None and number >= 3 * self._stop_after:
                raise Stopped
            yield result


def _stopped(tiny: steering.Engine, samples: list[mc2.ConflictSample], state: Path, after: int, **options: Any) -> None:
    with pytest.raises(Stopped):
        build(Watched(tiny, after), samples, state=state, quiet=True, **options)


@pytest.fixture
def keep_every_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEEP_EVERY", 2)


@pytest.mark.parametrize(("after", "kept"), [(0, 0), (1, 0), (2, 2), (5, 4), (6, 6)])
@pytest.mark.usefixtures("keep_every_2")
def test_a_run_that_was_stopped_goes_on_where_it_was_kept(
    tiny: steering.Engine, tmp_path: Path, after: int, kept: int
) -> None:
    samples, state = make_samples(7), tmp_path / "deep" / "states.safetensors"
    whole = build(tiny, samples, seed=2, quiet=True)
    _stopped(tiny, samples, state, after, seed=2)
    assert state.exists() == (kept > 0)
    resumed = Watched(tiny)
    _same(build(resumed, samples, seed=2, state=state, quiet=True), whole)
    assert resumed.taken == 3 * (7 - kept)


@pytest.mark.usefixtures("keep_every_2")
def test_a_run_may_be_stopped_again_and_again(tiny: steering.Engine, tmp_path: Path) -> None:
    samples, state = make_samples(7), tmp_path / "states.safetensors"
    for _ in range(3):
        _stopped(tiny, samples, state, 2)
    last = Watched(tiny)
    _same(build(last, samples, state=state, quiet=True), build(tiny, samples, quiet=True))
    assert last.taken == 3


@pytest.mark.slow
def test_a_long_run_loses_a_few_pairs_at_most(tiny: steering.Engine, tmp_path: Path) -> None:
    samples, state = make_samples(70), tmp_path / "states.safetensors"
    _stopped(tiny, samples, state, 69)
    resumed = Watched(tiny)
    _same(build(resumed, samples, state=state, quiet=True), build(tiny, samples, quiet=True))
    assert 3 <= resumed.taken <= 3 * (70 - 64)


def test_a_finished_run_is_not_asked_again(tiny: steering.Engine, tmp_path: Path) -> None:
    samples, state = make_samples(3), tmp_path / "states.safetensors"
    first = build(tiny, samples, state=state, quiet=True)
    again = Watched(tiny)
    second = build(again, samples, name="other", layers=[2], state=state, quiet=True)
    assert again.taken == 0
    assert torch.equal(second.direction, first.direction)
    assert (second.name, second.layers, second.info["ranking"]) == ("other", (2,), [2])
    assert second.info["data_sha256"] == first.info["data_sha256"]


def test_smaller_sizes_than_what_was_kept_are_measured_anew(tiny: steering.Engine, tmp_path: Path) -> None:
    samples, state = make_samples(5), tmp_path / "states.safetensors"
    whole = build(tiny, samples, state=state, quiet=True)
    for sizes in ([2], [2, 5]):
        grown = grow(tiny, samples, sizes, state=state, quiet=True)
        _same(grown[0], build(tiny, samples[:2], quiet=True))
    _same(grown[1], whole)


@pytest.mark.usefixtures("keep_every_2")
def test_several_sizes_go_on_too_where_the_least_is_not_passed(tiny: steering.Engine, tmp_path: Path) -> None:
    samples, state = make_samples(6), tmp_path / "states.safetensors"
    with pytest.raises(Stopped):
        grow(Watched(tiny, 3), samples, [4, 6], state=state, quiet=True)
    resumed = Watched(tiny)
    grown = grow(resumed, samples, [4, 6], state=state, quiet=True)
    assert resumed.taken == 3 * (6 - 2)
    for size, vector in zip([4, 6], grown, strict=True):
        _same(vector, build(tiny, samples[:size], quiet=True))


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (make_samples(4, question="Which color?"), {}),
        (make_samples(5), {}),
        (make_samples(4)[::-1], {}),
        (make_samples(4), {"seed": 1}),
        (make_samples(4), {"recipe": Recipe("v2")}),
        (make_samples(4), {"recipe": Recipe(position=-2)}),
    ],
)
def test_what_was_kept_of_another_probe_is_replaced(
    tiny: steering.Engine,
    tmp_path: Path,
    other: list[mc2.ConflictSample],
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples, state = make_samples(4), tmp_path / "states.safetensors"
    build(tiny, other, state=state, quiet=True, **options)
    assert "of another probe" not in caplog.text
    asked = Watched(tiny)
    _same(build(asked, samples, state=state, quiet=True), build(tiny, samples, quiet=True))
    assert asked.taken == 12
    assert f"{state} is of another probe" in caplog.text
    asked = Watched(tiny)
    build(asked, samples, state=state, quiet=True)
    assert asked.taken == 0


def test_what_was_kept_of_another_model_is_replaced(
    root: Path, tiny: steering.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples, state = make_samples(2), tmp_path / "states.safetensors"
    folder = families.build("qwen2_vl", tmp_path / "other", seed=1)
    build(steering.Engine(steering.load(folder, device="cpu"), max_length=512), samples, state=state, quiet=True)
    _same(build(tiny, samples, state=state, quiet=True), build(tiny, samples, quiet=True))
    assert "is of another probe" in caplog.text


def _without_tensor(state: Path) -> None:
    tensors, about = load_file(state), _about(state)
    del tensors["norm.squares"]
    save_file(tensors, state, about)


def _with(**changes: str | None) -> Any:
    def change(state: Path) -> None:
        about = {**_about(state), **changes}
        save_file(load_file(state), state, {name: value for name, value in about.items() if value is not None})

    return change


def _about(state: Path) -> dict[str, str]:
    with safe_open(state, "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.write_bytes(b""),
        lambda state: state.write_bytes(b"nonsense " * 100),
        lambda state: state.write_bytes(b"\0" * 4096),
        lambda state: state.write_bytes(state.read_bytes()[:-1]),
        lambda state: state.write_bytes(state.read_bytes()[:50]),
        _without_tensor,
        _with(count="many"),
        _with(count=None),
        _with(digest=None),
    ],
)
def test_a_damaged_file_is_said_and_the_probe_begins_anew(
    tiny: steering.Engine, tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    samples, state = make_samples(3), tmp_path / "states.safetensors"
    whole = build(tiny, samples, state=state, quiet=True)
    damage(state)
    asked = Watched(tiny)
    _same(build(asked, samples, state=state, quiet=True), whole)
    assert asked.taken == 9
    assert f"{state} is damaged, the probe begins anew" in caplog.text
    asked = Watched(tiny)
    build(asked, samples, state=state, quiet=True)
    assert asked.taken == 0


def test_a_tally_that_was_kept_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    pairs = [tuple(torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(i))) for i in range(6)]
    whole, half = Tally(), Tally()
    for number, pair in enumerate(pairs):
        whole.add(*pair, read=bytes([number]))
    for number, pair in enumerate(pairs[:4]):
        half.add(*pair, read=bytes([number]))
    half.save(tmp_path / "t.safetensors", "mine")
    resumed = Tally.resumed(tmp_path / "t.safetensors", "mine")
    assert resumed.count == 4
    for number, pair in enumerate(pairs[4:], 4):
        resumed.add(*pair, read=bytes([number]))
    assert resumed.digest == whole.digest
    one, other = resumed.direction(), whole.direction()
    for name in ("v", "mean_abs", "std", "plain", "instructed", "agreement"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert one.queries == other.queries == 6


def test_what_was_read_counts_in_its_order() -> None:
    digests = set()
    for reads in ([b"a", b"b"], [b"b", b"a"], [b"a"], [b"a", b"b", b""]):
        tally = Tally()
        for read in reads:
            tally.add(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1, 2), read)
        digests.add(tally.digest)
    assert len(digests) == 4


@pytest.mark.parametrize("content", [b"", b"no picture", None])
@pytest.mark.usefixtures("keep_every_2")
def test_an_image_that_does_not_decode_is_named_and_what_came_before_is_kept(
    tiny: steering.Engine, tmp_path: Path, content: bytes | None
) -> None:
    picture = tmp_path / "broken.jpg"
    if content is not None:
        picture.write_bytes(content)
    whole, state = make_samples(20), tmp_path / "states.safetensors"
    samples = [replace(sample, image=picture) if sample.id == "17" else sample for sample in whole]
    with pytest.raises(ValueError, match=r"The image of sample 17 does not decode: .*broken\.jpg"):
        build(tiny, samples, state=state, quiet=True)
    mended = Watched(tiny)
    _same(build(mended, whole, state=state, quiet=True), build(tiny, whole, quiet=True))
    assert mended.taken < 3 * 20
