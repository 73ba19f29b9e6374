"""The subcommands of `helmsight` that are the server's own."""
