"""Steering vectors over HTTP and on the command line: a registry that all processes share, a dry run, files."""
