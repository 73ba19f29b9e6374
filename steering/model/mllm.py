"""A multimodal language model, patched so that the engine can run its decoder itself."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from threading import RLock
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from steering.decoder import int8, packed, updates
from steering.decoder.kv import ColumnPool, KVPool
from steering.decoder.prompts import Prefill
from steering.decoder.ranks import ALONE, Ranks
from steering.devices import to_device
from steering.errors import RequestError
from steering.forwards import own_forwards
from steering.model.calibration import Calibration
from steering.model.chat.template import ChatTemplate
from steering.model.checkpoint.folder import end_id_of, generation_defaults_of, settings_of, stop_ids_of
from steering.model.embedded import Embedded, Overlay
from steering.model.encoder import PictureEncoder
from steering.model.following.additions import Additions
from steering.model.following.head import OutputHead
from steering.model.images import PIXELS
from steering.model.masks import WrapperMasks
from steering.model.processing.pixels import PixelBounds
from steering.model.processing.seen import SeenPictures
from steering.model.token_inputs import TokenInputs
from steering.recurrent import layers
from steering.triton import fusing
from steering.triton.attended import DecodeFunction
from steering.triton.attention import decode_kernel
from steering.vision import attention, patches, placeholders, widths
from steering.vision.geometry import Geometry

Quantization = Literal["int8"]


class _Intercepted(Exception):
    """Carries the decoder's inputs out of the wrapper's forward pass."""


class Source(NamedTuple):
    """The arguments of `load`, for another process that loads the same model."""

    path: str
    dtype: str
    quantization: Quantization | None


class MLLM:
    """A patched image-text-to-text model with its processor; made by `load`.

    `num_layers`, `hidden_size` and `vocab_size` are those of the language model, `context_length` counts tokens; `device` is
    where it is or, where it lies on several `devices`, the one where prompts enter and slots are kept; `ranks` are the
    processes that run it together; `quantization` is "int8" where its layers compute in integers from `settle` on;
    `fingerprint` identifies the model for which vectors are made; `path` is the checkpoint's folder, None for a name on the
    hub; `source` is how it was loaded, None where it lies on several devices or was made by other means; `pixels` bounds the
    sizes of pictures, None where a request cannot set these bounds; `calibration` holds the results of probes, None where
    there are none, and `calibrations` is their folder; `checked` holds the self-check's measurements of the same, on its own
    two prompts; `generation_defaults` is the checkpoint's own sampling; `updates_add_up` tells whether each layer's output
    is known to be its input and the two updates that hooks are given; `attention_layers` and `recurrent_layers` are the
    numbers of layers with softmax attention and with recurrent states. `shared` weights keep their form.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        name: str | None,
        path: Path | None,
        ranks: Ranks = ALONE,
        quantization: Quantization | None = None,
        fingerprint: str | None = None,
        calibrations: Path | None = None,
        shared: bool = False,
    ):
        self.ranks, self.quantization = ranks, quantization
        self.source: Source | None = None
        self.model = model
        self.stepping = RLock()
        """Held by the engine that steps: what layers and wrapper keep while they run is of one of them."""
        self.processor = processor
        self.chat = ChatTemplate(processor)
        self.seen = SeenPictures(processor)
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.path = path
        self.text_config = model.config.get_text_config()
        self.decoder: Any = model.get_decoder()
        self.layers: nn.ModuleList = self.decoder.layers
        self.num_layers = len(self.layers)
        self.attention_layers, self.recurrent_layers = layers.prepare(self.layers, self.text_config)
        self.hidden_size: int = self.text_config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context_length: int = int(getattr(self.text_config, "max_position_embeddings", 0) or 4096)
        self.image_token_id: int = model.config.image_token_id
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.devices = tuple(dict.fromkeys([self.device, *(parameter.device for parameter in model.parameters())]))
        self.dtype: torch.dtype = next(self.decoder.parameters()).dtype
        self.fingerprint = fingerprint_of(model) if fingerprint is None else fingerprint
        settings = settings_of(path)
        self.name: str = name or settings.get("name") or (path.resolve().name if path else model.config.name_or_path)
        self.image_size: tuple[int, int] | None = tuple(settings["image_size"]) if "image_size" in settings else None
        self.pixels = None if self.image_size else PixelBounds.of(processor)
        self.focus_layers: int = settings.get("focus_layers", max(1, len(self.attention_layers) // 4))
        stops = stop_ids_of(model.generation_config, self.tokenizer)
        self.stop_ids = frozenset(stops)
        self.end_id = end_id_of(stops, self.tokenizer)
        self.generation_defaults = generation_defaults_of(model.generation_config)
        if quantization is not None:
            int8.prepare(self.layers)
        elif self.devices == (torch.device("cpu"),) and ranks.size == 1 and not shared:
            packed.prepare(model, self.dtype)
        if len(self.devices) == 1 and ranks.size == 1 and not shared:
            fusing.fuse(model, self.decoder, self.device)
            widths.align(model, self.decoder, self.device)
        self._head = OutputHead(model)
        self.token_inputs = TokenInputs(model)
        self._masks = WrapperMasks(getattr(self.text_config, "sliding_window", None))
        self._updates, self._followed, self.updates_add_up = updates.install(self.layers, ranks), False, True
        self.ffn_widths = tuple(update.width for update in self._updates)
        patches.prepare(model)
        attention.prepare(model.model)
        placeholders.prepare(self.decoder, self.device)
        self.calibrations = calibrations
        attending = len(self.attention_layers)
        self.calibration = Calibration.load(path, self.fingerprint, self.num_layers, calibrations, attending)
        self.checked: Calibration | None = None
        self._geometry = Geometry(model.model)
        self.encoder = PictureEncoder(model.model, self._geometry, self.device)
        self._decoder_arguments = frozenset(inspect.signature(self.decoder.forward).parameters)
        self.takes_image_features = "mm_encoder_outputs" in inspect.signature(model.model.forward).parameters

    @property
    def rounds(self) -> bool:
        """True if it computes in less than float32."""
        return self.dtype != torch.float32 or self.quantization is not None

    def need_updates(self, param: str) -> None:
        """Raise RequestError, naming the field, where a layer's additions to the residual stream are not known."""
        if not self.updates_add_up:
            raise RequestError(
                f"'{param}' needs the updates of attention and FFN, but the layers of {self.name} add something else to "
                "the residual stream.",
                param=param,
                code="unsupported_value",
            )

    def settle(self, compiled: bool = False) -> None:
        """Convert weights to the form in which products are fastest, and free the original.

        Layers that compute in integers are quantized; on a CPU other weights are stored in the order of its kernels, unless
        torch compiles the steps. An engine calls this once it has the plain model's reference results.
        """
        if self.quantization is not None:
            int8.narrow(self.layers)
        if not compiled:
            packed.pack(self.model)

    @property
    def template(self) -> str:
        """The chat template; "" where it has none, or several."""
        return self.chat.text

    @cached_property
    def image_tokens_of(self) -> Callable[[str], int]:
        """A cached function that counts the image tokens in the text that a processor writes for a picture."""

        def count(text: str) -> int:
            return int(self.tokenizer(text, add_special_tokens=False).input_ids.count(self.image_token_id))

        return lru_cache(maxsize=256)(count)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """A pattern of every token that users must not write: special tokens and the placeholders of pictures."""
        added = self.tokenizer.added_tokens_decoder.values()
        tokens = {token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        tokens |= {
            token
            for name in ("image_token", "video_token")
            if isinstance(token := getattr(self.processor, name, None), str)
        }
        return re.compile(
            "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if len(token) > 1) or r"(?!)"
        )

    @cached_property
    def special_ids(self) -> torch.Tensor:
        """Ids that only a template may write; an id that an unknown character gets is not among them."""
        special = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
        unknown = self.tokenizer("\U0010fffd", add_special_tokens=False).input_ids
        return torch.tensor(sorted((special | {self.image_token_id}).difference(unknown)))

    @cached_property
    def longest_token(self) -> int:
        """The length in characters of the vocabulary's longest token.

        It is in bytes for a vocabulary of bytes, where a character may have four.
        """
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def rotates_alike(self) -> bool:
        """True if a token's rotary angles depend on its position alone, and not on the length of its prompt."""
        parameters = getattr(self.text_config, "rope_parameters", None) or {}
        kinds = [rope.get("rope_type") for rope in (parameters, *parameters.values()) if isinstance(rope, Mapping)]
        return not {"dynamic", "longrope"}.intersection(kinds)

    @cached_property
    def needs_images(self) -> bool:
        """True if its processor refuses text without images, as PaliGemma's does."""
        try:
            self.processor(text=["?"])
        except ValueError:
            return True
        return False

    @cached_property
    def beside_text(self) -> tuple[str, ...] | None:
        """Names of the processor's outputs besides the tokens for a text without images, if they are zeros, one a token.

        None where they are anything else, so that the processor has to be called.
        """
        names = set[str]()
        for text in ("?", "Two lines,\n and  more of them: 1,000 \u00fc."):
            try:
                processed, tokenized = (dict(f([text], return_tensors="pt")) for f in (self._processed, self.tokenizer))
            except (ValueError, TypeError):
                return None
            names = processed.keys() - tokenized.keys()
            zeros = {name: torch.zeros_like(tokenized["input_ids"]) for name in names}
            if processed.keys() != tokenized.keys() | names or not all(
                isinstance(value, torch.Tensor) and torch.equal(value, (tokenized | zeros)[name])
                for name, value in processed.items()
            ):
                return None
        return tuple(names)

    def _processed(self, text: list[str], **options: Any) -> Any:
        return self.processor(text=text, **options)

    @torch.inference_mode()
    def column(self) -> KVPool:
        """Return keys and values of a single column, after which those of all columns are shaped.

        Families state their widths in many ways. The first such pass is traced to find the modules whose outputs layers add.
        """
        pool = ColumnPool()
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        inputs = self.token_inputs(zero)
        with own_forwards(), nullcontext() if self._followed else Additions(self.layers) as additions:
            self.decoder(**inputs, position_ids=zero, use_cache=False, step=Prefill(pool, slice(0, 1)))
        if additions is not None:
            for updates, terms in zip(self._updates, additions.found, strict=True):
                updates.keep(*terms)
            known = all(updates.known for updates in self._updates) and not self.token_inputs.further  # a third update
            self._followed, self.updates_add_up = True, known
        return pool

    @cached_property
    def decode_attention(self) -> DecodeFunction | None:
        """The kernel of decode attention where the model lies on a single GPU; None where torch's own is used."""
        if self.device.type != "cuda" or len(self.devices) > 1 or self.ranks.size > 1:
            return None
        shapes = {tensor.shape for tensor in self.column().distinct}
        if len(shapes) > 1:  # the kernel is checked, and graphs hold its memory, for one
            return None
        heads = self.text_config.num_attention_heads, *shapes.pop()[1::2]
        has_sinks = any(isinstance(getattr(module, "sinks", None), torch.Tensor) for module in self.layers.modules())
        return decode_kernel(self.device, self.dtype, *heads, has_sinks)

    def rope_positions(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the rotary positions of a prompt with pictures, (axes, 1, n) on the CPU, for `embed`.

        None where the model computes them itself. Any thread may call it.
        """
        return self._geometry.rope_positions(inputs)

    def embed(
        self, inputs: Mapping[str, torch.Tensor], features: Any = None, rope: torch.Tensor | None = None
    ) -> Embedded:
        """Run the wrapper up to its decoder call and return the decoder's arguments.

        No family needs code of its own: image features, multi-axis positions and special masks are the wrapper's work.
        `features` are the result of `image_features` where images were encoded before, `rope` that of `rope_positions`.
        """
        names = [name for name in inputs if features is None or not name.startswith(PIXELS)]
        arguments: dict[str, Any] = {name: to_device(inputs[name], self.device) for name in names}
        positions = self.rope_positions(inputs) if rope is None else rope
        if positions is not None:
            arguments["position_ids"] = to_device(positions, self.device)
        if features is not None:
            arguments["mm_encoder_outputs"] = {"image": features}
        received: dict[str, Any] = {}

        def intercept(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            received.update(kwargs)
            raise _Intercepted

        handle = self.decoder.register_forward_pre_hook(intercept, with_kwargs=True)
        images, wrapper = inputs["input_ids"] == self.image_token_id, self.model.model
        try:
            ids = inputs["input_ids"], arguments["input_ids"]
            counted = nullcontext() if features is None else placeholders.counted(wrapper, *ids)
            with counted, suppress(_Intercepted):
                self.model.model(**arguments, use_cache=False)
        finally:
            handle.remove()
        if hasattr(self.model.model, "rope_deltas"):  # a wrapper keeps it between calls; here it is per sequence
            self.model.model.rope_deltas = None
        embedded = self._decoder_inputs(received, images)
        return embedded if positions is None else replace(embedded, last=int(positions.max()))

    def _decoder_inputs(self, received: dict[str, Any], images: torch.Tensor) -> Embedded:
        embeds = received.pop("inputs_embeds")
        positions = received.pop("position_ids", None)
        last = None
        if positions is None:
            positions, last = torch.arange(embeds.shape[1], device=embeds.device)[None], embeds.shape[1] - 1
        mask = self._masks.read(received.pop("attention_mask", None), embeds.shape[1], bool(images.any()))
        extras = {
            name: value
            for name, value in received.items()
            if name in self._decoder_arguments
            and value is not None
            and name not in {"input_ids", "past_key_values", "use_cache"}
        }
        by_token = {name: extras.pop(name) for name in self.token_inputs.further}
        if overlay := Overlay.find(extras, embeds.shape[1], images):
            extras = {}
        return Embedded(embeds, positions, mask, overlay, by_token, extras, last)

    def image_features(self, pictures: Mapping[str, torch.Tensor]) -> Any:
        """Encode images, given as the processor's tensors, and return the result of the wrapper's `get_image_features`."""
        return self.encoder(pictures)

    def alike(self, pictures: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        """Return what `steering.vision.geometry.Geometry.alike` does."""
        return self._geometry.alike(pictures, self.device)

    @property
    def whole_tower(self) -> Any:
        """The `whole_tower` of `Geometry`."""
        return self._geometry.whole_tower(self.device)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (..., vocabulary) in float32 of normalised hidden states (..., d), on the model's `device`."""
        return self._head(hidden).float().to(self.device)

    def head_at(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, vocabulary) of one token of each row of states (rows, n, d). at: (rows,), on the CPU."""
        return self.head(hidden[torch.arange(len(at), device=hidden.device), to_device(at, hidden.device)])

    def normalised(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return residual stream states (..., d) after the `final_norm`, as `head` takes them, on the model's `device`."""
        assert self.final_norm is not None
        return self.final_norm(hidden.to(next(self.final_norm.parameters()).device)).to(self.device)

    @cached_property
    def final_norm(self) -> nn.Module | None:
        """The decoder's one child with a number for each dimension of a state; None where there is not exactly one."""
        shape = (self.hidden_size,)
        norms = [m for m in self.decoder.children() if getattr(getattr(m, "weight", None), "shape", None) == shape]
        return norms[0] if len(norms) == 1 else None

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the output embedding for tokens (...), (..., d)."""
        weight = self.model.get_output_embeddings().weight
        if not isinstance(weight, DTensor):
            return weight[ids.to(weight.device)].to(self.device)
        local_rows = weight.to_local()  # this rank's share of the vocabulary; only the last rank's may be smaller
        place = ids - self.ranks.rank * -(-weight.shape[0] // self.ranks.size)
        is_local = (place >= 0) & (place < len(local_rows))
        return self.ranks.sum(local_rows[torch.where(is_local, place, 0)] * is_local[..., None])


def fingerprint_of(model: Any) -> str:
    """Return a hash of the text config and of a slice of every decoder layer's weights, the same in every dtype."""
    hasher, text = hashlib.sha256(), model.config.get_text_config()
    shape = {key: getattr(text, key, None) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    hasher.update(json.dumps(shape, sort_keys=True).encode())
    for layer in model.get_decoder().layers:
        for parameter in layer.parameters():
            # bfloat16 keeps the hash stable between a half-precision file loaded as such and loaded as float32.
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            sample = full.detach().flatten()[:64].to("cpu", torch.bfloat16)
            hasher.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:32]
