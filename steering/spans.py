"""The numbers of the spans of a prompt."""

OTHER, SYSTEM, CONTEXT, QUESTION, USER, FIRST_IMAGE = -1, 0, 1, 2, 3, 4
"""Span numbers: template and earlier answers, system prompt, text context, question, other user text, images from 4 on."""
