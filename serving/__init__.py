"""Stacks, traces, capture, replicas, fleet, gateway and rollout."""
