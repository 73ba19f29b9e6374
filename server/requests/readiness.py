"""The features that a served model lacks because it was not measured, for the log, the model's page and the metrics."""

from __future__ import annotations

import logging
from collections.abc import Collection

from server.engine.runtime import Serving
from server.engine.served import Capabilities
from server.requests.preset import VECTOR
from server.settings import Settings
from server.vectors.names import has
from steering import VectorStore
from steering.protocol.readout import REGISTRY
from steering.readiness import PARTS, PartState
from steering.readiness import VECTOR as VECTOR_PART
from steering.readiness import states as part_states

log = logging.getLogger("helmsight")

ABOUT = {"think": "divergence"}
"""The names of parts that are called otherwise in the facts of a model."""


def states(serving: Serving) -> list[PartState]:
    """Return the state of each part that the engine could use, as of now."""
    capabilities = serving.capabilities
    return [
        state
        for state in part_states(_measured(serving))
        if state.part.readouts & capabilities.readouts or state.part.interventions & capabilities.interventions
    ]


def _measured(serving: Serving) -> set[str]:
    calibrated = serving.engine.calibration()
    parts: Collection[str] = () if calibrated is None else calibrated.parts
    return {*parts, *_vector(serving.capabilities, serving.store)}


def measured(capabilities: Capabilities, store: VectorStore) -> set[str]:
    """Return the names of the parts that a model just loaded has, as `steering.readiness.PreparedPart.measured`."""
    calibration = capabilities.about.get("calibration", {})
    names = {ABOUT.get(name, name) for name, value in calibration.items() if value is not None}
    return {part.measured for part in PARTS if part.measured in names} | _vector(capabilities, store)


def _vector(capabilities: Capabilities, store: VectorStore) -> set[str]:
    return {VECTOR_PART} if has(store, VECTOR, capabilities.fingerprint, preference=True) else set()


def readouts_available(serving: Serving) -> dict[str, bool]:
    """Return by readout whether its values exist for this model, as far as that depends on the calibration."""
    calibrated = serving.engine.calibration()
    parts: Collection[str] = () if calibrated is None else calibrated.parts
    return {
        name: readout.calibrated_by is None or readout.calibrated_by in parts
        for name, readout in REGISTRY.items()
        if name in serving.capabilities.readouts
    }


def log_missing(serving: Serving, settings: Settings) -> None:
    """Log the missing parts, with a warning for readouts that the journal is to keep and that will be null."""
    missing = [state for state in states(serving) if not state.there]
    if missing:
        log.info(
            "the model was not prepared for %s: %s; 'helmsight prepare %s' measures what is missing",
            ", ".join(state.part.serves for state in missing),
            "; ".join(state.said for state in missing),
            settings.model,
        )
    for name in settings.journal_readouts:
        if readouts_available(serving).get(name) is False:
            log.warning(
                "--journal-readouts %s: this model has no calibration for it, so its values are null and no alert on them "
                "fires; 'helmsight prepare %s' measures it",
                name,
                settings.model,
            )
