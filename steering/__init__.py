"""Everything that happens inside the model: loading, generating, interventions, readouts, steering vectors.

Usable alone, without a server: `load` a model, make an `Engine`, `generate` answers to `Request`s.

On a CPU that other programs use too, set GOMP_SPINCOUNT=2000 (torch with GNU's OpenMP, as on Linux) or KMP_BLOCKTIME=0 (with
Intel's or LLVM's) in the environment before torch is imported, as `helmsight` does: OpenMP's threads spin while they wait
for each other, and take the time from the very thread that they wait for.
"""

from steering.admission import TextBounds, check_steer
from steering.completion import Completion
from steering.diagnostics.drift import drift, drifted
from steering.diagnostics.options import CHEAP, READOUTS, Diagnose
from steering.engine import Engine
from steering.errors import Busy, ContextOverflow, Fault, RequestError, SteeringError, UnsupportedModel, VectorError
from steering.interventions.contrast import Contrast, Icd, Pai, Vcd
from steering.interventions.generate import Generate
from steering.interventions.sage import Sage
from steering.interventions.see import See
from steering.interventions.steer import TOKENS, TOWARD, Steer, planned
from steering.interventions.think import Think
from steering.magnitudes import magnitudes
from steering.mllm import MLLM, load, refuse_structure
from steering.reliability import CRITERIA, DROP, Auto, Criterion, Reliability, check_auto, decide, find, measure
from steering.request import MAX_TOP_LOGPROBS, Choice, Chunk, Request, Result, Sampling, TokenLogprob
from steering.surprise import Surprise, surprises
from steering.turn import Turn
from steering.vector_info import NAME
from steering.vectors import SteeringVector, VectorStore

__all__ = [
    "CHEAP",
    "CRITERIA",
    "DROP",
    "MAX_TOP_LOGPROBS",
    "MLLM",
    "NAME",
    "READOUTS",
    "TOKENS",
    "TOWARD",
    "Auto",
    "Busy",
    "Choice",
    "Chunk",
    "Completion",
    "ContextOverflow",
    "Contrast",
    "Criterion",
    "Diagnose",
    "Engine",
    "Fault",
    "Generate",
    "Icd",
    "Pai",
    "Reliability",
    "Request",
    "RequestError",
    "Result",
    "Sage",
    "Sampling",
    "See",
    "Steer",
    "SteeringError",
    "SteeringVector",
    "Surprise",
    "TextBounds",
    "Think",
    "TokenLogprob",
    "Turn",
    "UnsupportedModel",
    "Vcd",
    "VectorError",
    "VectorStore",
    "check_auto",
    "check_steer",
    "decide",
    "drift",
    "drifted",
    "find",
    "load",
    "magnitudes",
    "measure",
    "planned",
    "refuse_structure",
    "surprises",
]
