"""The benchmark of SAGE's stages: existence questions and differences of two pictures."""
