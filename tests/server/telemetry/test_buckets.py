"""The buckets of histograms resolve what readouts keep of usual answers, seen on 200 answers of the embedded model."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

import steering
from demo.world.conflicts import conflict_samples
from server.journal.scalars import scalars
from server.telemetry.metrics import DOSE
from steering import Diagnose, Request, Sampling, Steer
from steering.protocol.readout import REGISTRY, Quantity

OBSERVED = frozenset({"focus", "modality", "decay", "residual", "confidence", "alarm"})


def quantities() -> dict[str, Quantity]:
    declared = {name: quantity for one in REGISTRY.values() for name, quantity in one.quantities.items()}
    return declared | {"dose": DOSE}


def test_every_number_of_the_house_is_described() -> None:
    floats = {name for one in REGISTRY.values() for name, kind in one.scalars.items() if kind is float}
    assert floats | {"dose"} == quantities().keys()
    for name, quantity in quantities().items():
        assert quantity.about, name
        assert all(low < high for low, high in pairwise(quantity.buckets)), name
        assert len(quantity.buckets) >= 10, name


@pytest.fixture(scope="module")
def numbers(engine: steering.Engine) -> dict[str, list[float]]:
    """Return the numbers of 200 answers: about one image and about two, with a text context, plain and steered."""
    vector = steering.VectorStore(f"{engine.mllm.path}/vectors").get("modality-preference")
    samples = conflict_samples(200, 7)
    requests = []
    for index, (sample, other) in enumerate(zip(samples, samples[1:] + samples[:1], strict=True)):
        pictures = [sample, other][: 1 + index % 2]
        content = [{"type": "image", "image": one.picture()} for one in pictures]
        content += [{"type": "text", "text": f"Text context: {sample.context}\n{sample.question}"}]
        way = Steer.to(vector, ("vision", "text")[index // 2 % 2], (0.5, 1.0, 1.5)[index % 3])
        asked = way if index % 4 else ()
        request = Request(
            [{"role": "user", "content": content}], Sampling(max_tokens=8), asked, diagnose=Diagnose(OBSERVED)
        )
        requests.append(request)
    kept: defaultdict[str, list[float]] = defaultdict(list)
    for result in engine.generate(requests):
        (choice,) = result.choices
        for name, value in scalars(choice.applied, choice.diagnostics).items():
            if value is not None:
                kept[name].append(float(value))
    return kept


@pytest.mark.parametrize("name", [*quantities()])
def test_less_than_nine_tenths_of_answers_lie_in_an_outermost_bucket(
    numbers: dict[str, list[float]], name: str
) -> None:
    quantity, values = quantities()[name], numbers[name]
    assert len(values) >= 100
    first, *_, before, last = quantity.buckets
    assert sum(value <= first for value in values) < 0.9 * len(values)
    assert sum(value > before for value in values) < 0.9 * len(values)
    assert sum(value > last for value in values) < 0.1 * len(values), "beyond all buckets"
    for value in values:
        assert quantity.low is None or value >= quantity.low
        assert quantity.high is None or value <= quantity.high
