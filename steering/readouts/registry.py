"""The readouts and recorders that there are, a line each. A new one is a file and a line here."""

from __future__ import annotations

from steering.protocol import recorder
from steering.protocol.readout import register
from steering.readouts import attention, prompt_state, reply, residual, states
from steering.readouts.anchor import AnchorReadout
from steering.readouts.decay import DecayLayersReadout, DecayReadout
from steering.readouts.drift import DriftReadout
from steering.readouts.flags import FlagsReadout
from steering.readouts.focus import FocusReadout
from steering.readouts.modality import ModalityReadout
from steering.readouts.patches import HeatmapsReadout, PatchesReadout
from steering.readouts.token_maps import TamReadout

recorder.register(attention.NAME, attention.AttentionRecorder)
recorder.register(states.NAME, states.StatesRecorder)
recorder.register(residual.NAME, residual.ResidualRecorder)
recorder.register(prompt_state.NAME, prompt_state.PromptStateRecorder)
recorder.register(reply.NAME, reply.ReplyRecorder)

register(FocusReadout())
register(ModalityReadout())
register(DecayReadout())
register(DecayLayersReadout())
register(residual.ResidualReadout())
register(PatchesReadout())
register(TamReadout())
register(FlagsReadout())
register(AnchorReadout())
register(HeatmapsReadout())
register(DriftReadout())
