"""The base class of settings, their validation, and which settings of a stored recipe may be trusted."""
