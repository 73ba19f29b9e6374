"""The inside of a model while it says true and false answers: given answers are forced, and read."""
