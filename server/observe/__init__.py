"""Answers that another engine gave with the same weights, read by this one: what the model looked at, measured afterwards."""
