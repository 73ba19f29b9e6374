"""Offline work: building and calibrating steering vectors, and the benchmarks of the papers."""
