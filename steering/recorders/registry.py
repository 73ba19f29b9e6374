"""The available recorders, one a line."""

from __future__ import annotations

from steering.protocol.recorder import register
from steering.recorders import activations, attention, prompt_scores, prompt_state, reply, residual, states

register(attention.NAME, attention.AttentionRecorder)
register(states.NAME, states.StatesRecorder)
register(residual.NAME, residual.ResidualRecorder)
register(prompt_state.NAME, prompt_state.PromptStateRecorder)
register(reply.NAME, reply.ReplyRecorder)
register(prompt_scores.NAME, prompt_scores.PromptScoresRecorder)
register(activations.NAME, activations.ActivationsRecorder)
