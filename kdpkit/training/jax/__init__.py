"""Training on devices of JAX, where one program computes the global batch."""
