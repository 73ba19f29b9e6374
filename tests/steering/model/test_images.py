"""Image features: told apart by picture, encoded together, kept by content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from steering.form import MixedForms
from steering.model.images import Features, ImageCache, Picture, PictureFeatures, divide
from tests import families
from tests.steering.conftest import LoadMLLM, LoadPlain

Tensors = Mapping[str, torch.Tensor]


class Encoder:
    """Makes 10 rows of 10 float32 numbers (400 bytes) per picture, or features that do not tell pictures apart."""

    def __init__(self, cache: ImageCache, separable: bool = True):
        self.cache = cache
        self.separable = separable
        self.calls: list[list[float]] = []

    def __call__(self, tensors: Tensors) -> Any:
        values = tensors["pixel_values"][:, 0].tolist()
        self.calls.append(values)
        rows = [torch.full((10, 10), value) for value in values]
        return BaseModelOutputWithPooling(pooler_output=tuple(rows) if self.separable else torch.cat(rows))

    def get(self, *prompts: tuple[int, ...]) -> list[list[float]]:
        """Return the number of each picture in the result for prompts of one-number pictures."""
        pictures = [divide({"pixel_values": torch.tensor([[float(n)] * 3 for n in prompt])}) for prompt in prompts]
        features = [output.pooler_output for output in self.cache.get(self, pictures)]
        return [[float(rows[0, 0]) for rows in (f if self.separable else f.split(10))] for f in features]


def test_new_pictures_of_several_prompts_are_encoded_in_one_call_and_once() -> None:
    encoder = Encoder(ImageCache(10_000))
    assert encoder.get((1, 2), (2, 3), (1,)) == [[1, 2], [2, 3], [1]]
    assert encoder.calls == [[1, 2, 3]]
    assert encoder.get((3, 4, 1)) == [[3, 4, 1]]
    assert encoder.calls == [[1, 2, 3], [4]]
    assert (encoder.cache.hits, encoder.cache.misses, encoder.cache.bytes) == (2, 4, 1600)


def test_features_that_do_not_tell_pictures_apart_are_kept_by_prompt() -> None:
    encoder = Encoder(ImageCache(10_000), separable=False)
    assert encoder.get((1, 2), (3,)) == [[1, 2], [3]]
    assert encoder.get((1, 2), (2,)) == [[1, 2], [2]]
    assert encoder.calls == [[1, 2, 3], [1, 2], [3], [2]]  # the first call found out
    assert (encoder.cache.hits, encoder.cache.misses) == (1, 3)


def test_the_least_recently_used_leaves_first_and_the_bytes_are_bounded() -> None:
    encoder = Encoder(ImageCache(1000))
    for number in (1, 2, 1, 3):
        encoder.get((number,))
        assert encoder.cache.bytes <= 1000
    assert encoder.calls == [[1], [2], [3]]
    encoder.get((1,), (2,))
    assert encoder.calls == [[1], [2], [3], [2]]
    assert encoder.cache.bytes == 800


def test_features_larger_than_the_cache_are_not_kept() -> None:
    encoder = Encoder(ImageCache(399))
    assert encoder.get((1,), (1,)) == [[1], [1]]
    encoder.get((1,))
    assert (encoder.calls, encoder.cache.bytes) == ([[1], [1]], 0)


def test_pictures_encoded_by_different_paths_are_shown_together() -> None:
    """A plain tower gives a tuple of views, a compiled one a list of tensors: what is kept is the same of both."""
    encoder, cache = Encoder(ImageCache(10_000)), ImageCache(10_000)
    first, second = (divide({"pixel_values": torch.tensor([[number] * 3])}) for number in (1.0, 2.0))
    (alone,) = cache.get(encoder, [first])

    def compiled(tensors: Tensors) -> Features:
        return Features([*encoder(tensors).pooler_output])

    (late,) = cache.get(compiled, [second])
    (joined_features,) = cache.get(compiled, [(*first, *second)])
    assert type(alone.pooler_output) is type(late.pooler_output) is type(joined_features.pooler_output) is tuple
    assert [float(rows[0, 0]) for rows in joined_features.pooler_output] == [1, 2]
    assert cache.hits == 2
    cache.encode_next(compiled, [*first, *divide({"pixel_values": torch.tensor([[3.0] * 3])})])
    assert cache.misses == 3


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda rows: rows[:, :5], torch.Tensor.flatten])
def test_features_of_another_form_than_those_before_are_not_kept(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    encoder, cache = Encoder(ImageCache(10_000)), ImageCache(10_000)
    first, second = (divide({"pixel_values": torch.tensor([[number] * 3])}) for number in (1.0, 2.0))
    cache.get(encoder, [first])
    with pytest.raises(MixedForms, match="a picture's features"):
        cache.get(lambda tensors: Features(tuple(map(change, encoder(tensors).pooler_output))), [second])
    assert cache.bytes == 400


def test_features_that_come_as_one_tensor_are_never_joined_with_others() -> None:
    encoder, cache = Encoder(ImageCache(10_000)), ImageCache(10_000)
    first, second = (divide({"pixel_values": torch.tensor([[number] * 3])}) for number in (1.0, 2.0))
    cache.get(encoder, [first])
    with pytest.raises(MixedForms):
        cache.get(lambda tensors: Features(torch.stack(encoder(tensors).pooler_output)), [second])


def test_a_failed_encoding_is_not_remembered() -> None:
    cache = ImageCache(1000)

    def fail(tensors: Tensors) -> None:
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            cache.get(fail, [divide({"pixel_values": torch.zeros(1, 3)})])
    assert (cache.bytes, cache.hits, cache.misses) == (0, 0, 0)


def test_pictures_with_grids_are_cut_at_their_patches() -> None:
    grids = torch.tensor([[1, 2, 2], [1, 2, 4]])
    pixels = torch.arange(24.0).view(12, 2)
    first, second = divide({"pixel_values": pixels, "image_grid_thw": grids, "input_ids": torch.zeros(1, 9)})
    assert torch.equal(first.tensors["pixel_values"], pixels[:4])
    assert torch.equal(second.tensors["pixel_values"], pixels[4:])
    assert torch.equal(second.tensors["image_grid_thw"], grids[1:])
    assert first.shape == second.shape
    assert set(Picture.join([first, second]).tensors) == {"pixel_values", "image_grid_thw"}


def test_pictures_that_cannot_be_told_apart_stay_one() -> None:
    tensors = {"pixel_values": torch.zeros(4, 3), "batch_num_images": torch.tensor([2, 1])}
    (picture,) = divide(tensors)
    assert picture.tensors is not None
    assert set(picture.tensors) == set(tensors)
    assert divide({"input_ids": torch.zeros(1, 5)}) == ()


@pytest.mark.parametrize(
    "other",
    [
        {"pixel_values": torch.zeros(4, 1, dtype=torch.float64), "image_grid_thw": torch.tensor([[1, 2, 2]])},
        {"pixel_values": torch.zeros(4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])},
        {"pixel_values": torch.zeros(4, 1), "image_grid_thw": torch.tensor([[1, 1, 4]])},
        {"pixel_values": torch.zeros(4, 1)},
        {"pixels": torch.zeros(4, 1), "image_grid_thw": torch.tensor([[1, 2, 2]])},
    ],
)
def test_everything_that_makes_another_picture_makes_another_key(other: dict[str, torch.Tensor]) -> None:
    tensors = {"pixel_values": torch.zeros(4, 1), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    assert Picture.of(tensors).key != Picture.of(other).key


def test_how_pictures_lie_in_memory_does_not_matter() -> None:
    pixels = torch.randn(6, 4, dtype=torch.bfloat16)
    apart = pixels.T.contiguous().T
    assert Picture.of({"pixel_values": pixels}).key == Picture.of({"pixel_values": apart}).key


@pytest.mark.parametrize("family", families.FAMILIES)
def test_prompts_encoded_together_get_what_they_get_alone(
    family: str, load_mllm: LoadMLLM, load_plain: LoadPlain
) -> None:
    mllm = load_mllm(family)
    prompts = [
        load_plain(family).inputs(families.example_messages(family, count, seed=seed))
        for seed, count in enumerate((1, 2, 3))
    ]
    cache, encoded = ImageCache(2**24), []
    with torch.inference_mode():
        alone = [mllm.embed(inputs, mllm.image_features(inputs)).embeds for inputs in prompts]
        for _ in range(2):
            features = cache.get(mllm.image_features, [divide(inputs) for inputs in prompts])
            for inputs, own_features, expected in zip(prompts, features, alone, strict=True):
                torch.testing.assert_close(mllm.embed(inputs, own_features).embeds, expected, rtol=1e-4, atol=1e-4)
            encoded.append(cache.misses)
    assert encoded[0] == encoded[1] > 0
    assert cache.hits >= encoded[0]
    if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"):
        assert (cache.misses, cache.hits) == (6, 6), "each picture by itself"


@pytest.mark.parametrize("whole", [True, False])
def test_features_of_deep_layers_are_joined_in_the_form_in_which_they_came(whole: bool) -> None:
    layers = [torch.arange(10.0).view(5, 2) + 100 * layer for layer in range(2)]
    deep = layers if whole else [layer.split([2, 3]) for layer in layers]
    pooled = torch.zeros(5, 2).split([2, 3])
    parts = PictureFeatures.separate(Features(pooled, deep), 2)
    assert parts is not None
    for number, layer in enumerate(layers):
        assert torch.equal(torch.cat([part.deep[number] for part in parts]), layer)
    again = PictureFeatures.join(parts, stacked=False, whole=whole).deepstack_features
    for made, given in zip(again, deep, strict=True):
        assert all(map(torch.equal, made, given))
    assert (
        PictureFeatures.separate(Features(pooled, [layers[0][1:]] if whole else [layers[0].split([2, 2, 1])]), 2)
        is None
    )
