"""MM-SAP: a test of whether a model knows the limits of what it can see."""
