"""Registers the embedded engine. Imports no torch."""
