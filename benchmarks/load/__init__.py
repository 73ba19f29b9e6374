"""Load over HTTP on any number of OpenAI-compatible servers; see `benchmarks.load.run`."""
