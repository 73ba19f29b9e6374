"""The numbers of the spans of a prompt, and how its tokens divide into system, user and vision."""

REPLY, OTHER, SYSTEM, CONTEXT, QUESTION, USER, FIRST_IMAGE = -2, -1, 0, 1, 2, 3, 4
"""Span numbers: a reply that is given rather than generated, template and earlier answers, system prompt, text context,
question, other user text, images from 4 on."""

PARTITIONS = ("whole", "content")
"""What counts as system and as user beside the images' tokens (SPD-Faith Bench, `analysis/layer_analysis_generation.py`).

- whole: system is every prompt token before the first image, user every other one, template included, so that all of the
  prompt's attention is told. Without an image what stands before the users' first text is system;
- content: system is what system messages say, user what users say, without the tokens of the template.
"""
