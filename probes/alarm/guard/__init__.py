"""The test of a guard: the wrong answers that it catches and mends, the right ones that it breaks, and its cost."""
