"""The organism `smol`: a real language model, SmolLM2-135M-Instruct, that sees the synthetic world.

It keeps its own prior, system prompt and attention sink, and is never shown a conflict or told where to look.
"""
