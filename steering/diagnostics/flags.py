"""Two failures that maps betray: blindness to the picture, and an answer that does not rest on what is looked at.

The SAGE paper (section 4.1, figure 6) describes both by examples and gives no measure. Here a map is concentrated when the
fifth of the patches where it is strongest holds at least `CONCENTRATED` of it (a flat map: a fifth), and two maps agree when
at least `OVERLAP` of these patches are common.
"""

from __future__ import annotations

import math
from typing import Any

import torch

TOP = 0.2
CONCENTRATED = 0.4
OVERLAP = 0.25


def flags(attention: torch.Tensor, activation: torch.Tensor) -> dict[str, Any]:
    """The `flags` readout. attention, activation: (patches,) of all images together, not negative.

    perceptual_blindness: neither map is concentrated. dissociation: attention is, and the activation map's strongest patches
    are others. None where a map is zero everywhere, or there are too few patches to tell.
    """
    count = math.ceil(TOP * len(attention))
    shares = [_top_share(values, count) for values in (attention, activation)]
    looked, said = shares
    overlap = None
    if looked is not None and said is not None:
        overlap = len(_top(attention, count) & _top(activation, count)) / count
    blind = apart = None
    if looked is not None and said is not None and overlap is not None and len(attention) > 2 * count:
        blind = looked < CONCENTRATED and said < CONCENTRATED
        apart = looked >= CONCENTRATED and overlap < OVERLAP
    return {
        "perceptual_blindness": blind,
        "dissociation": apart,
        "concentration": {"attention": looked, "activation": said, "overlap": overlap},
        "thresholds": {"top": TOP, "concentrated": CONCENTRATED, "overlap": OVERLAP},
    }


def _top(values: torch.Tensor, count: int) -> set[int]:
    return set(values.topk(count).indices.tolist())


def _top_share(values: torch.Tensor, count: int) -> float | None:
    total = float(values.sum())
    return float(values.topk(count).values.sum()) / total if total > 0 else None
