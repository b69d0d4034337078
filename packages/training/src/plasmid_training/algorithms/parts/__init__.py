"""What algorithms are composed of: advantages, losses of the probability ratio, KL estimates, corrections.

Importing a part does not import torch, so that settings can be read without it.
"""
