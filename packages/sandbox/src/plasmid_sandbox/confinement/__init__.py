"""What Linux lets an ordinary process take away from itself. Imports the standard library only."""
