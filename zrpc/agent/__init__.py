"""One member of a mesh: its receive loop, the dispatch of messages, and its shutdown."""
