"""Calls of several workers, or of several objects, at once.

``group`` has the sequences that users see; other rooms may import it, ``arguments`` and
``service``. ``arguments`` decides which member gets what, and ``sharing`` who gets the next item,
both without I/O. ``packing`` packs what goes to all of them once.
"""
