"""Calls of several workers, or of several objects, at once.

``group`` has the sequences that users see; other rooms may import it, ``arguments`` and
``service``. ``arguments`` decides which member gets what, without I/O. ``call`` packs what goes to
all of them once, and ``calls`` has the verbs.
"""
