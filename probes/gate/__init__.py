"""Conditions of steering from a user's own examples of prompts: when to steer, and when not."""
