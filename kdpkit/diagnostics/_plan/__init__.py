"""What `kdpkit plan` uses."""
