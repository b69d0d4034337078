"""Rewards computed by HTTP servers."""
