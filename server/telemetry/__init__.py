"""What those who run a server see of it: logs, metrics, traces."""
