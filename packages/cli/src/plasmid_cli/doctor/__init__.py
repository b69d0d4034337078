"""Checks of `rl doctor`. Nothing here imports torch or SGLang; a separate process checks them."""
