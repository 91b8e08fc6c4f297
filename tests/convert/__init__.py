"""The norms of models that exist, replaced and put back."""
