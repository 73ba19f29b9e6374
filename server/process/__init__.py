"""The serving process: its connections, its threads and the life cycle of the model in it."""
