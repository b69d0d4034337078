"""Building blocks of algorithms: comparisons within groups, returns, KL estimators, off-policy corrections.

Importing them does not import torch, so that settings can be read without it.
"""
