"""Tools included with Plasmid."""
