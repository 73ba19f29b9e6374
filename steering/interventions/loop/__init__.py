"""Closed-loop strength of steering."""
