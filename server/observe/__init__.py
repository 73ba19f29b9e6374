"""Answers that another engine gave with the same weights, read afterwards: where the model looked while it gave them."""
