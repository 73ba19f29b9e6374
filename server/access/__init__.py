"""Who may send what: API keys with roles and limits, host names, and origins of other pages."""
