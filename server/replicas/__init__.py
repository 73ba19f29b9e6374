"""Several replicas of the application behind one address, by Ray Serve."""
