"""Numbers of the spans of a prompt, and the division of its tokens into system, user and vision."""

REPLY, OTHER, SYSTEM, CONTEXT, QUESTION, USER, FIRST_IMAGE = -2, -1, 0, 1, 2, 3, 4
"""Span numbers: a given reply, template and earlier answers, system prompt, text context, question, other user text, images.

A given reply is one that was not generated. A text context may stand in a message of any role. Images are numbered from 4
on.
"""

TEXTS = ("system", "user")
"""The roles of messages whose tokens a layout knows apart from their spans, because a context may stand in either."""

PARTITIONS = ("whole", "content")
"""The meanings of system and user besides the images' tokens (SPD-Faith Bench, `analysis/layer_analysis_generation.py`).

- whole: system is every prompt token before the first image, user every other one, template included, so that all of the
  prompt's attention is counted. Without an image the tokens before the users' first text are system;
- content: system is the text of system messages, user that of user messages, without the tokens of the template.
"""
