"""The library under distckpt: formats, models, planning and moving bytes. Imports no CLI code."""
