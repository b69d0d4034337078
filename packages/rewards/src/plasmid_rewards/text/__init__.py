"""Rewards of a text's words and form."""
