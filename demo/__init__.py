"""The embedded default model: a synthetic picture world, its training recipe, its checkpoint."""
