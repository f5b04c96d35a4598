"""Checkpoints in object stores: addresses, listings, ranges of objects, uploads.

Nothing of a store is imported before an address of it is named.
"""
