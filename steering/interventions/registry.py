"""The available interventions, one a line, in the order in which they act after a layer.

A new one is a file and a line here.
"""

from __future__ import annotations

from steering.interventions.contrast import Icd, Vcd
from steering.interventions.dola import Dola, DolaSlots
from steering.interventions.generate import Generate, GenerateSlots
from steering.interventions.look_at import LookAt, LookAtSlots
from steering.interventions.pai import Pai, PaiSlots
from steering.interventions.project_out import ProjectOut, ProjectOutSlots
from steering.interventions.published.agla import Agla, AglaSlots
from steering.interventions.published.m3id import M3id
from steering.interventions.published.only import Only, OnlySlots
from steering.interventions.published.opera import Opera, OperaSlots
from steering.interventions.published.vista import Vista, VistaSlots
from steering.interventions.refusal import RefusalPrompt
from steering.interventions.see import See, SeeSlots
from steering.interventions.steer import Steering
from steering.interventions.steer_rows import SteerSlots
from steering.interventions.think import Think, ThinkSlots
from steering.protocol.intervention import register

register(LookAt, LookAtSlots)
register(See, SeeSlots)
register(Think, ThinkSlots)
register(Steering, SteerSlots)
register(ProjectOut, ProjectOutSlots)
register(Generate, GenerateSlots)
register(Vcd)
register(Icd)
register(Pai, PaiSlots)
register(M3id)
register(Agla, AglaSlots)
register(RefusalPrompt)
register(Vista, VistaSlots)
register(Only, OnlySlots)
register(Dola, DolaSlots)
register(Opera, OperaSlots)
