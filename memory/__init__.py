"""Persistent compressed KV memory through LMCache (no learner yet)."""
