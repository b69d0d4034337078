"""Validation of settings, and which settings of a stored recipe may be trusted."""
