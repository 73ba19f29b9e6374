"""The questions about two pictures."""

from __future__ import annotations

WHAT = "What is the difference between the two pictures?"
SAME, DIFFERENT = "Are the two pictures the same?", "Are the two pictures different?"
EXPLAINED_SAME, EXPLAINED_DIFFERENT = f"Find the difference. {SAME}", f"Find the difference. {DIFFERENT}"
"""The symmetric questions with a request to explain, from which `cr` is computed.

A model that answers them with a bare yes or no claims nothing that could be consistent.
"""
