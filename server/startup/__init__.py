"""Settings of a process that must be made before torch and gunicorn: allocator, OpenMP, signals."""
