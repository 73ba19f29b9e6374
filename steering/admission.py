"""Whether a request fits the model and the engine; whatever can be refused is refused here, in the client's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steering.diagnostics.options import MAX_VALUES, Diagnose
from steering.errors import ContextOverflow, Fault, RequestError, VectorError, panics_raise
from steering.interventions.contrast import Contrast, Icd, Pai
from steering.interventions.sage import Sage
from steering.interventions.steer import Steer
from steering.layout import Layout, Prompt, build_prompt
from steering.mllm import MLLM
from steering.request import Request

LEAST_CHARACTERS = 16
LEAST_PARTS = 1024
USUAL_CHARACTERS = 4
"""Characters a token that ordinary text has; a prompt of more is counted before it is laid out."""
PIECE = 32_768
"""Characters that are counted at a time."""


@dataclass(frozen=True)
class Admitted:
    """What becomes of a request: its prompt and its twin's where it has a published contrast; how many tokens may be
    generated; (layers,) thresholds of the divergence where it thinks."""

    prompt: Prompt
    twin_prompt: Prompt | None
    max_tokens: int
    thresholds: torch.Tensor | None


@dataclass(frozen=True)
class TextBounds:
    """How much text one request may hold, which is checked before anything is done with it.

    `characters` of all texts: those of as many tokens as the context has, each as long as the longest one there is, so that
    what is refused could not have fitted. `parts`: as many texts as the context has tokens; empty ones take none of it, but
    their time.
    """

    tokens: int
    characters: int
    parts: int

    @classmethod
    def of(cls, mllm: MLLM, max_length: int) -> TextBounds:
        """The bounds of a model whose prompt and answer have at most `max_length` tokens."""
        return cls(max_length, max_length * max(mllm.longest_token, LEAST_CHARACTERS), max(max_length, LEAST_PARTS))

    def check(self, texts: Sequence[str]) -> None:
        """Raise RequestError unless these texts are within the bounds."""
        if len(texts) > self.parts:
            raise RequestError(
                f"The messages may hold at most {self.parts} texts; got {len(texts)}.",
                param="messages",
                code="too_many_parts",
            )
        if (characters := sum(map(len, texts))) > self.characters:
            raise RequestError(
                f"This model's maximum context length is {self.tokens} tokens. However, the texts of your messages have "
                f"{characters} characters; at most {self.characters} are taken. Please reduce the length of the messages.",
                param="messages",
                code="context_length_exceeded",
            )


def texts_of(request: Request) -> list[str]:
    """Every text of a request that is tokenised."""
    contents = [message["content"] for message in request.messages]
    texts = [
        text
        for content in contents
        for text in ([content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"])
    ]
    more = [request.contrast.instruction] if isinstance(request.contrast, Icd) else []
    return [*texts, *more, *([] if request.reply is None else [request.reply])]


def _count_ahead(mllm: MLLM, texts: Sequence[str], max_length: int, max_tokens: int | None) -> None:
    """Raise ContextOverflow for texts of twice the tokens that the context has, without reading on from there.

    Cutting the texts changes the count by a few tokens a cut; what is nearer to the limit is counted by the prompt itself.
    """
    if sum(map(len, texts)) <= USUAL_CHARACTERS * max_length:
        return
    tokens = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            encoding = mllm.tokenizer.backend_tokenizer.encode(text[start : start + PIECE], add_special_tokens=False)
            tokens += sum(encoding.attention_mask)  # 0 where a processor left padding switched on
            if tokens > 2 * max_length:
                raise ContextOverflow(max_length, tokens + (max_tokens or 1), tokens, at_least=True)


def admit(mllm: MLLM, request: Request, max_length: int, max_images: int) -> Admitted:
    """Tokenise and check a request; raises RequestError, ContextOverflow or VectorError when it is wrong, Fault when a
    library panics over it."""
    with panics_raise(lambda panic: Fault(f"The request could not be prepared: {panic}")):
        texts = texts_of(request)
        TextBounds.of(mllm, max_length).check(texts)
        _count_ahead(mllm, texts, max_length, request.sampling.max_tokens)
        return _admit(mllm, request, max_length, max_images)


def _admit(mllm: MLLM, request: Request, max_length: int, max_images: int) -> Admitted:
    prompt = build_prompt(mllm, request.messages, request.reply)
    max_tokens = _room(request, prompt, max_length)
    images = len(prompt.layout.images)
    if images > max_images:
        raise RequestError(f"A request may hold at most {max_images} images; got {images}.", param="messages")
    if any(not 0 <= token < mllm.vocab_size for token in request.sampling.logit_bias):
        raise RequestError(f"'logit_bias' tokens must be from 0 to {mllm.vocab_size - 1}.", param="logit_bias")
    if not -prompt.length <= request.state_position <= -1:
        raise RequestError(
            f"'state_position' must be from {-prompt.length} to -1, counted from the prompt's end; got "
            f"{request.state_position}.",
            param="state_position",
        )
    for steer in request.steering:
        check_steer(mllm, steer, images)
    _check_diagnose(mllm, request.diagnose, prompt.layout, max_tokens)
    if request.sage is not None:
        _check_sage(mllm, request.sage, prompt)
    twin_prompt = None
    if request.contrast is not None:
        _check_contrast(mllm, request.contrast, request.sage, images)
        twin_prompt = request.contrast.twin(mllm, request.messages, prompt)
        max_tokens = min(max_tokens, _room(request, twin_prompt, max_length))
    return Admitted(prompt, twin_prompt, max_tokens, _thresholds(mllm, request.sage))


def _room(request: Request, prompt: Prompt, max_length: int) -> int:
    """How many tokens may be generated after a prompt, that of the request or its twin's."""
    room = max_length - prompt.length
    asked = request.sampling.max_tokens
    if room < 1 or (asked is not None and asked > room):
        raise ContextOverflow(max_length, prompt.length + (asked or 1), prompt.length)
    return room if asked is None else asked


def _thresholds(mllm: MLLM, sage: Sage | None) -> torch.Tensor | None:
    """(layers,) thresholds of the divergence, None where the request does not think."""
    if sage is None or sage.think is None:
        return None
    think = sage.think
    if think.threshold is not None:
        return torch.full((mllm.num_layers,), think.threshold)
    thresholds = None if mllm.calibration is None else mllm.calibration.thresholds(think.quantile)
    if thresholds is None:
        raise RequestError(
            f"{mllm.name} was not calibrated for 'sage.think'; give 'sage.think.threshold', or run "
            "'helmsight probe --calibrate-sage' on it.",
            param="sage.think.threshold",
        )
    return thresholds


def check_steer(mllm: MLLM, steer: Steer, images: int | None = None) -> None:
    """Raise VectorError or RequestError unless a vector can be added to the states of a model, whose prompt has `images`
    images; None where the prompt is not known."""
    if steer.vector.fingerprint != mllm.fingerprint:
        raise VectorError(
            f"Steering vector {steer.vector.name!r} was made for a model with fingerprint {steer.vector.fingerprint[:64]}; "
            f"this one has {mllm.fingerprint}.",
            param="steering.vector",
            code="wrong_model",
        )
    shape = (mllm.num_layers, mllm.hidden_size)
    if steer.vector.direction.shape != shape:
        raise VectorError(
            f"Steering vector {steer.vector.name!r} has shape {tuple(steer.vector.direction.shape)}; this model needs "
            f"{shape}, layers by width.",
            param="steering.vector",
            code="wrong_shape",
        )
    if images is not None and steer.image is not None and steer.image > images:
        raise RequestError(
            f"'steering.apply.tokens' is {steer.tokens!r}, but the request holds {images} images.",
            param="steering.apply.tokens",
        )


def _check_diagnose(mllm: MLLM, diagnose: Diagnose | None, layout: Layout, max_tokens: int) -> None:
    if diagnose is None:
        return
    images = len(layout.images)
    if diagnose.target_image is not None and diagnose.target_image > images:
        raise RequestError(
            f"'diagnostics.target_image' is {diagnose.target_image}, but the request holds {images} images.",
            param="diagnostics.target_image",
        )
    if diagnose.discount_sinks and (mllm.calibration is None or mllm.calibration.sinks is None):
        raise RequestError(
            f"{mllm.name} was not calibrated for 'diagnostics.discount_sinks'; run 'helmsight probe --calibrate-sinks' on "
            "it.",
            param="diagnostics.discount_sinks",
        )
    values = diagnose.values(mllm.num_layers, len(layout.image_columns), max_tokens)
    if values > MAX_VALUES:
        raise RequestError(
            f"'diagnostics' may return at most {MAX_VALUES} numbers in maps, and this request could need {values}: ask for "
            "fewer readouts, fewer layers or fewer 'max_tokens'.",
            param="diagnostics",
            code="too_many_maps",
        )


def _check_sage(mllm: MLLM, sage: Sage, prompt: Prompt) -> None:
    images = prompt.layout.images
    for name, stage in (("see", sage.see), ("generate", sage.generate)):
        if stage is not None and not images:
            raise RequestError(f"'sage.{name}' needs an image in the request.", param=f"sage.{name}")
    if sage.see is not None:
        sage.see.depth(mllm.num_layers)
    if sage.generate is not None and any(image.tokens < 2 for image in images):
        raise RequestError("'sage.generate' cannot mask an image that is a single token.", param="sage.generate")


def _check_contrast(mllm: MLLM, contrast: Contrast, sage: Sage | None, images: int) -> None:
    if sage is not None and sage.generate is not None:
        raise RequestError(
            "'contrast' and 'sage.generate' both contrast an answer with a twin; ask for one of them.",
            param="contrast",
        )
    if contrast.needs_image and not images:
        raise RequestError(f"'contrast' of kind {contrast.kind} needs an image in the request.", param="contrast")
    if isinstance(contrast, Pai) and contrast.first_layer >= mllm.num_layers:
        raise RequestError(
            f"'contrast.first_layer' must be below {mllm.num_layers}, the model's layers; got {contrast.first_layer}.",
            param="contrast.first_layer",
        )
