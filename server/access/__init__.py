"""Access control: API keys with roles and limits, host names, and origins of other pages."""
