"""The engine behind the server: the protocol that any engine fits (`served`), this project's own, and its loading."""
