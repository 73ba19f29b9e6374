"""The run that decides what See's lost formula is."""
