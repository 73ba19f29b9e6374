"""Turning the body of a chat into a `steering.Request`: presets, images, named vectors and skippable fields."""
