"""Ratios between the engine and plain transformers, and between features on and off; see `benchmarks.run`."""
