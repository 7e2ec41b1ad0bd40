"""Learners of draft models for speculative decoding."""
