"""A probe that was stopped goes on where it was kept, and begins anew where that was of another one or is damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import steering
from probes.conflicts import samples as mc2
from probes.vector import build as module
from probes.vector.build import Recipe, build, grow
from probes.vector.direction import Tally
from tests import families
from tests.probes.conftest import make_samples
from tests.probes.vector.watched import Stopped, Watched, same


def _stopped(tiny: steering.Engine, samples: list[mc2.ConflictSample], state: Path, after: int, **options: Any) -> None:
    with pytest.raises(Stopped):
        build(Watched(tiny, after), samples, state=state, quiet=True, **options)


Wholes = dict[int, steering.SteeringVector]


@pytest.fixture(scope="module")
def wholes(tiny: steering.Engine) -> Wholes:
    """Return the vectors of each number of samples from one uninterrupted run."""
    sizes = [2, 3, 4, 5, 6, 7, 12, 34]
    return dict(zip(sizes, grow(tiny, make_samples(34), sizes, quiet=True), strict=True))


@pytest.fixture
def keep_every_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEEP_EVERY", 2)


@pytest.fixture(scope="module")
def of_seed_2(tiny: steering.Engine) -> steering.SteeringVector:
    return build(tiny, make_samples(7), seed=2, quiet=True)


@pytest.mark.parametrize(("after", "kept"), [(0, 0), (1, 0), (2, 2), (5, 4), (6, 6)])
@pytest.mark.usefixtures("keep_every_2")
def test_a_run_that_was_stopped_goes_on_where_it_was_kept(
    tiny: steering.Engine, of_seed_2: steering.SteeringVector, tmp_path: Path, after: int, kept: int
) -> None:
    samples, state = make_samples(7), tmp_path / "deep" / "states.safetensors"
    _stopped(tiny, samples, state, after, seed=2)
    assert state.exists() == (kept > 0)
    resumed = Watched(tiny)
    same(build(resumed, samples, seed=2, state=state, quiet=True), of_seed_2)
    assert resumed.taken == 3 * (7 - kept)


@pytest.mark.usefixtures("keep_every_2")
def test_a_run_may_be_stopped_again_and_again(tiny: steering.Engine, wholes: Wholes, tmp_path: Path) -> None:
    samples, state = make_samples(7), tmp_path / "states.safetensors"
    for _ in range(3):
        _stopped(tiny, samples, state, 2)
    last = Watched(tiny)
    same(build(last, samples, state=state, quiet=True), wholes[7])
    assert last.taken == 3


def test_a_long_run_loses_a_few_pairs_at_most(tiny: steering.Engine, wholes: Wholes, tmp_path: Path) -> None:
    samples, state = make_samples(34), tmp_path / "states.safetensors"
    _stopped(tiny, samples, state, 33)
    resumed = Watched(tiny)
    same(build(resumed, samples, state=state, quiet=True), wholes[34])
    assert 3 <= resumed.taken <= 3 * (34 - 32)


def test_a_finished_run_is_not_asked_again(tiny: steering.Engine, tmp_path: Path) -> None:
    samples, state = make_samples(3), tmp_path / "states.safetensors"
    first = build(tiny, samples, state=state, quiet=True)
    again = Watched(tiny)
    second = build(again, samples, name="other", layers=[2], state=state, quiet=True)
    assert again.taken == 0
    assert torch.equal(second.direction, first.direction)
    assert (second.name, second.layers, second.info["ranking"]) == ("other", (2,), [2])
    assert second.info["data_sha256"] == first.info["data_sha256"]


def test_smaller_sizes_than_what_was_kept_are_measured_anew(
    tiny: steering.Engine, wholes: Wholes, tmp_path: Path
) -> None:
    samples, state = make_samples(3), tmp_path / "states.safetensors"
    build(tiny, samples, state=state, quiet=True)
    for sizes in ([2], [2, 3]):
        grown = grow(tiny, samples, sizes, state=state, quiet=True)
        same(grown[0], wholes[2])
    same(grown[1], wholes[3])


@pytest.mark.usefixtures("keep_every_2")
def test_several_sizes_go_on_too_where_the_least_is_not_passed(
    tiny: steering.Engine, wholes: Wholes, tmp_path: Path
) -> None:
    samples, state = make_samples(6), tmp_path / "states.safetensors"
    with pytest.raises(Stopped):
        grow(Watched(tiny, 3), samples, [4, 6], state=state, quiet=True)
    resumed = Watched(tiny)
    grown = grow(resumed, samples, [4, 6], state=state, quiet=True)
    assert resumed.taken == 3 * (6 - 2)
    for size, vector in zip([4, 6], grown, strict=True):
        same(vector, wholes[size])


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (make_samples(2, question="Which color?"), {}),
        (make_samples(3), {}),
        (make_samples(2)[::-1], {}),
        (make_samples(2), {"seed": 1}),
        (make_samples(2), {"recipe": Recipe("v2")}),
        (make_samples(2), {"recipe": Recipe(position=-2)}),
    ],
)
def test_what_was_kept_of_another_probe_is_replaced(
    tiny: steering.Engine,
    wholes: Wholes,
    tmp_path: Path,
    other: list[mc2.ConflictSample],
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples, state = make_samples(2), tmp_path / "states.safetensors"
    build(tiny, other, state=state, quiet=True, **options)
    assert "to another probe" not in caplog.text
    asked = Watched(tiny)
    same(build(asked, samples, state=state, quiet=True), wholes[2])
    assert asked.taken == 6
    assert f"{state} belongs to another probe" in caplog.text
    asked = Watched(tiny)
    build(asked, samples, state=state, quiet=True)
    assert asked.taken == 0


def test_what_was_kept_of_another_model_is_replaced(
    tiny: steering.Engine, wholes: Wholes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples, state = make_samples(2), tmp_path / "states.safetensors"
    folder = families.build("qwen2_vl", tmp_path / "other", seed=1)
    build(steering.Engine(steering.load(folder, device="cpu"), max_length=512), samples, state=state, quiet=True)
    same(build(tiny, samples, state=state, quiet=True), wholes[2])
    assert "belongs to another probe" in caplog.text


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


@pytest.fixture(scope="module")
def undamaged(tiny: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the saved state of two samples."""
    state = tmp_path_factory.mktemp("kept") / "states.safetensors"
    build(tiny, make_samples(2), state=state, quiet=True)
    return state.read_bytes()


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
    tiny: steering.Engine,
    wholes: Wholes,
    undamaged: bytes,
    tmp_path: Path,
    damage: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples, state = make_samples(2), tmp_path / "states.safetensors"
    state.write_bytes(undamaged)
    damage(state)
    asked = Watched(tiny)
    same(build(asked, samples, state=state, quiet=True), wholes[2])
    assert asked.taken == 6
    assert f"{state} is damaged; the probe starts over" in caplog.text
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
    tiny: steering.Engine, wholes: Wholes, tmp_path: Path, content: bytes | None
) -> None:
    picture = tmp_path / "broken.jpg"
    if content is not None:
        picture.write_bytes(content)
    whole, state = make_samples(12), tmp_path / "states.safetensors"
    samples = [replace(sample, image=picture) if sample.id == "10" else sample for sample in whole]
    with pytest.raises(ValueError, match=r"The image of sample 10 does not decode: .*broken\.jpg"):
        build(tiny, samples, state=state, quiet=True)
    mended = Watched(tiny)
    same(build(mended, whole, state=state, quiet=True), wholes[12])
    assert mended.taken < 3 * 12
