"""The benchmark of SAGE's stages: existence questions and differences between two pictures."""
