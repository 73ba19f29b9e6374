"""The registry of forms. A new one is a class in this folder; list its module here."""

from __future__ import annotations

from steering.cpu.forms import interventions, recorders
from steering.cpu.forms.base import COMPILED, CPU_FORMS, SCOPES, CompiledForm, Scope, forms_of

__all__ = ["COMPILED", "CPU_FORMS", "SCOPES", "CompiledForm", "Scope", "forms_of", "interventions", "recorders"]
