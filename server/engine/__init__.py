"""The engine behind the server: the protocol that any engine implements (`served`), Helmsight's own, and its loading."""
