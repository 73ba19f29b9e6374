"""Offline work: building and calibrating steering vectors, and the papers' benchmarks."""
