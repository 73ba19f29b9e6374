"""Flags of two failures that maps reveal: blindness to the picture, and an answer that does not rest on the attended places.

The SAGE paper (section 4.1, figure 6) describes both by examples and gives no measure. Here the concentration of a map is
the share of it in the strongest fifth of its patches (a flat map: a fifth), and the agreement of two maps is the correlation
of their values over the patches. The thresholds of the flags are measured for each model (`Thresholds`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from steering.model.thresholds import FLAGS, Thresholds
from steering.protocol.readout import Diagnose, FinishedAnswer, Readout, Scalar
from steering.protocol.signals import Signal
from steering.readouts.maps import DISCOUNT_SINKS, judged_maps, maps
from steering.recorders import states

TOP = 0.2


def numbers(attention: torch.Tensor, activation: torch.Tensor) -> dict[str, float | None]:
    """Return the concentration of both maps, the overlap of their strongest fifths, and their correlation.

    The overlap is a share of either fifth. attention, activation: (patches,) of all images together, not negative. None
    where a map is zero everywhere, the correlation also where one is flat.
    """
    count = math.ceil(TOP * len(attention))
    looked, activated = (_top_share(values, count) for values in (attention, activation))
    overlap = agreement = None
    if looked is not None and activated is not None:
        overlap = len(_top(attention, count) & _top(activation, count)) / count
        both = torch.stack([attention, activation]).double()
        both = both - both.mean(1, keepdim=True)
        sizes = both.norm(dim=1)
        if bool((sizes > 1e-9 * torch.stack([attention, activation]).double().norm(dim=1)).all()):
            agreement = float((both[0] @ both[1]) / sizes.prod())
    return {"attention": looked, "activation": activated, "overlap": overlap, "agreement": agreement}


def flags(
    attention: torch.Tensor, activation: torch.Tensor, thresholds: Thresholds | None, digest: str | None = None
) -> dict[str, Any]:
    """Return the `flags` readout, with the digest of the calibration that the thresholds are from.

    Its flags are None without thresholds, where a number does not exist, and where there are too few patches to tell.
    """
    concentration = numbers(attention, activation)
    values = [concentration[name] for name in ("attention", "activation", "agreement")]
    raised: Mapping[str, bool | None] = dict.fromkeys(FLAGS)
    if thresholds is not None and None not in values and len(attention) > 2 * math.ceil(TOP * len(attention)):
        raised = thresholds.flags(*(value for value in values if value is not None))
    content = asdict(thresholds) if thresholds is not None else {}
    compared = {name: content.get(name) for name in ("attention", "activation", "agreement")}
    return {
        **raised,
        "concentration": concentration,
        "thresholds": {"top": TOP, **compared},
        "calibration": {"answers": content["answers"], "raised": content["raised"], "digest": digest}
        if content
        else None,
    }


def _top(values: torch.Tensor, count: int) -> set[int]:
    return set(values.topk(count).indices.tolist())


def _top_share(values: torch.Tensor, count: int) -> float | None:
    total = float(values.sum())
    return float(values.topk(count).values.sum()) / total if total > 0 else None


class FlagsReadout(Readout):
    """Flags of perceptual blindness and dissociation, from the attention of all layers and the plain maps of all tokens.

    The thresholds were chosen on these maps and do not hold for maps whose sinks are discounted.
    """

    name = "flags"
    calibrated_by = "flags"
    options = (DISCOUNT_SINKS,)
    scalars: ClassVar[dict[str, type]] = dict.fromkeys(FLAGS, bool)

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.PATCHES, Signal.IMAGE_STATES})

    def read(self, answer: FinishedAnswer) -> dict[str, Any] | None:
        token_maps: states.TokenMaps | None = answer.taken.get(states.NAME)
        if token_maps is None or not answer.images:
            return None
        attention = torch.cat([map_.everything for map_ in judged_maps(answer)], 1).mean(0)
        activation = torch.cat([map_.everything for map_ in maps(answer, token_maps.plain.sum(0))])
        context, discounts = answer.context, answer.options[DISCOUNT_SINKS]
        return flags(attention, activation, None if discounts else context.flags, context.calibration)

    def summary(self, report: Any) -> dict[str, Scalar]:
        return {name: report[name] for name in FLAGS}
