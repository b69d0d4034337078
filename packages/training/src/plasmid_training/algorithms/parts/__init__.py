"""Building blocks of algorithms: advantages, policy losses, KL estimators, off-policy corrections.

Importing them does not import torch, so that settings can be read without it.
"""
