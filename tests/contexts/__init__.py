"""The same numbers wherever PyTorch's operators work: compiled, exported, sharded, in threads."""
