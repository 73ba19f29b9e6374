"""The schemas of the catalogue, the vectors and the probes, for the API document."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from server.images.samples import Sample
from server.wire.sent.answers import AnswerBody, Object, SkippedField, SteerSettings


class RequestLimits(AnswerBody):
    """The limits of one request to this server."""

    slots: int
    """Answers that are generated at the same time."""
    waiting: int
    """Answers that may wait for a slot."""
    choices: int
    """Largest `n`."""
    characters: int
    texts: int
    images: int
    image_bytes: int
    image_pixels: int
    image_side: int
    """Largest width and height of an image in pixels."""
    image_ratio: int
    """Largest ratio of an image's longer side to its shorter one."""
    request_pixels: int
    body_bytes: int
    strength: float
    strength_unit: Literal["published"]
    vectors: int
    seconds: float
    """Longest time of one answer in seconds."""
    remote_images: bool
    uploads: bool
    vector_bytes: int
    uploaded_vectors: int


class InterventionCard(AnswerBody):
    """An available intervention."""

    name: str
    path: list[str]
    """The place in a request and in `applied`."""
    kind: str | None
    """The kind that distinguishes interventions of the same path."""
    twin: bool
    """True if it contrasts an answer with a twin; a request may have only one such intervention."""
    vectors: bool
    """True if its options name steering vectors."""
    options: Object = Field(serialization_alias="schema")
    """The JSON schema of its options."""


class QuantityCard(AnswerBody):
    """The meaning of a number: its unit ("" for a ratio), its range (null: unbounded), the bounds of its histogram."""

    about: str
    unit: str
    low: float | None
    high: float | None
    buckets: list[float]


class ReadoutCard(AnswerBody):
    """A readout of this server."""

    name: str
    available: bool
    """False if its values are null because the model has no calibration for it."""
    cheap: bool
    """True if `"diagnostics": true` includes it."""
    own_key: bool
    """True if it has a key of its own in the diagnostics."""
    scalars: dict[str, Literal["number", "integer", "boolean"]]
    """The numbers that journal and metrics keep of it."""
    quantities: dict[str, QuantityCard]
    """Descriptions of those of them that are floats."""


class ConditionCard(AnswerBody):
    """A number that a guard's condition may be about."""

    name: str
    readout: str
    type: Literal["number", "boolean"]
    """boolean: compared with true or false. number: compared by a sign and a number."""
    available: bool
    """False if the number is null, so that no condition on it holds, because the model has no calibration for it."""


class GuardCard(AnswerBody):
    """The conditions, interventions and retries that a request's `guard` may have."""

    conditions: list[ConditionCard]
    signs: list[str]
    then: list[str]
    """The fields that `then` may have."""
    max_conditions: int
    max_retries: int


class PartCard(AnswerBody):
    """Something that is measured once for a model."""

    part: str
    there: bool
    """True if it was measured for this model."""
    serves: str
    """The features that use it."""
    without: str
    """What they do while it is missing."""
    command: str
    """The command that measures it; `helmsight prepare` measures all that is missing."""


class ModelCard(AnswerBody):
    """The model of this server with its features and limits."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    endpoints: list[str]
    """The routes that chats go to, one for each protocol."""
    fingerprint: str
    """Identifies the model for which vectors are made."""
    layers: int
    hidden_size: int
    context_length: int
    """Largest number of tokens of a prompt and its answer together."""
    device: str
    dtype: str
    quantization: str | None
    """"int8" if the language model's layers compute in integers; null if they compute in `dtype`."""
    engine: str
    """The engine that runs the model: "own", or the name and version of another one."""
    unsupported: list[str]
    """The interventions, and the readouts as "diagnostics.NAME", that this engine lacks; requests for them are refused."""
    compiled: bool
    """True if decode steps currently run compiled."""
    image_size: tuple[int, int] | None
    """Width and height that every image is resized to; null if images keep their own."""
    image_pixels: tuple[int, int] | None
    """The default least and most pixels of an image, if a request may set others; null if not."""
    chat_template_kwargs: list[str]
    """The variables that a request may pass to the model's chat template."""
    vectors: list[str]
    """Names of the steering vectors that were made for it."""
    interventions: list[InterventionCard]
    readouts: list[str]
    readout_schemas: list[ReadoutCard]
    guard: GuardCard
    prepared: list[PartCard]
    """What was measured for this model, and what was not."""
    limits: RequestLimits


class PresetCard(AnswerBody):
    """A preset, which is requested as a model of its own."""

    id: str
    """The model's name, an `@` and the preset's name."""
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The model's own name."""
    parent: str
    preset: str
    fields: Object
    """The request fields that it sets."""
    lacks: list[str]
    """What its interventions do without, because it was not measured for this model."""
    origin: Literal["built-in", "settings"]


class ModelList(AnswerBody):
    """The one model of this server in OpenAI's list, followed by its presets."""

    object: Literal["list"]
    data: list[ModelCard | PresetCard]


class VectorCard(AnswerBody):
    """A steering vector without its numbers."""

    object: Literal["steering.vector"]
    name: str
    digest: str
    """A hash of the vector and of what its strengths mean."""
    kind: str
    positive: Literal["text", "vision"] | None
    """The modality that a positive scale pushes toward; null for a vector that is no modality preference."""
    layers: list[int]
    published: float | None
    """Strength 1 in published units."""
    fingerprint: str
    """The fingerprint of the model that it was made for."""
    info: Object
    """The details of how it was made."""
    matches: bool
    """True if it was made for this server's model."""


class DamagedVector(AnswerBody):
    """A file that holds no valid steering vector."""

    object: Literal["steering.vector"]
    name: str
    error: str


class DictionaryCard(AnswerBody):
    """A sparse dictionary, whose features are vectors by the name `sae:NAME/FEATURE`."""

    name: str
    layer: int
    """The layer after which it reads the residual stream, from 0."""
    width: int
    features: int
    """Their number; they are counted from 0."""
    architecture: str
    model: str | None
    """The model that it was trained on, as its file says."""
    matches: bool
    """Whether its layer and width are those of the served model."""


class DamagedDictionary(AnswerBody):
    """A sparse dictionary that cannot be used."""

    name: str
    error: str


class ListOfVectors(AnswerBody):
    """All vectors of the server."""

    object: Literal["list"]
    data: list[VectorCard | DamagedVector]
    dictionaries: list[DictionaryCard | DamagedDictionary]


class DeletedVector(AnswerBody):
    """A deleted vector."""

    name: str
    object: Literal["steering.vector"]
    deleted: Literal[True]


class AddedAtLayer(AnswerBody):
    """The addition of a vector at one layer."""

    layer: int
    norm: float
    """|c w v|."""
    largest: float
    """The largest element."""
    relative: float | None
    """The mean element in units of the difference that the probe measured."""


class PlannedSteer(SteerSettings):
    """The planned effect of one vector."""

    calibrated_range: tuple[float, float] | None
    """The least and the greatest strength that calibration measured."""
    added: list[AddedAtLayer]


class DryRunReport(AnswerBody):
    """The settings that a request asks for, and those that would be applied."""

    object: Literal["steering.validation"]
    model: str
    steering: list[PlannedSteer]
    interventions: Object
    """The settings of the other interventions, arranged as in `applied`."""
    diagnostics: Object | None
    """The readouts (`include`) and those of their options that are set; null for none."""
    baseline: bool
    n: int
    force: bool
    """True if the answer is given (`force`)."""
    grammar: bool
    """True if the answer must follow a grammar, which is compiled only for an answer."""
    tools: list[str]
    """The names of the functions that the answer may call."""
    sampling: Object
    """The sampling values, with the checkpoint's defaults."""
    prompt_tokens: int | None
    """The length of the prompt; null without messages, or if an image would have to be fetched."""
    max_tokens: int | None
    """The longest possible answer in tokens; null without messages."""
    preset: str | None = None
    """The preset that the request named."""
    skipped: list[SkippedField] | None = None
    """The parts of a preset, or of a request with `"strict": false`, that did not apply."""
    ignored: list[str] | None = None
    """The paths of the request's fields that nothing reads; absent if there are none."""


class Health(AnswerBody):
    """The state of the process: "failed" once it is not worth keeping."""

    status: Literal["ok", "failed"]


class JournalState(AnswerBody):
    """The state of the journal."""

    state: Literal["off", "ok", "failing"]
    written: int | None = None
    dropped: int | None = None
    waiting: int | None = None
    reason: str | None = None
    error: str | None = None


class LoadingProgress(AnswerBody):
    """The progress of loading."""

    stage: str
    share: float | None
    """The completed share of the stage, from 0 to 1; null if unknown."""
    seconds: float
    """Seconds since the start."""


class Readiness(AnswerBody):
    """The state of the service: whether requests are served."""

    status: Literal["ready", "loading", "draining", "failed"]
    journal: JournalState
    """The state of the journal; it does not change the status, since answers need no journal."""
    progress: LoadingProgress | None = None
    """The progress while the model loads."""


class SampleList(AnswerBody):
    """The sample scenes in the model's folder; `/samples/{name}` has their images."""

    object: Literal["list"]
    data: list[Sample]


class SelfCheck(AnswerBody):
    """The comparison of the engine with the plain model at load."""

    steps: int
    """Number of generated tokens."""
    tolerance: float | None
    """In float32: the largest difference of logits, relative to the largest logit."""
    margin: float | None
    """In half precision: the allowed distance from float32, as a multiple of the plain model's."""


class MeasuredFor(AnswerBody):
    """The calibrated values of the model by purpose; null for those not measured."""

    digest: str | None
    """A hash of all calibrated numbers; null if there are none."""
    think: Object | None
    sinks: Object | None
    surprise: Object | None
    flags: Object | None
    alarm: Object | None


class About(AnswerBody):
    """Details of the model beyond its card."""

    object: Literal["model.about"]
    families: list[str]
    """Types of models that the engine is tested with."""
    architecture: str | None = None
    family: str | None = None
    vocabulary: int | None = None
    focus_layers: int | None = None
    """Number of last layers that the focus metrics use."""
    attention_layers: list[int] | None = None
    """The layers with softmax attention, of which readouts of attention are; hybrids have others, too."""
    generation_defaults: Object | None = None
    self_check: SelfCheck | None = None
    calibration: MeasuredFor | None = None
