"""Embedding: the decoder's inputs for prompts, with new images encoded together, except images in cached prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from steering.accel.backend import Backend
from steering.model.images import ImageCache, Picture
from steering.model.mllm import MLLM
from steering.protocol.sequence import Sequence
from steering.runner.prefix import PrefixCache


class Embedder:
    """Embeds prompts of a model; `rope_axes` is the number of rotary axes, once a prompt had several."""

    def __init__(self, mllm: MLLM, images: ImageCache, prefixes: PrefixCache):
        self.mllm = mllm
        self._backend: Backend | None = None
        self.rope_axes: int | None = None
        self._images = images
        self._prefixes = prefixes

    def use(self, backend: Backend | None) -> None:
        """Use a backend for picture features from now on; None for none."""
        self._backend = backend
        if backend is not None and backend.axes is not None:  # a text's positions are the same on each axis
            self.rope_axes = backend.axes

    def new_values(self, sequence: Sequence) -> int:
        """Return the size of the pictures to encode when a prompt is embedded: the sum of their `Picture.values`."""
        return sum(picture.values for picture in self._images.missing(self._pictures_to_encode(sequence)))

    def encode_next(self, sequence: Sequence, values: float = 0) -> int:
        """Encode the first new pictures of a prompt that will be embedded.

        At least one is encoded, and more of its shape up to `values` values. Returns their values, 0 where there is none.
        """
        return self._images.encode_next(self._features, self._pictures_to_encode(sequence), values)

    def _features(self, pictures: Mapping[str, torch.Tensor]) -> Any:
        features = None if self._backend is None else self._backend.features(pictures)
        return self.mllm.image_features(pictures) if features is None else features

    def _pictures_to_encode(self, sequence: Sequence) -> tuple[Picture, ...]:
        if sequence.prefill.embedded is not None or not sequence.prompt.pictures or not self.mllm.takes_image_features:
            return ()
        before = sequence.prompt.pictures_before(self._prefixes.known(sequence))
        return sequence.prompt.pictures[len(before) :]

    def embed(self, sequences: Iterable[Sequence], whole: bool = False) -> None:
        """Compute the decoder's inputs of prompts that have none yet.

        Pictures in cached prefixes are not encoded, unless the prompts must be `whole`.
        """
        sequences = [sequence for sequence in sequences if sequence.prefill.embedded is None]
        pictured = [s for s in sequences if s.prompt.pictures and self.mllm.takes_image_features]
        unseen, known_pictures = set[bytes](), set[bytes]()
        for sequence in pictured:
            known_length = 0 if whole else self._prefixes.known(sequence)
            before = sequence.prompt.pictures_before(known_length)
            sequence.prefill.unseen = known_length if before else 0
            unseen |= {picture.key for picture in before}
            known_pictures |= {picture.key for picture in sequence.prompt.pictures[len(before) :]}
        pictures = [sequence.prompt.pictures for sequence in pictured]
        features = self._images.get(self._features, pictures, unseen - known_pictures)
        by_sequence = dict(zip(pictured, features, strict=True))
        for sequence in sequences:
            prompt = sequence.prompt
            embedded = self.mllm.embed(prompt.inputs, by_sequence.get(sequence), prompt.rope)
            if sequence.spec.edit is not None:
                embedded = sequence.spec.edit(embedded)
            sequence.prefill.embedded, sequence.prefill.rope_delta = embedded, embedded.rope_delta
            if embedded.positions.ndim == 3:
                self.rope_axes = embedded.positions.shape[0]
