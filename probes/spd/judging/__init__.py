"""Judges of an answer's claims: rules, a model, and their agreement with people."""
