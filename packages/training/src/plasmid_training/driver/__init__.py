"""The driver's handles of ranks. Imports no torch."""
