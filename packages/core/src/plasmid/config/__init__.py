"""Typed recipes: the tables, and loading them from files and overrides."""
