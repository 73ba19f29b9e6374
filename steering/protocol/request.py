"""The engine's public types: the request, its sampling options, and the answers that come back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from steering.errors import Fault, RequestError
from steering.grammar.grammar import Grammar
from steering.logprobs import PromptToken, TokenLogprob
from steering.protocol.intervention_spec import InterventionSpec, Part
from steering.protocol.messages import chat_of
from steering.protocol.readout import Diagnose
from steering.protocol.signals import Signal
from steering.protocol.wording import is_number, is_whole, must, shown, whole_numbers
from steering.timing import Timing
from steering.tools.calls import CallPiece, ToolCall
from steering.tools.tools import Tools

Interventions = Iterable["InterventionSpec | Part | Interventions | None"]
"""The values that a request accepts as interventions: single ones, presets as `Sage`, parts as `Steer`, None, or a nest."""

MAX_TOP_LOGPROBS = 20
"""Maximum number of alternatives reported for a token."""
RENDERED_BY = ("chat_template_kwargs", "continue_final_message")
"""Fields of a request, beside its messages and tools, that change how its prompt is rendered."""
MAX_TEMPLATE_KWARGS = 16_384
"""Maximum length of a chat template's variables, in characters of JSON."""
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "top_k": (-1, 1_000_000),
    "max_tokens": (1, 2**63 - 1),  # the context bounds it lower; clients mean "any" by their largest number
    "min_tokens": (0, 10_000_000),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
    "seed": (-(2**63), 2**63 - 1),
    "logit_bias": (-100.0, 100.0),
}
"""Least and greatest value of each sampling option, by its name in a request; `top_p` must be above its least."""

COLDEST = 1e-5
"""Temperature below which answers are greedy: logits divided by less overflow float32, and the same token is likeliest."""


@dataclass(frozen=True)
class Sampling:
    """Options of sampling and stopping.

    `temperature` 0, or below `COLDEST`, is greedy; `top_k` 0 or -1, `top_p` 1, `min_p` 0 are off. `logprobs` is None (off)
    or the number of alternatives (0..20) to report per token; log-probabilities are those of the model's distribution
    (interventions included; of an answer that follows a grammar, among the tokens that are possible under it), before
    temperature, penalties, bias and truncation. `prompt_logprobs` is the same for the tokens of the prompt. `stop` may be a
    single string. With `ignore_eos`, generation continues past an end token; no end token is sampled before `min_tokens`
    tokens. Raises RequestError for values out of range, see `RANGES`.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            _within(name, getattr(self, name))
        _within("top_k", self.top_k, integral=True)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        _within("min_tokens", self.min_tokens, integral=True)
        optional = {"max_tokens": self.max_tokens, "top_logprobs": self.logprobs, "seed": self.seed}
        for name, value in (optional | {"prompt_logprobs": self.prompt_logprobs}).items():
            if value is not None:
                _within(name, value, integral=True)
        if not isinstance(self.logit_bias, Mapping) or not all(is_whole(token) for token in self.logit_bias):
            raise must("logit_bias", "be a dict from numbers of tokens to what is added", self.logit_bias)
        for bias in self.logit_bias.values():
            _within("logit_bias", bias)
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise must("stop", "be a string or several of them", stop)
        if any(not text for text in stop):
            raise RequestError("'stop' must not contain an empty string.", param="stop")
        object.__setattr__(self, "stop", tuple(stop))

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is always chosen."""
        return self.temperature < COLDEST

    @cached_property
    def plain(self) -> bool:
        """True where decoding is greedy, without penalties, bias, log-probabilities or `min_tokens`."""
        penalties = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return self.greedy and self.logprobs is None and not (penalties or self.logit_bias or self.min_tokens)


def allowed(name: str, value: float) -> str:
    """Return the range of a sampling option in words, for a value outside of it."""
    low, high = RANGES[name]
    most = "" if value <= high == 2**63 - 1 else f" and at most {high}"  # a number that says little
    return f"{'above' if name == 'top_p' else 'at least'} {low}{most}"


def _within(name: str, value: Any, integral: bool = False) -> None:
    """Raise RequestError unless `value` is a number in its range."""
    low, high = RANGES[name]
    if not (is_whole(value) if integral else is_number(value)):
        raise must(name, "be a whole number" if integral else "be a number", value)
    if not low <= value <= high or (name == "top_p" and value == low):
        raise RequestError(f"'{name}' must be {allowed(name, value)}; got {shown(value)}.", param=name)


@dataclass(frozen=True)
class Request:
    """A chat with its interventions.

    `messages` follow the Hugging Face chat format: `{"role", "content"}` where content is a string or a list of parts
    `{"type": "text", "text": str, "span": "context" (optional)}` and `{"type": "image", "image": ...}`, a PIL image, the
    path of a file or its bytes; files are opened at once. Beside "image", `min_pixels` and `max_pixels` bound the size to
    which the processor scales it, where it bounds pixels (Qwen-VL). `interventions` act inside the model; each may be given
    once, and a preset, as `Sage`, may stand for several. `diagnose` asks for readouts: a `Diagnose`, True for the cheap
    ones, or a list of names. `n` answers are generated; `baseline` adds, in the same batch, each answer without
    interventions; `states` returns the residual stream after each layer at one of the prompt's tokens, counted from its end
    (`state_position`, -1 the last one), and the distribution of the answer's first token; `divergence` how far the updates
    of every prompt token diverge in each layer (see `interventions.think`). `forced` tokens are generated whatever the model
    predicts, so that their log-probabilities can be read; a forced text is an existing answer, which ends where the text
    ends, or with `ignore_eos` is cut there. A `reply` is read, not generated: the prompt ends with it, as the model's
    template renders an answer to the chat, and its tokens' log-probabilities come from the prefill. A `max_tokens` that does
    not fit is refused; `clamp` shortens it to what fits, and `Completion.max_tokens` holds the result. The engine reuses the
    prompt's cached prefix only for requests with the same `cache_salt`. An answer follows `grammar`, if given. It may, or
    must, call `tools`; its calls are in `Choice.tool_calls`. `chat_template_kwargs` are variables that the model's chat
    template reads, such as `enable_thinking`; others are refused. With `continue_final_message` the answer continues the
    last message, a text of the assistant's.

    Raises RequestError, which names what is wrong in `param`; what depends on the model is checked when it is submitted.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling = field(default_factory=Sampling)
    interventions: Interventions | InterventionSpec | Part = ()
    diagnose: Diagnose | Iterable[str] | bool | None = None
    n: int = 1
    baseline: bool = False
    states: bool = False
    state_position: int = -1
    divergence: bool = False
    forced: tuple[int, ...] | str = ()
    reply: str | None = None
    clamp: bool = False
    grammar: Grammar | None = None
    tools: Tools | None = None
    cache_salt: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals that the request asks for beside those that its interventions and readouts need."""
        needs = {
            Signal.PROMPT_STATE: self.states, Signal.DIVERGENCE: self.divergence, Signal.REPLY: self.reply is not None,
            Signal.PROMPT_LOGPROBS: self.sampling.prompt_logprobs is not None,
        }  # fmt: skip
        return frozenset(signal for signal, needed in needs.items() if needed)

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", chat_of(self.messages))
        if not isinstance(self.sampling, Sampling):
            raise must("sampling", "be a Sampling", self.sampling)
        object.__setattr__(self, "diagnose", _diagnose(self.diagnose))
        for name, value in (("n", self.n), ("state_position", self.state_position)):
            if not is_whole(value):
                raise must(name, "be a whole number", value)
        if not isinstance(self.forced, str):
            object.__setattr__(self, "forced", whole_numbers("forced", self.forced))
        if not isinstance(self.reply, str | None):
            raise must("reply", "be a string", self.reply)
        if not isinstance(self.cache_salt, str):
            raise must("cache_salt", "be a string", self.cache_salt)
        _check_grammar(self)
        _check_template(self)
        specs: list[InterventionSpec] = []
        parts: dict[type[Part], list[Part]] = {}
        for member in _each(self.interventions):
            if isinstance(member, Part):
                parts.setdefault(type(member), []).append(member)
            else:
                specs.append(member)
        by_name: dict[str, InterventionSpec] = {}
        for intervention in (*specs, *(kind.together(some) for kind, some in parts.items())):
            if intervention.name() in by_name:
                raise RequestError(f"'{intervention.name()}' may be asked for once.", param=intervention.name())
            by_name[intervention.name()] = intervention
        object.__setattr__(self, "interventions", tuple(by_name.values()))

    @cached_property
    def asked(self) -> dict[str, InterventionSpec]:
        """The interventions by name."""
        return {
            intervention.name(): intervention
            for intervention in _each(self.interventions)
            if isinstance(intervention, InterventionSpec)
        }

    @cached_property
    def chat(self) -> Sequence[Mapping[str, Any]]:
        """The messages as the model reads them, with the texts that interventions insert."""
        messages = self.messages
        for intervention in self.asked.values():
            messages = intervention.chat(messages)
        return messages

    @property
    def readouts(self) -> Diagnose | None:
        """The requested readouts and their options; None where there are none."""
        return self.diagnose if isinstance(self.diagnose, Diagnose) else None


def _check_grammar(request: Request) -> None:
    """Raise RequestError where a grammar, or a required tool call, is combined with an option that excludes it."""
    grammar, tools = request.grammar, request.tools
    for name, value, kind in (("grammar", grammar, Grammar), ("tools", tools, Tools)):
        if not isinstance(value, kind | None):
            raise must(name, f"be a {kind.__name__}", value)
    against = {"force": request.forced, "reply": request.reply is not None, "ignore_eos": request.sampling.ignore_eos}
    params = [grammar.param] if grammar is not None else ["tool_choice"] if tools is not None and tools.required else []
    for param in params:
        if tools is not None and tools.required and grammar is not None:
            raise RequestError(f"'{param}' and a required call exclude one another.", param="tool_choice")
        for name, present in against.items():
            if present:
                raise RequestError(f"'{param}' and '{name}' exclude one another.", param=name)


def _check_template(request: Request) -> None:
    """Raise RequestError where the template's variables are not JSON or too large, or no final text can be continued."""
    variables = request.chat_template_kwargs
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise must("chat_template_kwargs", "be a dict of what the chat template reads, by name", variables)
    try:
        size = len(json.dumps(dict(variables), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"'chat_template_kwargs' must be JSON: {error}.", param="chat_template_kwargs") from error
    if size > MAX_TEMPLATE_KWARGS:
        raise RequestError(
            f"'chat_template_kwargs' may have at most {MAX_TEMPLATE_KWARGS} characters as JSON; got {size}.",
            param="chat_template_kwargs",
        )
    if not request.continue_final_message:
        return
    last = request.messages[-1] if request.messages else {}
    content = last.get("content") or ""
    text = content if isinstance(content, str) else content[-1].get("text")
    if last.get("role") != "assistant" or last.get("tool_calls") or not text:
        raise RequestError(
            "'continue_final_message' needs a last message of the assistant that ends with a text.",
            param="continue_final_message",
        )
    if request.reply is not None:
        raise RequestError("'continue_final_message' and 'reply' exclude one another.", param="reply")


def _each(value: Any) -> Iterator[InterventionSpec | Part]:
    if isinstance(value, InterventionSpec | Part):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        for member in value:
            yield from _each(member)
    elif value is not None:
        if isinstance(value, type) and issubclass(value, InterventionSpec | Part):
            raise RequestError(
                f"'interventions' must be interventions; got the class {value.__name__}, of which one is made by "
                f"{value.__name__}(...).",
                param="interventions",
            )
        raise must("interventions", "be interventions such as Steer, See or Sage", value)


def _diagnose(value: Any) -> Diagnose | None:
    if value is None or value is False or isinstance(value, Diagnose):
        return value or None
    if value is True:
        return Diagnose()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise must("diagnose", "be True, a list of readouts or a Diagnose", value)
    return Diagnose(value)  # which accepts any iterable, and names what is wrong in it


@dataclass(frozen=True)
class Choice:
    """A finished answer, whose text leaves out its tool calls.

    `finish_reason` is "stop", "length" or "tool_calls"; `stop_string` ended it, if any. `prompt_logprobs` are those of the
    prompt's tokens from the second one on. `guard` reports the tries of a guarded answer. `applied` and `diagnostics` follow
    the wire protocol. `measured` holds captured tensors on the CPU, by recorder and intervention; `timing` holds its times.
    `reasoning_tokens` are its first tokens up to the tag that ends the model's reasoning, tags included.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    applied: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    baseline: Choice | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    timing: Timing | None = field(default=None, compare=False)
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    prompt_logprobs: tuple[PromptToken, ...] | None = None
    guard: dict[str, Any] | None = None
    reasoning_tokens: int = 0

    @property
    def states(self) -> torch.Tensor | None:
        """The residual stream after each layer at the requested token of the prompt, (layers, d) float32."""
        return self._of("prompt_state", "states")

    @property
    def next_logprobs(self) -> torch.Tensor | None:
        """The log-probabilities (nats) of the first token, before sampling, (vocabulary,); present with the states."""
        return self._of("prompt_state", "next_logprobs")

    @property
    def divergence(self) -> torch.Tensor | None:
        """The divergence in nats, (layers, prompt tokens); see `interventions.think`."""
        return self._of("sage.think", "divergence")

    @property
    def answer_states(self) -> torch.Tensor | None:
        """The states of the answer, (2, layers, d), where drift or residual is read out.

        As `states`: the mean over the rows that generated the answer's tokens, and at the last of them.
        """
        return self._of("residual", "states")

    @property
    def reply_logprobs(self) -> torch.Tensor | None:
        """The log-probabilities (nats) of the reply's tokens, (tokens,) float32."""
        value: torch.Tensor | None = self.measured.get("reply")
        return value

    def _of(self, name: str, tensor: str) -> torch.Tensor | None:
        value: torch.Tensor | None = getattr(self.measured.get(name), tensor, None)
        return value


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer; the last piece of a choice carries the finished `choice`."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: Choice | None = None
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True)
class Result:
    """A finished request: its choices in order of index, and token counts without baselines.

    `cached_tokens` are the prompt's tokens that came from a cache, `reasoning_tokens` those of all choices.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @classmethod
    def of(cls, choices: Mapping[int, Choice], n: int, prompt_tokens: int, cached_tokens: int) -> Result:
        """Return the result of `n` choices by index; raise Fault where some of them never came."""
        if len(choices) < n:
            raise Fault("The request was cancelled.")
        generated = sum(len(choice.token_ids) for choice in choices.values())
        reasoned = sum(choice.reasoning_tokens for choice in choices.values())
        ordered = tuple(choices[index] for index in sorted(choices))
        return cls(ordered, prompt_tokens, generated, cached_tokens, reasoned)
