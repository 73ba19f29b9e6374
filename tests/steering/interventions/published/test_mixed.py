"""Every registered intervention at once: each answer is what it is alone."""

from __future__ import annotations

from typing import Any

import steering
from steering.interventions.dola import Dola
from steering.interventions.look_at import LookAt
from steering.interventions.project_out import ProjectOut
from steering.interventions.published.agla import Agla
from steering.interventions.published.m3id import M3id
from steering.interventions.published.only import Only
from steering.interventions.published.opera import Opera
from steering.interventions.published.vista import Vista
from steering.protocol.intervention import REGISTRY
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.interventions.published.twins import check_mixed
from tests.steering.interventions.pushes import make_vector


def test_every_decoder_answers_beside_all_others_as_alone(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", slots=32)
    messages, other = (families.example_messages("qwen2_vl", images, text="Which one?") for images in (1, 2))
    vector = make_vector(engine.mllm)
    alone: list[Any] = [
        steering.Vcd(), steering.Icd(place="question"), steering.Pai(first_layer=1), M3id(threshold=1.0), Agla(), Vista(),
        Only(), Opera(scale=100.0, candidates=2), Dola(premature=[0, 1]), steering.See(alpha=0.4),
        steering.Think(threshold=0.01), steering.Generate(), steering.Steer(vector, 1.5), ProjectOut(vector=vector),
        LookAt(bias=3.0), steering.RefusalPrompt(),
    ]  # fmt: skip
    together = [
        (Only(layer=1), Opera(candidates=2), steering.See(alpha=0.3)),
        (Vista(), Dola(premature=[1]), steering.Pai(first_layer=0)),
        (Agla(), steering.Steer(vector, -1.0), LookAt(bias=-2.0)),
        (),
    ]
    asked = [(messages, (one,)) for one in alone] + [(other, several) for several in together]
    decided = [
        (chat, tuple(steering.decide(engine, steering.Request(chat, interventions=own)).asked.values()))
        for chat, own in asked
    ]
    assert {own.name() for _, several in decided for own in several} == set(REGISTRY)
    check_mixed(engine, decided)
