"""What two Stacks can do, on tasks whose answers can be checked."""
