"""The plugin registry, its hooks, and Python files and functions that a recipe names."""
