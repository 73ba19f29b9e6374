"""How the model of a command is loaded: the settings that it shares with `serve`, and their flags."""
