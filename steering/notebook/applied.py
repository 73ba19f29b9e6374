"""Interventions on a model that transformers loaded, within a block in which its `generate` is answered by an engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from steering.errors import RequestError
from steering.front.engine import Engine
from steering.front.turn import decide
from steering.interventions.steer import Steer
from steering.model.images import is_text_input
from steering.notebook.chats import Chat, SeenChats
from steering.notebook.sharing import share
from steering.prompt.layout import Prompt
from steering.protocol.forms import KIND, read
from steering.protocol.intervention_spec import InterventionSpec, Part
from steering.protocol.readout import Diagnose
from steering.protocol.request import Choice, Request, Sampling
from steering.protocol.wording import must

READ = frozenset(
    {
        "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "num_return_sequences", "eos_token_id", "pad_token_id", "return_dict_in_generate", "max_length",
    }
)  # fmt: skip
"""The settings of `generate` that are followed."""
WITHOUT_EFFECT = frozenset(
    {
        "bos_token_id", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "disable_compile",
        "compile_config", "low_memory", "remove_invalid_values", "prefill_chunk_size", "decoder_start_token_id",
        "transformers_version", "_from_model_config",
    }
)  # fmt: skip
"""Settings of `generate` that change no token here."""
TOKENS = ("inputs", "input_ids", "attention_mask")
DEFAULT_TOKENS = 20
"""The length of an answer where none is given, and transformers' `max_length` then."""
PIXELS = "pixel_"
"""The prefix of the names of the processor's tensors of images."""
OTHER_FIELDS = ("steering", "diagnostics", "states")

Options = Mapping[str, Any] | InterventionSpec | Part | Sequence[InterventionSpec | Part]


class AppliedAnswers:
    """The answers of the latest `generate` within a block. choices: in the order of its rows."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.choices: tuple[Choice, ...] = ()

    @property
    def applied(self) -> list[dict[str, Any] | None]:
        """The report of each answer's interventions."""
        return [choice.applied for choice in self.choices]

    @property
    def diagnostics(self) -> list[dict[str, Any] | None]:
        """The readouts of each answer."""
        return [choice.diagnostics for choice in self.choices]


@contextmanager
def applied(
    model: Any, processor: Any, options: Options, *, slots: int = 8, max_length: int | None = None
) -> Iterator[AppliedAnswers]:
    """Let `model.generate` answer under interventions within the block, with the numbers that a server gives.

    An engine over the same weights answers in place of the model, which stays as it is. `options` are fields of a request
    (`{"contrast": "vcd", "sage": {"see": {"alpha": 0.2}}, "diagnostics": ["focus"]}`) or interventions. In "steering" a
    vector is a `SteeringVector`, or there is a `Steer`. With "states" the choices hold the prompt's states. Prompts must be
    rendered by the processor's chat template within the block, as their messages are needed. `generate` returns token ids;
    the block's value holds everything else. `slots` sequences run at once, contrasts counting twice, each with at most
    `max_length` tokens.

    Raises RequestError for wrong options, and in `generate` for settings that are not supported; UnsupportedModel where the
    model cannot be served, or the engine's self-check fails.
    """
    template = _template(options)
    engine = Engine(share(model, processor), slots=slots, max_length=max_length, image_cache_bytes=0)
    chats, answers = SeenChats(), AppliedAnswers(engine)

    def generate(inputs: torch.Tensor | None = None, **options: Any) -> Any:
        options |= {} if inputs is None else {"inputs": inputs}
        return _Call(model, engine, template, options).answer(chats, answers)

    before = vars(model).get("generate")
    model.generate = generate
    try:
        with chats.watching(processor):
            yield answers
    finally:
        del model.generate
        if before is not None:
            model.generate = before
        engine.stop()


def _template(options: Options) -> Request:
    """Return a request with these options, and no message yet."""
    if not isinstance(options, Mapping):
        return Request([], interventions=options)
    fields = dict(options)
    steer, diagnostics, states = (fields.pop(name, None) for name in OTHER_FIELDS)
    if isinstance(contrast := fields.get("contrast"), str):
        fields["contrast"] = {KIND: contrast}
    interventions: list[InterventionSpec | Part] = [*read(fields)]
    if isinstance(steer, Mapping):
        interventions.append(_steer(**steer))
    elif steer is not None:
        interventions += [steer] if isinstance(steer, InterventionSpec | Part) else [*steer]
    if isinstance(diagnostics, Mapping):
        diagnostics = Diagnose(**diagnostics)
    return Request([], interventions=interventions, diagnose=diagnostics, states=bool(states))


def _steer(vector: Any = None, toward: str = "vision", strength: float = 1.0, **more: Any) -> Steer:
    """Return the steering that the short form of a request's field asks for."""
    for name in more:
        if name not in ("layers", "tokens"):
            raise RequestError(
                f"'steering.{name[:64]}' is unknown; allowed: vector, toward, strength, layers, tokens.",
                param=f"steering.{name[:64]}",
            )
    return Steer.to(vector, toward, strength, **more)


class _Call:
    """A single call of `generate`, with its settings as transformers resolves them."""

    def __init__(self, model: Any, engine: Engine, template: Request, options: dict[str, Any]):
        self._engine = engine
        config = options.pop("generation_config", None)
        self._config, tensors = model._prepare_generation_config(copy.deepcopy(config), **options)
        self._ids, self._mask = self._tokens(tensors)
        self._others = {name: value for name, value in tensors.items() if name not in TOKENS and value is not None}
        self._check_settings()
        self._check_tensors()
        self._template = replace(template, sampling=self._sampling(), n=self._config.num_return_sequences or 1)

    def answer(self, chats: SeenChats, answers: AppliedAnswers) -> Any:
        """Return the ids as `generate` does, and note the choices."""
        requests = self._requests(chats)
        results = self._engine.generate([decide(self._engine, request) for request in requests])
        answers.choices = tuple(choice for result in results for choice in result.choices)
        rows = [list(choice.token_ids) for choice in answers.choices]
        longest = max(map(len, rows))
        padding = self._config.pad_token_id
        fill = padding if padding is not None else next(iter(self._engine.mllm.stop_ids), 0)
        new = torch.tensor([row + [fill] * (longest - len(row)) for row in rows], device=self._ids.device)
        sequences = torch.cat([self._ids.repeat_interleave(self._template.n, 0), new.to(self._ids.dtype)], 1)
        return GenerateDecoderOnlyOutput(sequences=sequences) if self._config.return_dict_in_generate else sequences

    def _requests(self, chats: SeenChats) -> list[Request]:
        """Return the request of each row, whose prompt has the row's tokens and images."""
        pixels = {name: tensor for name, tensor in self._others.items() if name.startswith(PIXELS)}
        requests = []
        for row, mask in zip(self._ids, self._mask, strict=True):
            chat, prompt = self._chat_of(chats, row[mask.bool()].tolist(), pixels)
            pixels = {name: tensor[len(prompt.inputs.get(name, ())) :] for name, tensor in pixels.items()}
            sampling = self._template.sampling
            if not sampling.greedy:  # torch.manual_seed repeats an answer
                sampling = replace(sampling, seed=int(torch.randint(2**31, ())))
            requests.append(replace(self._template, messages=chat, sampling=sampling))
        for name, tensor in pixels.items():
            if len(tensor):
                raise RequestError(f"'{name}' holds more images than the prompts.", param=name)
        return requests

    def _chat_of(self, chats: SeenChats, ids: list[int], pixels: Mapping[str, torch.Tensor]) -> tuple[Chat, Prompt]:
        """Return the latest chat with these tokens whose images come first in `pixels`, and its prompt."""
        prompts = [(chat, chats.prompt(chat, self._prompt)) for chat in reversed(chats.complete)]
        alike = [(chat, prompt) for chat, prompt in prompts if prompt.ids.tolist() == ids]
        if not alike:
            raise RequestError(
                "A prompt of 'input_ids' is none that the processor's chat template rendered within the block, with "
                "'add_generation_prompt', or holds special tokens that its texts wrote.",
                param="input_ids",
            )
        different = ""
        for chat, prompt in alike:
            names = [name for name, tensor in pixels.items() if not _begins_with(tensor, prompt.inputs.get(name))]
            if not names:
                return chat, prompt
            different = names[0]
        raise RequestError(
            f"'{different}' differs from what the processor makes of the images without further arguments.",
            param=different,
        )

    def _prompt(self, chat: Chat) -> Prompt:
        return self._engine.inspect(Request(chat)).prompt

    @staticmethod
    def _tokens(tensors: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = tensors.get("input_ids", tensors.get("inputs"))
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise must("input_ids", "be the processor's tensor of tokens, (rows, tokens)", ids)
        mask = tensors.get("attention_mask")
        return ids, torch.ones_like(ids) if mask is None else mask

    def _check_settings(self) -> None:
        """Raise RequestError for a setting that is not followed and that would change tokens or the result."""
        defaults = {**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()}
        for name, value in self._config.to_dict().items():
            neutral = value is None or value is False or value == defaults.get(name)
            if name not in READ | WITHOUT_EFFECT and not neutral:
                raise RequestError(
                    f"'{name}' is not supported within steering.applied; got {value!r:.100}.", param=name
                )

    def _check_tensors(self) -> None:
        """Raise RequestError for arguments that are neither settings nor the processor's tensors."""
        images = getattr(self._engine.mllm.processor, "image_processor", None)
        of_images = {"image_grid_thw", "image_sizes", *getattr(images, "model_input_names", ())}
        for name, value in self._others.items():
            known = name in of_images or name.startswith(PIXELS) or is_text_input(name)
            if not known and (isinstance(value, torch.Tensor) or value not in ([], {}, False)):
                raise RequestError(f"'{name}' is not supported within steering.applied.", param=name)

    def _sampling(self) -> Sampling:
        config, stops = self._config, self._engine.mllm.stop_ids
        ends = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).flatten().tolist()
        if ends and set(ends) != stops:
            raise RequestError(f"'eos_token_id' must be the model's own, {sorted(stops)}.", param="eos_token_id")
        drawn, most = bool(config.do_sample), config.max_new_tokens
        if most is None:
            length = config.max_length or DEFAULT_TOKENS
            most = DEFAULT_TOKENS if length == DEFAULT_TOKENS else max(1, length - self._ids.shape[1])
        return Sampling(
            max_tokens=most,
            min_tokens=config.min_new_tokens or 0,
            temperature=float(config.temperature) if drawn else 0.0,
            top_k=(config.top_k or 0) if drawn else 0,
            top_p=float(config.top_p) if drawn and config.top_p is not None else 1.0,
            min_p=float(config.min_p or 0.0) if drawn else 0.0,
            repetition_penalty=float(config.repetition_penalty or 1.0),
            ignore_eos=not ends,
        )


def _begins_with(images: torch.Tensor, own: torch.Tensor | None) -> bool:
    """Return whether the first of the given images, (images, ...), are a prompt's own."""
    if own is None:
        return True
    first, own = images[: len(own)].cpu(), own.to(images.dtype)
    return first.shape == own.shape and torch.allclose(first.float(), own.float(), rtol=0, atol=1e-5)
