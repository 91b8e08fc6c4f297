"""The build, the layers of csrc/, the examples, and what the documentation says of them."""
