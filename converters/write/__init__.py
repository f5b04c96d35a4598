"""The plans of every command that writes."""
