"""The step budget on machines that are made up: what passes cost is given, time is simulated or slept."""
