"""Folders of torch DCP: `.metadata` read and written, and one reader for each framework that saves with it."""
