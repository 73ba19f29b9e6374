"""Helmsight's steering and diagnostics inside vLLM, as a plugin of stock servers."""

__version__ = "0.1.0"
CONTRACT = 1
"""The version of the contract between this plugin and Helmsight's server."""
TESTED = ("0.31", "0.32")
"""The minor versions of vLLM that the plugin was run with."""
