"""The body of a request for one answer, as the contract has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

Runs = list[tuple[StrictInt, Annotated[StrictInt, Field(ge=0)]]]
Ranges = list[tuple[Annotated[StrictInt, Field(ge=0)], Annotated[StrictInt, Field(ge=0)]]]


class Strict(BaseModel):
    """Fields of a body; unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PromptBody(Strict):
    """A prompt: ids with each image as its placeholder, and the hash of the ids that it expands to."""

    ids: list[StrictInt]
    length: Annotated[StrictInt, Field(ge=1)]
    """The number of tokens of the expanded prompt, without forced ones."""
    sha256: str
    """The hash of the expanded prompt's ids, without forced ones, as little-endian int32."""
    classes: Runs = []


class SamplingBody(Strict):
    """Sampling, as vLLM's `SamplingParams` names it."""

    max_tokens: Annotated[StrictInt, Field(ge=1)]
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: list[str] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None


class AttentionBody(Strict):
    """The attention that is summed."""

    labels: Runs
    rows: dict[Literal["question", "modality", "anchor"], Ranges] = {}
    steps: StrictBool = False


class VectorBody(Strict):
    """A vector, and the tokens that it is added to."""

    name: str
    digest: str
    scale: float
    layers: list[Annotated[StrictInt, Field(ge=0)]]
    classes: list[Annotated[StrictInt, Field(ge=0)]]
    generated: StrictBool


class SteeringBody(Strict):
    """Steering: the number of classes of prompt tokens, and the vectors."""

    classes: Annotated[StrictInt, Field(ge=1, le=64)]
    vectors: list[VectorBody]


class ThinkBody(Strict):
    """Think's damping: gamma, and the threshold of each layer in nats."""

    gamma: float
    thresholds: list[float]


class ResidualBody(Strict):
    """The residual stream's means."""

    rows: str = "answer"
    updates: StrictBool = False


class NoiseBody(Strict):
    """VCD's noise: a step of forward diffusion, and a seed for each image."""

    step: Annotated[StrictInt, Field(ge=0, lt=1000)]
    seeds: list[StrictInt]


class RuleBody(Strict):
    """The formula of a contrast."""

    weight: float
    relu: StrictBool = False
    plausible: float = 0.0


class MaskBody(Strict):
    """Generate's masks: the share of patches that each map nominates, and the columns of each picture's tokens.

    refresh: a mask is rebuilt after so many tokens, 0 for never. layers: those whose attention counts.
    """

    top: Annotated[float, Field(gt=0, lt=1)]
    refresh: Annotated[StrictInt, Field(ge=0)] = 0
    images: list[list[Annotated[StrictInt, Field(ge=0)]]]
    layers: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)]


class TwinBody(Strict):
    """The other prompt of a contrast."""

    rule: RuleBody
    prompt: PromptBody | None = None
    noise: NoiseBody | None = None
    mask: MaskBody | None = None


class AnswerBody(Strict):
    """The body of one answer."""

    prompt: PromptBody
    images: list[str] = []
    size: dict[str, Any] | None = None
    sampling: SamplingBody
    seed: StrictInt | None = None
    stream: StrictBool = True
    salt: str = ""
    attention: AttentionBody | None = None
    state_position: Annotated[StrictInt, Field(lt=0)] | None = None
    residual: ResidualBody | None = None
    steering: SteeringBody | None = None
    think: ThinkBody | None = None
    twin: TwinBody | None = None
    fed: Annotated[StrictInt, Field(ge=0)] | None = None
    """The number of tokens behind the prompt that readings count, where forced ones are the whole answer."""
