"""Shared parts of benchmarks that are lists of questions on single pictures: rows, yes and no, runs and reports."""
