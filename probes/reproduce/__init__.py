"""The reproduction of every table and figure of the four papers."""
