"""Plug points of other libraries, one small file for each.

Nothing here is imported with ``fused_op``, and each file imports its library only when it is used.
``docs/use_it_in.md`` has an example of each, and says which version the interface was read from.
"""
