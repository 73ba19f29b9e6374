"""The engine as a library: loading, generating, interventions, readouts, steering vectors.

Usable alone, without a server: `load` a model, make an `Engine`, `generate` answers to `Request`s.

On a CPU that other programs use too, set GOMP_SPINCOUNT=2000 and OMP_WAIT_POLICY=active (torch with GNU's OpenMP, as on
Linux) or KMP_BLOCKTIME=0 (with Intel's or LLVM's) in the environment before torch is imported, as `helmsight` does: OpenMP's
threads spin while they wait for each other, and take the time from the very thread that they wait for.
"""

from steering.auto.conditions import NumberCondition, conditioned
from steering.auto.gate import Gate, Gated, GateTerm
from steering.auto.reliability import CRITERIA, DROP, Auto, Criterion, Reliability, check_auto, find, measure
from steering.auto.surprise import Surprise, surprises
from steering.errors import (
    Busy,
    ContextOverflow,
    Fault,
    Inapplicable,
    OutOfRoom,
    RequestError,
    SteeringError,
    UnsupportedModel,
    VectorError,
)
from steering.front.completion import Completion
from steering.front.engine import Engine
from steering.front.magnitudes import magnitudes
from steering.front.turn import Turn, decide, decide_next
from steering.grammar.grammar import Grammar
from steering.histogram import Histogram
from steering.interventions import registry as _interventions  # noqa: F401
from steering.interventions.contrast import Contrast, Icd, Vcd
from steering.interventions.generate import Generate, Sage
from steering.interventions.loop.until import Until
from steering.interventions.pai import Pai
from steering.interventions.refusal import RefusalPrompt
from steering.interventions.see import See
from steering.interventions.steer import TOWARD, Steer, Steering, check_steer, planned
from steering.interventions.think import Think
from steering.logprobs import TokenLogprob
from steering.model.chat.template import RESERVED_VARIABLES
from steering.model.loading import load, refuse_structure
from steering.model.mllm import MLLM
from steering.notebook.applied import AppliedAnswers, applied
from steering.prompt.bounds import TextBounds
from steering.prompt.tokens import TOKENS
from steering.protocol.intervention import Prelude, in_place_of, next_prelude
from steering.protocol.intervention_spec import InterventionSpec, Options
from steering.protocol.readout import Diagnose, Earlier
from steering.protocol.request import MAX_TOP_LOGPROBS, Choice, Chunk, Request, Result, Sampling
from steering.readouts import registry as _readouts  # noqa: F401
from steering.readouts.drift import drift
from steering.recorders import registry as _recorders  # noqa: F401
from steering.runner.sampler import answer_seed
from steering.timing import Timing
from steering.tools.calls import CallPiece, ToolCall
from steering.tools.tools import Tools
from steering.vectors.info import NAME
from steering.vectors.store import PinError, VectorStore
from steering.vectors.vector import SteeringVector

__all__ = [
    "CRITERIA",
    "DROP",
    "MAX_TOP_LOGPROBS",
    "MLLM",
    "NAME",
    "RESERVED_VARIABLES",
    "TOKENS",
    "TOWARD",
    "AppliedAnswers",
    "Auto",
    "Busy",
    "CallPiece",
    "Choice",
    "Chunk",
    "Completion",
    "ContextOverflow",
    "Contrast",
    "Criterion",
    "Diagnose",
    "Earlier",
    "Engine",
    "Fault",
    "Gate",
    "GateTerm",
    "Gated",
    "Generate",
    "Grammar",
    "Histogram",
    "Icd",
    "Inapplicable",
    "InterventionSpec",
    "NumberCondition",
    "Options",
    "OutOfRoom",
    "Pai",
    "PinError",
    "Prelude",
    "RefusalPrompt",
    "Reliability",
    "Request",
    "RequestError",
    "Result",
    "Sage",
    "Sampling",
    "See",
    "Steer",
    "Steering",
    "SteeringError",
    "SteeringVector",
    "Surprise",
    "TextBounds",
    "Think",
    "Timing",
    "TokenLogprob",
    "ToolCall",
    "Tools",
    "Turn",
    "UnsupportedModel",
    "Until",
    "Vcd",
    "VectorError",
    "VectorStore",
    "answer_seed",
    "applied",
    "check_auto",
    "check_steer",
    "conditioned",
    "decide",
    "decide_next",
    "drift",
    "find",
    "in_place_of",
    "load",
    "magnitudes",
    "measure",
    "next_prelude",
    "planned",
    "refuse_structure",
    "surprises",
]


def __dir__() -> list[str]:
    return __all__
