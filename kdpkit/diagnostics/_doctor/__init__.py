"""What `kdpkit doctor` uses."""
