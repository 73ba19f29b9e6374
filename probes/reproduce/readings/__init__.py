"""Readings of reports for the rows of the reproduction."""
