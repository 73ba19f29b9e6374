"""POPE: a test of whether a model sees objects that are not there."""
