"""Building, calibrating and judging steering vectors."""

VECTOR = "modality-preference"
"""The name of the vector that is built, and evaluated, where no other one is named."""
