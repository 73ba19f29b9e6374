"""A body of a chat becomes a `steering.Request`: presets, pictures, vectors by name, and what may be left out."""
