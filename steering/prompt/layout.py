"""Conversion of a chat into token ids and a layout: the span of the prompt to which each token belongs."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image

from steering.errors import RequestError, UnsupportedModel, panics_raise
from steering.model.images import Inputs, Picture, divide
from steering.model.mllm import MLLM
from steering.model.processing.pixels import coordinates
from steering.prompt.blocks import block_names
from steering.prompt.characters import CharSpans, as_json, as_text, without_insertions
from steering.prompt.chat import CONTEXT_LINE, pictures_of
from steering.prompt.fitting import Shrunk, resized, shrunk, sized
from steering.prompt.rendering import PLAIN, SpannedText, TemplateOptions, render, rendered
from steering.prompt.spans import CONTEXT, FIRST_IMAGE, OTHER, QUESTION, REPLY, SYSTEM, TEXTS, USER
from steering.vision.geometry import GRID

BESIDE = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Keys of a message, besides role and content, that templates are given."""


@dataclass(frozen=True)
class ImageSpan:
    """The tokens of one image.

    `columns` (tokens,) are those in the prompt; `grid` is (rows, columns) after patch merging, None where the image's tokens
    form no single grid (tiled images). adjacent: the patches of a token lie one behind the other in the processor's tensors.
    """

    columns: torch.Tensor
    grid: tuple[int, int] | None
    adjacent: bool = True

    @property
    def tokens(self) -> int:
        return len(self.columns)


@dataclass(frozen=True)
class Layout:
    """The span of each prompt token.

    spans: (n,) int64, one of the span numbers, FIRST_IMAGE + i for image i. texts: (n, 2) bool, the tokens of the texts of
    system and of user messages, text contexts included.
    """

    spans: torch.Tensor
    images: tuple[ImageSpan, ...]
    texts: torch.Tensor

    def columns(self, span: int) -> torch.Tensor:
        """Return the positions (k,) of the tokens of a span."""
        return (self.spans == span).nonzero()[:, 0]

    def count(self, span: int) -> int:
        return int((self.spans == span).sum())

    @cached_property
    def image_columns(self) -> torch.Tensor:
        """Positions (image tokens,) of the images' tokens, image by image."""
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(image.columns for image in self.images)])

    @cached_property
    def question_rows(self) -> torch.Tensor:
        """Positions (k,) of the question's tokens that can attend to every image; none where it stands before one."""
        return self._behind(self.image_columns)

    @cached_property
    def modality_rows(self) -> torch.Tensor:
        """Positions (k,) of the question's tokens that can attend to every image and to all of the text context."""
        return self._behind(torch.cat([self.image_columns, self.columns(CONTEXT)]))

    def _behind(self, columns: torch.Tensor) -> torch.Tensor:
        question = self.columns(QUESTION)
        return question[question > columns.max()] if len(columns) else question

    @property
    def user_text(self) -> torch.Tensor:
        """Tokens (n,) bool of the users' own texts."""
        return self.texts[:, TEXTS.index("user")]

    @property
    def halves(self) -> torch.Tensor:
        """Tokens (n, 2) bool, without images: those before the first image, and all others.

        Without an image the first half ends at the users' first text.
        """
        image = self.spans.numpy() >= FIRST_IMAGE
        starts = (image if image.any() else self.user_text.numpy()).nonzero()[0]
        before = np.arange(len(image)) < (starts[0] if len(starts) else len(image))
        return torch.from_numpy(np.stack([before & ~image, ~before & ~image], -1))


@dataclass(frozen=True)
class Prompt:
    """A tokenised chat.

    ids: (n,) int64; inputs: everything the model's wrapper takes, on the CPU; pictures: its images.
    """

    ids: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    pictures: tuple[Picture, ...]
    layout: Layout
    options: TemplateOptions = PLAIN
    """The chat template's arguments besides the messages."""
    rope: torch.Tensor | None = None
    """Rotary positions (axes, 1, n), where the model can derive them from these inputs."""
    shrunk: tuple[Shrunk, ...] = ()
    """The pictures that were scaled down to fit."""
    placeholders: tuple[tuple[int, int, str], ...] = ()
    """For each picture the columns, from and to, of the tokens that the processor put in place of a text, and that text."""

    @property
    def length(self) -> int:
        return len(self.ids)

    @cached_property
    def blocks(self) -> tuple[bytes, ...]:
        """A hash of each beginning of the prompt."""
        return self.blocks_with([])

    def pictures_before(self, column: int) -> tuple[Picture, ...]:
        """Return the pictures whose tokens all come before a column."""
        images = self.layout.images
        if len(images) != len(self.pictures):
            return self.pictures if all(int(image.columns[-1]) < column for image in images) else ()
        return tuple(
            picture for picture, image in zip(self.pictures, images, strict=True) if int(image.columns[-1]) < column
        )

    def blocks_with(self, answer: Sequence[int]) -> tuple[bytes, ...]:
        """Return a hash of each beginning of the prompt followed by an answer's tokens.

        A picture that cannot be separated from the others counts from the first one on.
        """
        ids = torch.cat([self.ids, torch.tensor(answer, dtype=torch.int64)])
        spans = torch.cat([self.layout.spans, torch.full((len(answer),), OTHER)])
        images = self.layout.images
        begin = images if len(images) == len(self.pictures) else images[:1] * len(self.pictures)
        starts = [int(image.columns[0]) for image in begin]
        return block_names(
            ids, spans, [(start, picture.key) for start, picture in zip(starts, self.pictures, strict=True)]
        )


def build_prompt(
    mllm: MLLM,
    messages: Sequence[Mapping[str, Any]],
    reply: str | None = None,
    options: TemplateOptions = PLAIN,
    room: int | None = None,
) -> Prompt:
    """Render, tokenise and lay out a chat; raise RequestError when the chat cannot be rendered.

    A `reply` is rendered after it as the assistant's, and the prompt ends with it; its tokens are the span `REPLY`.
    `options` are the template's arguments besides the messages; text rendered from them belongs to no span. Pictures are
    scaled down where the prompt would have more than `room` tokens.

    Messages follow the Hugging Face chat format with PIL images; see `Request`. The ids equal those of
    `processor.apply_chat_template(..., tokenize=True)`, except that special tokens written by a user stay text.
    """
    special = mllm.special_pattern
    if reply is not None:
        part = {"type": "text", "text": reply, "span": "reply"}
        messages = [*messages, {"role": "assistant", "content": [part]}]
    chat, parts, pictures = _normalise(messages, special)
    with _hinting(messages):
        text, text_spans = render(mllm, chat, parts, options, special)
        if reply is not None:
            text = text[: text_spans[-1][1]]
        smaller = () if room is None else shrunk(mllm, pictures, text, room)
        images, size = sized(mllm, resized(pictures, smaller))
        bos = mllm.tokenizer.bos_token
        with mllm.seen.noting() as noted:
            encoded = _encode(mllm, text, images, add_special_tokens=not (bos and text.startswith(bos)), size=size)
    replaced = encoded.pop("text_replacement_offsets", None)  # none without images, or an empty tensor
    replacements = replaced[0] if isinstance(replaced, list) else []
    if images and not replacements:
        raise UnsupportedModel(
            f"{mllm.name} cannot be served: its processor does not tell which tokens stand for an image."
        )
    offsets = encoded.pop("offset_mapping")[0]
    inputs = {name: value for name, value in encoded.items() if name != "labels"}
    _keep_blank_tiles(inputs)

    chars = CharSpans(text, replacements)
    for text_span in text_spans:
        chars.mark(*text_span)
    offsets = without_insertions(mllm, inputs["input_ids"][0], offsets, chars.text)
    keep = chars.without_joiners(offsets)
    if not bool(keep.all()):
        offsets = offsets[keep]
        inputs = {
            name: v[:, keep] if v.ndim == 2 and v.shape[:2] == (1, len(keep)) else v for name, v in inputs.items()
        }

    ids = inputs["input_ids"][0]
    if bool((torch.isin(ids, mllm.special_ids) & chars.written(offsets)).any()):
        raise RequestError("Texts of the messages join into a special token; they must not.", param="messages")
    spans, texts = chars.of_tokens(offsets)
    columns = (ids == mllm.image_token_id).nonzero()[:, 0]
    counts = [mllm.image_tokens_of(replacement["replacement"]) for replacement in replacements]
    if len(counts) != len(images) or sum(counts) != len(columns):
        with _hinting(messages):
            raise RequestError("The chat template did not place every image of the messages.", param="messages")
    placeholders = _placeholders(text, replacements, offsets)
    image_spans, adjacent = [], GRID not in inputs or _adjacent(mllm)
    for number, own in enumerate(columns.split(counts)):
        spans[own], texts[own] = FIRST_IMAGE + number, False
        image_spans.append(ImageSpan(own, _grid(mllm, inputs, number, len(images), own), adjacent))
    rope = mllm.rope_positions(inputs)
    shown = tuple(noted) or divide(inputs)
    prompt_inputs = Inputs(inputs, shown) if noted else inputs
    return Prompt(
        ids, prompt_inputs, shown, Layout(spans, tuple(image_spans), texts), options, rope, smaller, placeholders
    )


def _normalise(
    messages: Sequence[Mapping[str, Any]], special: re.Pattern[str]
) -> tuple[list[dict[str, Any]], list[SpannedText], list[Mapping[str, Any]]]:
    """Return the chat in list-of-parts form, its text parts in order, and its image parts in order."""
    chat: list[dict[str, Any]] = []
    parts: list[SpannedText] = []
    images: list[Mapping[str, Any]] = []
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    if last_user < 0:
        raise RequestError("'messages' must contain a message of the user.", param="messages")
    for number, message in enumerate(messages):
        content = message["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        calls = message.get("tool_calls")
        question_from = _question_start(content) if number == last_user else len(content)
        normal: list[dict[str, Any]] = []
        for position, part in enumerate(content):
            if part["type"] == "image":
                images.append(part)
                normal.append({"type": "image"})
                continue
            if calls and not part["text"]:
                continue  # a call has no text, and templates test for content
            text = as_text(part["text"], special)
            normal.append({"type": "text", "text": text})
            if part.get("span") == "context":
                span = CONTEXT
            elif message["role"] == "user":
                span = QUESTION if position >= question_from else USER
            else:
                span = SYSTEM if message["role"] == "system" else REPLY if part.get("span") == "reply" else OTHER
            parts.append(SpannedText(text, span, message["role"]))
        beside = {name: as_json(message[name], special) for name in BESIDE if message.get(name)}
        chat.append({"role": message["role"], "content": normal, **beside})
    return chat, parts, images


@contextmanager
def _hinting(messages: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Within the block, add to a refusal the roles other than the user whose messages hold images.

    Templates often accept images of the user alone.
    """
    try:
        yield
    except RequestError as error:
        roles = [message["role"] for message in messages if message["role"] != "user" and pictures_of([message])]
        if not roles or error.param != "messages":
            raise
        hint = f"It may take no images in messages of the role {' or '.join(dict.fromkeys(roles))}."
        raise RequestError(f"{error} {hint}", param=error.param, code=error.code) from error


def _question_start(content: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the part where the question begins: after the last image, or 0 without text after it."""
    after = max((i + 1 for i, part in enumerate(content) if part["type"] == "image"), default=0)
    follows = any(
        part["type"] == "text"
        and part.get("span") != "context"
        and any(line.strip() and not line.startswith(CONTEXT_LINE) for line in part["text"].splitlines())
        for part in content[after:]
    )
    return after if follows else 0


def _encode(
    mllm: MLLM, text: str, images: list[Image.Image], add_special_tokens: bool, size: dict[str, int] | None = None
) -> dict[str, Any]:
    """Return the processor's tensors with token offsets; some families want the images nested by prompt, all accept it.

    size: bounds in place of the processor's own.
    """

    def refusal(panic: str) -> RequestError:
        return RequestError(f"The model's tokenizer cannot read these messages: {panic}", param="messages")

    read = {"return_offsets_mapping": True, "add_special_tokens": add_special_tokens}
    try:
        with panics_raise(refusal):
            if not images and mllm.beside_text is not None:  # a quarter of the processor's time
                encoded = {name: torch.tensor(value) for name, value in mllm.tokenizer([text], **read).items()}
                return encoded | {name: torch.zeros_like(encoded["input_ids"]) for name in mllm.beside_text}
            bounds: dict[str, Any] = {} if size is None else {"size": size}
            shown: dict[str, Any] = (
                {"images": [images], "images_kwargs": {"return_tensors": "pt", **bounds}} if images else {}
            )
            output = mllm.processor(text=[text], return_text_replacement_offsets=True, **shown, **read)
            # With return_tensors, transformers would convert the offsets token by token.
            numbers = {name: value for name, value in output.items() if name != "text_replacement_offsets"}
            return {**output, **{name: torch.as_tensor(value) for name, value in numbers.items()}}
    except (ValueError, RuntimeError) as error:  # LFM2-VL's cannot stack tiles of a narrow picture with the whole one
        reason = error if isinstance(error, ValueError) else f"a picture may be too narrow, or not RGB ({error})"
        raise RequestError(f"The model's processor refuses these messages: {reason}", param="messages") from error


def encode_picture(mllm: MLLM, picture: Image.Image) -> dict[str, Any]:
    """Return the processor's tensors of one picture alone."""
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    return _encode(mllm, rendered(mllm.chat.render, chat), [picture], add_special_tokens=False)


@functools.lru_cache(maxsize=8)
def _adjacent(mllm: MLLM) -> bool:
    """Return whether a processor puts the patches of a token one behind the other, as a picture of coordinates shows."""
    images = mllm.processor.image_processor
    merge = getattr(images, "merge_size", 1)
    if merge == 1:
        return True
    if (pixels := encode_picture(mllm, coordinates((4 * merge * images.patch_size,) * 2))["pixel_values"]).ndim != 2:
        return False
    colours = pixels.float().unflatten(1, (3, -1)).mean(2)  # (patches, 3); the picture has no blue
    blocks = colours.unflatten(0, (-1, merge**2))
    extents = blocks.amax(1) - blocks.amin(1)
    return bool((extents[:, :2] > 1e-3).all()) and float(colours[:, 2].std()) < 1e-3  # in rows, most lie at one height


def _keep_blank_tiles(inputs: dict[str, torch.Tensor]) -> None:
    """Make every tile differ slightly from zero.

    Some models take a tile of zeros, which a black picture may become, for padding and drop it.
    """
    pixels = inputs.get("pixel_values")
    if pixels is not None and pixels.ndim == 5 and len(pixels) == 1:  # several images have padding tiles
        blank = ~pixels.flatten(2).any(-1)
        pixels[:, :, 0, 0, 0].masked_fill_(blank, 1e-6)


def _placeholders(
    text: str, replacements: Sequence[Mapping[str, Any]], offsets: torch.Tensor
) -> tuple[tuple[int, int, str], ...]:
    """Return `Prompt.placeholders`: offsets (n, 2) are those of the tokens in the expanded text."""
    starts = offsets[:, 0].numpy()
    placeholders = []
    for replaced in replacements:
        first, end = np.searchsorted(starts, replaced["new_span"])
        placeholders.append((int(first), int(end), text[slice(*replaced["span"])]))
    return tuple(placeholders)


def _grid(
    mllm: MLLM, inputs: Mapping[str, torch.Tensor], number: int, images: int, columns: torch.Tensor
) -> tuple[int, int] | None:
    """Return the token grid of an image, where its tokens form a single one.

    It follows from the processor's own grid or places of patches, from rows that end in break tokens, or from the size of an
    image that was not tiled.
    """
    tokens = len(columns)
    if (thw := inputs.get(GRID)) is not None:
        merge = getattr(mllm.processor.image_processor, "merge_size", 1)
        rows, width = (int(side) // merge for side in thw[number, 1:])
        return (rows, width) if rows * width == tokens else None
    places = inputs.get("image_position_ids")  # (images, patches, 2), x and y; -1 for padding
    sizes = inputs.get("spatial_shapes") if places is None else places.amax(1).flip(1) + 1
    if sizes is not None:  # (images or tiles, 2)
        merge = round((int(sizes[number].prod()) / tokens) ** 0.5)
        rows, width = (int(side) // merge for side in sizes[number])
        return (rows, width) if rows * width == tokens and len(sizes) == images else None
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.ndim < 4 or pixels.shape[:-3].numel() != images:
        return None
    breaks = (columns.diff() > 1).nonzero()[:, 0] + 1
    runs = {len(run) for run in columns.tensor_split(breaks.tolist())}
    if len(breaks):
        return (len(breaks) + 1, runs.pop()) if len(runs) == 1 else None
    unpadded = inputs.get("image_sizes") if pixels.ndim == 4 else None
    height, wide = (int(side) for side in (pixels.shape[-2:] if unpadded is None else unpadded[number]))
    side = (height * wide / tokens) ** 0.5
    grid = round(height / side), round(wide / side)
    return grid if grid[0] * grid[1] == tokens else None
