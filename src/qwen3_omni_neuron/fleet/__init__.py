"""Many replicas of the server, run by Ray Serve."""
