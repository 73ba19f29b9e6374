"""Calibrations in a model's folder: thresholds that are measured on its own answers."""
