"""Revisions, one file each, oldest first."""
