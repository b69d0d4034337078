"""The plugin registry and its hooks, and loading of Python files and functions that a recipe names."""
