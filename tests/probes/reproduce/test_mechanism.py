"""Readings of the rows on mechanisms, on reports in which each finding appears, and does not."""

from __future__ import annotations

from typing import Any

import pytest

from probes.reproduce.spd_mechanism import MECHANISM

READ = {item.id: item.read for item in MECHANISM}


def report(appears: bool) -> dict[str, Any]:
    """Three layers; where `appears`, as the paper says."""
    sign = 1.0 if appears else -1.0

    def change(*by_layer: float) -> dict[str, Any]:
        return {"difference": list(by_layer), "difference_95": [[value - 0.01, value + 0.01] for value in by_layer]}

    auroc = {name: {"alike": 0.5 + 0.1 * sign, "alike_95": [0.45 + 0.1 * sign, 0.6]} for name in FLAGS}
    return {
        "parts": {"all": {"answers": 90, "auroc": auroc}},
        "read": {
            "samples": 7,
            "shares_by_layer": {"system": {"faithful": [0.5, 0.3, 0.5 - 0.2 * sign]}},
            "scalars": {"vision_slope": {"faithful": [-0.1 * sign]}},
            "decay": {"faithful": {"vision": [0.5, 0.5 - 0.2 * sign]}},
            "by_layer": {
                "ffn_cosine": change(0.0, -0.2 * sign, 0.1),
                "mha_cosine": change(-0.05, 0.0, 0.0),
                "neuron_ratio": change(0.0, 0.1, 0.0),
            },
        },
        "separated": {"neuron_ratio": {"layer": 1, "share": 0.6, "share_95": [0.55 if appears else 0.45, 0.7], "n": 7}},
        "patches": {"said": {"value": 1.5, "value_95": [1.1 if appears else 0.9, 2.0], "n": 7}},
    }


FLAGS = ("perceptual_blindness", "dissociation")


@pytest.mark.parametrize("row", sorted(READ))
def test_a_finding_appears_where_it_is_seen_and_nowhere_else(row: int) -> None:
    read = READ[row]
    assert read is not None
    present, missing = read(report(True)), read(report(False))
    assert (present.appears, missing.appears) == (True, False)
    assert present.n in (7, 90)


def test_more_neurons_in_an_early_layer_is_not_what_the_paper_found() -> None:
    early = report(True)
    early["separated"]["neuron_ratio"]["layer"] = 0
    read = READ[79]
    assert read is not None
    assert not read(early).appears
