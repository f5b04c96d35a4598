"""The library under distckpt: formats, models, planning and moving bytes. Imports no CLI code."""

__version__ = "0.1.0"
