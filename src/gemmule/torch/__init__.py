"""What PyTorch's users import."""
