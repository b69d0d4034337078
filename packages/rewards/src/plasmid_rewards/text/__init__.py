"""Rewards based on the words and the form of a text."""
