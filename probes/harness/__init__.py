"""Shared parts of all benchmarks: the answer ledger, intervals, comparisons, tables, plots and the report."""
