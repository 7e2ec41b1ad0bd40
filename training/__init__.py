"""Quantisation-aware distillation and post-training from traces (no learner yet)."""
