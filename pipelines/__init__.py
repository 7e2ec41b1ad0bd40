"""The loop, its schedule, the registry, the command line and the report."""
