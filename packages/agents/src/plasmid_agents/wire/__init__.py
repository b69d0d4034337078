"""The formats of the APIs, one file each."""
