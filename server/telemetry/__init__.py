"""Telemetry for operators: logs, metrics, traces."""
