"""Derivatives of every order, what backward saves, and who may listen to it or add to it."""
