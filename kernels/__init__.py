"""Kernels that are profiled, verified and measured in the engine (no learner yet)."""
