"""CHAIR: the objects that a description names although they are not there."""
