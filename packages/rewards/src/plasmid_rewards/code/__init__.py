"""Reward that executes generated programs."""
