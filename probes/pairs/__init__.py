"""Steering vectors from a user's own pairs of prompts, for any contrast."""
