"""What the engines of every target have in common: they put their own graphs in."""
