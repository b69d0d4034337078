"""The workflow with tools, parsers of tool calls and schemas, and the tools included with Plasmid."""
