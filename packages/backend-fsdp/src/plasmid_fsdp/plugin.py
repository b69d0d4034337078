"""Registers the FSDP trainer. Imports no torch."""
