"""Checkpoints in the form of those that are published, and the table of what becomes of them."""
