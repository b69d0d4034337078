"""Typed recipes: their tables, and how files and overrides become them."""
