"""What a caller sees, as in PyTorch where it has the same: arguments, errors, modules, commands."""
