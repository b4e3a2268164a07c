"""What `kdpkit env` uses."""
