"""`kdpkit probe`: two training steps in every way, to see which work here."""
