"""The preparation of a model: everything that it lacks, measured one part after the other."""
