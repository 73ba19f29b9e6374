"""The test of whether the readouts beside an answer show that the answer is wrong."""
