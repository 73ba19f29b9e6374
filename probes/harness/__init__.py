"""What every benchmark shares: the ledger of answers, intervals, comparisons, tables, plots and the report."""
