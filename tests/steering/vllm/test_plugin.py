"""The copies that the plugin for vLLM has, because it imports nothing of Helmsight, agree with Helmsight's.

Nothing here needs vLLM: these modules of the plugin are plain torch and pydantic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helmsight_vllm
import numpy as np
import pytest
import torch
from helmsight_vllm import answer, body, masks, noise, plan, table, vectors
from helmsight_vllm import arrays as plugin_arrays

from steering import Diagnose, Generate, Grammar, Icd, Request, Sampling, Steer, SteeringVector, Think, Vcd, VectorStore
from steering.interventions import contrast, generate
from steering.model.images import Picture
from steering.model.mllm import MLLM
from steering.vllm import arrays
from steering.vllm.attention import runs_of
from steering.vllm.facts import CONTRACT
from tests.steering.parallel.asking import chat, picture
from tests.steering.vllm.conftest import Connect, Serve


def maps() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield maps of attention and of activation: drawn ones, with ties, apart from each other, and empty ones."""
    drawn = torch.Generator().manual_seed(0)
    for patches in (2, 3, 16, 60):
        attention, activation = torch.rand(2, patches, generator=drawn)
        yield attention, activation
        yield (attention * 3).floor(), (activation * 3).floor()
        yield attention, 1 - attention
        half = torch.arange(patches) < patches // 2
        yield attention * half, activation * ~half
        yield attention, torch.zeros(patches)
        yield torch.zeros(patches), activation
        yield torch.zeros(patches), torch.zeros(patches)


@pytest.mark.parametrize("top", [0.05, 0.2, 0.5, 0.99])
def test_masks_occlude_the_same_patches(top: float) -> None:
    chosen = set()
    for attention, activation in maps():
        expected = generate.chosen_patches(attention, activation, top)
        assert torch.equal(masks.chosen_patches(attention, activation, top), expected)
        chosen.add(int(expected.sum()))
    assert len(chosen) > 2  # not all of them are empty, nor single patches


@dataclasses.dataclass
class Value:
    """A tensor of a picture as vLLM keeps it."""

    data: torch.Tensor


def inputs_of(*tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return vLLM's inputs of a prompt with pictures."""
    items = [{name: Value(tensor) for name, tensor in picture.items()} for picture in tensors]
    return {"mm_kwargs": {"image": items}, "mm_hashes": {"image": [f"hash {place}" for place in range(len(items))]}}


def pixels_of(model: MLLM, *colours: tuple[int, int, int]) -> list[dict[str, torch.Tensor]]:
    """Return the processor's tensors of pictures, apart."""
    process = model.processor.image_processor
    return [dict(process([picture(*colour)], return_tensors="pt")) for colour in colours]


def test_masked_pixels_have_the_same_values(model: MLLM) -> None:
    pictures = pixels_of(model, (200, 30, 40), (20, 60, 220))
    inputs = {name: torch.cat([tensors[name] for tensors in pictures]) for name in pictures[0]}
    merged = model.processor.image_processor.merge_size**2
    sizes = [len(tensors["pixel_values"]) // merged for tensors in pictures]
    chosen = [torch.arange(size) % step == 0 for size, step in zip(sizes, (2, 3), strict=True)]
    images = [generate.ImageSpan(torch.arange(size), None) for size in sizes]
    expected = generate.masked_pixels(inputs, images, chosen)
    assert expected is not None
    given = inputs_of(*pictures)
    plain = [tensors["pixel_values"].clone() for tensors in pictures]
    assert masks.maskable(given, sizes)
    masks.add_masks(given, [mask.nonzero()[:, 0].tolist() for mask in chosen], sizes)
    got = [item["pixel_values"].data for item in given["mm_kwargs"]["image"]]
    assert torch.equal(torch.cat(got), expected["pixel_values"])
    assert not {"hash 0", "hash 1"} & {*given["mm_hashes"]["image"]}
    # vLLM keeps the tensors for the next prompt with these pictures.
    assert all(torch.equal(tensors["pixel_values"], kept) for tensors, kept in zip(pictures, plain, strict=True))


def test_noise_has_the_same_values(model: MLLM) -> None:
    pictures = [Picture.of(tensors) for tensors in pixels_of(model, (200, 30, 40), (20, 60, 220))]
    frames = model.processor.image_processor.temporal_patch_size
    assert frames > 1
    for step in (1, 500, 999):
        given = inputs_of(*(dict(one.tensors) for one in pictures))
        seeds = [int.from_bytes(one.key[:8], "little", signed=True) for one in pictures]
        noise.add_noise(given, step, seeds, frames)
        for item, one in zip(given["mm_kwargs"]["image"], pictures, strict=True):
            expected = contrast.noised(one, step, frames).tensors["pixel_values"]
            assert torch.equal(item["pixel_values"].data, expected)


def test_vectors_are_read_as_they_were_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: MLLM) -> None:
    drawn, layers = torch.Generator().manual_seed(0), model.num_layers
    saved = SteeringVector(
        "drawn", torch.randn(layers, model.hidden_size, generator=drawn),
        *torch.rand(3, layers, generator=drawn), (1,), model.fingerprint,
    )  # fmt: skip
    saved.save(tmp_path / "drawn.safetensors")
    monkeypatch.setenv(vectors.FOLDERS, str(tmp_path))
    vector = vectors.load_vector("drawn", saved.digest)
    assert torch.equal(vector.direction, saved.direction)
    assert torch.equal(vector.weight, saved.weight)
    with pytest.raises(vectors.UnknownVector) as unknown:
        vectors.load_vector("drawn", "0" * 64)
    assert unknown.value.code == "vector_differs"


def test_runs_and_arrays_travel(model: MLLM) -> None:
    values = np.array([-1, -1, 3, 3, 3, 0, 5])
    assert plan.expanded(runs_of(values)).tolist() == values.tolist()
    tensor = torch.randn(2, 3)
    assert torch.equal(arrays.tensor_of(plugin_arrays.array_of(tensor)), tensor)
    mean = plugin_arrays.mean_of([plugin_arrays.array_of(part) for part in (tensor, tensor + 1)])
    torch.testing.assert_close(arrays.tensor_of(mean), tensor + 0.5)


def test_states_are_the_mean_of_the_rows_that_count_or_nothing_where_too_many_followed() -> None:
    layers, width, length, states = 2, 3, 4, torch.randn(100, 2, 3)
    asked = {"number": "1", "length": length, "classes": [], "residual": {}}
    one = answer.Answer(plan.Plan.of({plan.KEY: asked}), table_of(layers, width), layers, width)
    for row, state in enumerate(states):
        one.add_states(length - 1 + row, state)

    def taken(fed: int) -> torch.Tensor:
        return arrays.tensor_of(one.taken(fed)["residual"]["states"])

    for fed in (99, 90, 100 - answer.KEPT_STATES):
        torch.testing.assert_close(taken(fed), torch.stack([states[: fed + 1].mean(0), states[fed]]))
    assert taken(10).shape == (2, layers, width)
    assert taken(10).isnan().all()


def test_rows_are_read_once_though_a_preempted_answer_is_computed_again_in_chunks() -> None:
    asked = {"labels": [[0, 6]], "rows": {"question": [[1, 3]]}, "steps": False}
    planned = plan.Plan.of({plan.KEY: {"number": "1", "length": 6, "classes": [], "attention": asked}})
    one = answer.Answer(planned, table_of(2, 3), 2, 3)
    assert one.looks_at(0, 4) == [(1, 3)]
    assert one.looks_at(2, 9) == [(2, 3), (5, 9)]
    assert [one.looks_at(9, stop) for stop in range(10)] == [[]] * 10


def table_of(layers: int, width: int) -> table.AdditionTable:
    return table.AdditionTable(layers, width, 1, torch.float32, torch.device("cpu"))


def test_both_speak_one_version_of_the_contract() -> None:
    assert helmsight_vllm.CONTRACT == CONTRACT


def test_bodies_have_the_fields_that_the_plugin_takes(model: MLLM, serve: Serve, connect: Connect) -> None:
    fake, vector = serve(), VectorStore(Path(str(model.path)) / "vectors").get("modality-preference")
    one, plain = chat(picture(200, 30, 40)), Sampling(max_tokens=3, logit_bias={5: 1.0}, stop="never", logprobs=2)
    asked = [
        Request(one, plain, [Steer(vector, 2.0, tokens="image:1")], diagnose=Diagnose(["focus", "decay", "drift"])),
        Request(one, plain, [Think(gamma=0.5, threshold=0.1), Icd()], cache_salt="mine", states=True),
        Request(one, plain, [Vcd()], grammar=Grammar.regex("[0-9]+")),
        Request(one, plain, [Generate(refresh=1)], reply="Yes."),
        Request(one, Sampling(max_tokens=2), forced=(40, 41), diagnose=["focus"]),
    ]
    connect(fake).generate(asked)
    taken = [body.AnswerBody.model_validate(written) for written in fake.asked]
    assert len(taken) == len(asked)
    for parsed, written in zip(taken, fake.asked, strict=True):
        assert parsed.model_dump(mode="json", include={*written}, exclude_unset=True) == written
    given = set().union(*(parsed.model_fields_set for parsed in taken))
    assert {*body.AnswerBody.model_fields} - given <= {"size"}  # which this family needs none of
