"""What the catalogue, the vectors and the probes say, for the document of the API."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from server.images.samples import Sample
from server.wire.answers import AnswerBody, Object, SkippedField, SteerSettings


class RequestLimits(AnswerBody):
    """What one request may ask of this server."""

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
    """Pixels that a picture may be wide or high."""
    image_ratio: int
    """Of its longer side to its shorter one."""
    request_pixels: int
    body_bytes: int
    strength: float
    strength_unit: Literal["published"]
    vectors: int
    seconds: float
    """That one answer may take."""
    remote_images: bool
    uploads: bool
    vector_bytes: int
    uploaded_vectors: int


class InterventionCard(AnswerBody):
    """An intervention that can be asked for."""

    name: str
    path: list[str]
    """Where it stands in a request and in `applied`."""
    kind: str | None
    """Which one of several with one path."""
    twin: bool
    """Of these a request may have one."""
    options: Object = Field(serialization_alias="schema")
    """The JSON schema of its options."""


class ReadoutCard(AnswerBody):
    """A readout that can be asked for."""

    name: str
    cheap: bool
    """Whether `"diagnostics": true` asks for it."""
    own_key: bool
    """Whether it has a key of its own in the diagnostics."""
    scalars: dict[str, Literal["number", "integer", "boolean"]]
    """The numbers that journal and metrics keep of it."""


class ModelCard(AnswerBody):
    """The model of this server, what can be asked of it, and within which limits."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    fingerprint: str
    """Tells models apart for which vectors are made."""
    layers: int
    hidden_size: int
    context_length: int
    """Tokens of a prompt and its answer together."""
    device: str
    dtype: str
    quantization: str | None
    """"int8" where the language model's layers compute in integers; null where in `dtype`."""
    compiled: bool
    """Whether decode steps run compiled by now."""
    image_size: tuple[int, int] | None
    """Width and height that every picture is brought to; null where they keep their own."""
    image_pixels: tuple[int, int] | None
    """The least and the most pixels that pictures are brought to, where a request may state others; null where not."""
    chat_template_kwargs: list[str]
    """What a request may tell the model's chat template."""
    vectors: list[str]
    """Names of the steering vectors that were made for it."""
    interventions: list[InterventionCard]
    readouts: list[str]
    readout_schemas: list[ReadoutCard]
    limits: RequestLimits


class PresetCard(AnswerBody):
    """A preset, which is asked for as a model of its own."""

    id: str
    """The name of the model, an `@` and that of the preset."""
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The model's own name."""
    parent: str
    preset: str
    fields: Object
    """What it stands for in a request."""
    origin: Literal["built-in", "settings"]


class ModelList(AnswerBody):
    """The one model of this server in OpenAI's list, and behind it its presets."""

    object: Literal["list"]
    data: list[ModelCard | PresetCard]


class VectorCard(AnswerBody):
    """A steering vector without its numbers."""

    object: Literal["steering.vector"]
    name: str
    kind: str
    positive: Literal["text", "vision"] | None
    """The modality that a positive scale pushes toward; null for a vector that is no modality preference."""
    layers: list[int]
    published: float | None
    """What strength 1 is in published units."""
    fingerprint: str
    """The model's that it was made for."""
    info: Object
    """How it was made."""
    matches: bool
    """Whether it was made for this server's model."""


class DamagedVector(AnswerBody):
    """A file that holds no steering vector."""

    object: Literal["steering.vector"]
    name: str
    error: str


class ListOfVectors(AnswerBody):
    """All vectors of the server."""

    object: Literal["list"]
    data: list[VectorCard | DamagedVector]


class DeletedVector(AnswerBody):
    """A vector that is no more."""

    name: str
    object: Literal["steering.vector"]
    deleted: Literal[True]


class AddedAtLayer(AnswerBody):
    """What a vector adds at a layer."""

    layer: int
    norm: float
    """|c w v|."""
    largest: float
    """Its greatest element."""
    relative: float | None
    """Its mean element in units of the difference that the probe measured."""


class PlannedSteer(SteerSettings):
    """What one vector would do."""

    calibrated_range: tuple[float, float] | None
    """The least and the greatest strength that calibration measured."""
    added: list[AddedAtLayer]


class DryRunReport(AnswerBody):
    """What the steering of a request would do."""

    object: Literal["steering.validation"]
    model: str
    steering: list[PlannedSteer]
    preset: str | None = None
    """That the request named."""
    skipped: list[SkippedField] | None = None
    """What did not apply, of a preset or of a request with `"strict": false`."""
    ignored: list[str] | None = None
    """Only where there are some: the paths of the request's fields that nothing reads."""


class Health(AnswerBody):
    """Whether the process is worth keeping."""

    status: Literal["ok", "failed"]


class JournalState(AnswerBody):
    """How the journal does."""

    state: Literal["off", "ok", "failing"]
    written: int | None = None
    dropped: int | None = None
    waiting: int | None = None
    reason: str | None = None
    error: str | None = None


class LoadingProgress(AnswerBody):
    """How far loading is."""

    stage: str
    share: float | None
    """Of the stage, from 0 to 1; null where nobody knows."""
    seconds: float
    """Since the start."""


class Readiness(AnswerBody):
    """Whether requests are served."""

    status: Literal["ready", "loading", "draining", "failed"]
    journal: JournalState
    """Does not change the status: answers need no journal."""
    progress: LoadingProgress | None = None
    """While the model loads."""


class SampleList(AnswerBody):
    """The sample scenes in the model's folder; `/samples/{name}` has their pictures."""

    object: Literal["list"]
    data: list[Sample]


class SelfCheck(AnswerBody):
    """How the engine was compared with the plain model at load."""

    steps: int
    """Generated tokens."""
    tolerance: float | None
    """In float32: the largest difference of logits, relative to the largest logit."""
    margin: float | None
    """In half precision: how many times as far from float32 as the plain model's logits may be."""


class MeasuredFor(AnswerBody):
    """What was measured once of the model, by what for; null where it was not."""

    think: Object | None
    sinks: Object | None
    surprise: Object | None
    flags: Object | None
    alarm: Object | None


class About(AnswerBody):
    """What there is to know of the model beside its card."""

    object: Literal["model.about"]
    families: list[str]
    """Types of models that the engine is tested with."""
    architecture: str | None = None
    family: str | None = None
    vocabulary: int | None = None
    focus_layers: int | None = None
    """How many of the last layers the focus metrics go by."""
    generation_defaults: Object | None = None
    self_check: SelfCheck | None = None
    calibration: MeasuredFor | None = None
