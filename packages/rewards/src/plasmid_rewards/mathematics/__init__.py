"""Rewards that compare numbers and mathematical expressions."""
