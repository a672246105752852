"""The ops of a model: each is one function with a PyTorch reference and faster implementations."""
