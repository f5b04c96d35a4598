"""What each kind of output is made of: the plans of every command that writes."""
