"""Environments of other libraries, each in a separate Python environment."""
