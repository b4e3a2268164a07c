"""Training on replicas of TensorFlow: docs/development/architecture.md has a batch's way."""
