"""An encoder is given grids on the CPU if it takes them, which its own errors tell, and no passing ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from steering.model.encoder import PictureEncoder

META = torch.device("meta")
PICTURES = {"pixel_values": torch.zeros(4, 3), "image_grid_thw": torch.tensor([[1, 2, 2]])}


class Wrapper:
    """Takes grids on one device alone, or fails as told."""

    def __init__(self, takes: str):
        self.takes = takes
        self.failure: Exception | None = None
        self.grids: list[str] = []

    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, return_dict: bool, given: int = 0
    ) -> Any:
        assert pixel_values.device == META
        self.grids.append(image_grid_thw.device.type)
        if self.failure is not None:
            raise self.failure
        if self.takes not in ("any", image_grid_thw.device.type):
            raise RuntimeError("tensors are on two devices")
        return "features"


class Geometry:
    def __init__(self, given: dict[str, Any]):
        self.given = given

    @contextmanager
    def on_the_host(self, pictures: Any, device: torch.device) -> Iterator[dict[str, Any]]:
        yield self.given


def encoder_of(wrapper: Any, given: dict[str, Any] | None = None) -> PictureEncoder:
    return PictureEncoder(wrapper, Geometry({"given": 1} if given is None else given), META)  # type: ignore[arg-type]


@pytest.mark.parametrize(("takes", "grids"), [("any", ["cpu", "cpu"]), ("meta", ["cpu", "meta", "meta"])])
def test_it_is_found_out_once(takes: str, grids: list[str]) -> None:
    encoder = encoder_of(wrapper := Wrapper(takes))
    assert [encoder(PICTURES), encoder(PICTURES)] == ["features"] * 2
    assert wrapper.grids == grids
    assert encoder.splits_on_the_host == (takes == "any")


def test_an_error_of_an_encoder_that_takes_them_says_nothing() -> None:
    encoder = encoder_of(wrapper := Wrapper("any"))
    encoder(PICTURES)
    wrapper.failure = RuntimeError("it is broken")
    with pytest.raises(RuntimeError, match="broken"):
        encoder(PICTURES)
    assert wrapper.grids == ["cpu", "cpu"]
    assert encoder.splits_on_the_host


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("it ended"), RuntimeError("it is broken")])
def test_an_encoding_that_fails_both_ways_says_nothing(failure: Exception) -> None:
    encoder = encoder_of(wrapper := Wrapper("any"))
    wrapper.failure = failure
    with pytest.raises(RuntimeError):
        encoder(PICTURES)
    assert len(wrapper.grids) == (1 if isinstance(failure, torch.OutOfMemoryError) else 2)
    assert encoder.splits_on_the_host is None
    wrapper.failure = None
    assert encoder(PICTURES) == "features"
    assert encoder.splits_on_the_host


class Unpadded:
    """Reads sizes of pictures, or computes with them on the device; `sizes` has where they were."""

    def __init__(self, computes: bool):
        self.computes = computes
        self.sizes: list[str] = []

    def get_image_features(
        self, pixel_values: torch.Tensor, image_sizes: torch.Tensor, batch_num_images: torch.Tensor, return_dict: bool
    ) -> Any:
        assert image_sizes.device == batch_num_images.device
        self.sizes.append(image_sizes.device.type)
        if self.computes:
            return pixel_values[:, 0] * image_sizes[:, 0]
        lengths = torch.as_tensor(image_sizes, device=pixel_values.device).prod(-1).tolist()  # none is read on "meta"
        return pixel_values.split(lengths), torch.tensor(lengths, device=pixel_values.device)


@pytest.mark.parametrize("computes", [False, True])
def test_sizes_are_read_on_the_cpu_by_encoders_that_pack_no_pictures(computes: bool) -> None:
    encoder = encoder_of(wrapper := Unpadded(computes), given={})
    sizes = {"image_sizes": torch.tensor([[1, 2], [2, 1]]), "batch_num_images": torch.tensor([2])}
    for _ in range(2):
        features = encoder({"pixel_values": torch.zeros(4, 3)[: 2 if computes else 4], **sizes})
    assert wrapper.sizes == (["cpu", "meta", "meta"] if computes else ["cpu", "cpu"])
    assert encoder.splits_on_the_host == (not computes)
    if not computes:
        assert features[1].device == META


def test_grids_go_to_the_device_where_the_encoder_computes_its_own_arguments() -> None:
    encoder = encoder_of(wrapper := Wrapper("meta"), given={})
    assert encoder(PICTURES) == "features"
    assert wrapper.grids == ["meta"]
    assert encoder.splits_on_the_host is None
