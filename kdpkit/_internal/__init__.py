"""What the parts of kdpkit have in common and users never import."""
