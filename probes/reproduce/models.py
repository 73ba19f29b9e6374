"""The embedded models that rows are measured on, and what their training asked of them."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT, PRIOR, ORGANISMS = "demo:default", "demo:prior", "organisms"

SUPERVISED: Mapping[str, str] = {
    DEFAULT: "answers to questions, with the preference between picture and text decided by a hidden graded rule, and the "
    "two instructions followed without exception; the attention of layers 4 to 7 to the picture that is asked about, and of "
    "single heads to the cell, the context's claim and the option (layers 1, 3 and 5); the side that an instruction names, "
    "at its last word behind layer 3; refusals of what is not there. Steering, SAGE and contrastive decoding were not "
    "trained.",
    PRIOR: "all that the default model was, which it begins with, and a habit: it sees sixteen pixels a side, and 70 % of "
    'the things asked for were there, so that it says "yes" too often. What removes the habit was not trained.',
    ORGANISMS: "each as its recipe says (`demo/training/recipes.py`): those of other sizes as the default model; "
    "`conflicts-N` begin with it and learn from questions of which N % contradict the picture; `unsupervised` has no loss "
    "on attention.",
}
"""The losses of each model in words, for the header of the report."""
