"""The process that serves: its connections and threads, and the life of the model in it."""
