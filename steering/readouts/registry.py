"""The available readouts, one a line, in the order of the envelope. A new one is a file and a line here."""

from __future__ import annotations

from steering.protocol.readout import register
from steering.readouts.alarm import AlarmReadout, ConfidenceReadout
from steering.readouts.decay import DecayLayersReadout, DecayReadout
from steering.readouts.drift import DriftReadout
from steering.readouts.flags import FlagsReadout
from steering.readouts.focus import AnchorReadout, FocusReadout
from steering.readouts.modality import ModalityReadout
from steering.readouts.patches import HeatmapsReadout, PatchesReadout
from steering.readouts.residual import FeaturesReadout, ResidualReadout, StatesReadout
from steering.readouts.tam import TamReadout

register(FocusReadout())
register(ModalityReadout())
register(DecayReadout())
register(DecayLayersReadout())
register(ResidualReadout())
register(PatchesReadout())
register(TamReadout())
register(FlagsReadout())
register(AnchorReadout())
register(HeatmapsReadout())
register(DriftReadout())
register(ConfidenceReadout())
register(AlarmReadout())
register(StatesReadout())
register(FeaturesReadout())
