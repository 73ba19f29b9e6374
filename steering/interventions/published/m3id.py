"""M3ID: the logits move away from those without images, more the longer the answer is, where the model is unsure.

Favero et al. 2024, "Multi-Modal Hallucination Control by Visual Information Grounding", arXiv 2403.14003, section 4 and
Algorithm 1. With l_c the logits with the images and l_u those without, the logits of token t, counted from 1, are

    l_c + [max p_c < threshold] * (1 - g) / g * (l_c - l_u),  g = e^(-forgetting * t)

so that the weight is e^(forgetting * t) - 1. There is no code of the authors, so the paper's reading is the default. Others
that are around are options: the code of RITUAL and of ONLY (sangminwoo/RITUAL, zifuwan/ONLY, only_sample.py), with which
those papers compare, counts t from 0, so that the first token is the plain one, has no threshold, and cuts implausible
tokens off as VCD does (`first_step` 0, `threshold` 1, `beta` 0.1).
"""

from __future__ import annotations

import math

from pydantic import Field

from steering.interventions.contrast import Contrast, text_alone
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.protocol.intervention_spec import Messages, Rule


class M3id(Contrast):
    """Contrast the logits with those of the text alone, with a weight that grows along the answer (M3ID).

    The weight of token t is e^(`forgetting` * t) - 1, t counted from `first_step`; its exponent is at most 60. It is 0 where
    the likeliest token has at least the probability `threshold`; 1 for none. Favero et al. 2024, Algorithm 1, whose alpha is
    the threshold and whose lambda is `forgetting`. Raises RequestError for values out of range.
    """

    kind = "m3id"
    needs_image = True

    beta: float = Field(0.0, ge=0, le=1)
    forgetting: float = Field(0.02, ge=0, le=1)
    threshold: float = Field(0.3, gt=0, le=1)
    first_step: int = Field(1, ge=0, le=1)

    @property
    def rule(self) -> Rule:
        return Rule(
            weight=0.0,
            plausible=self.beta,
            growth=self.forgetting,
            first=self.first_step,
            below=self.threshold if self.threshold < 1 else math.inf,
        )

    def twin_prompt(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt:
        return text_alone(mllm, messages, prompt, self.kind)
