"""The subcommands of `helmsight` that belong to the server."""
