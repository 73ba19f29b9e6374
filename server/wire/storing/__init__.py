"""Bodies about stored completions, and the metadata of all."""
