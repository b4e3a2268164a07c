"""`kdpkit lr`: learning-rate schedules, drawn and compared without training."""
