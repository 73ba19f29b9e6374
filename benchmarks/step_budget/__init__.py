"""The step budget on simulated machines: the costs of passes are given, time is simulated or slept."""
