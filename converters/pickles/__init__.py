"""Inert pickle reading and writing: nothing from a file is ever imported, called or evaluated.

`machine.parse` turns a pickle into plain Python data and inert `nodes`, `emit.dumps` writes such a tree back (unedited:
byte for byte), `nodes.fields`, `nodes.set_field` and `describe.describe` look at it and edit it. torch is never imported.
"""
