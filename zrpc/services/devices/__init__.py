"""The devices of a worker: which is current while a handler runs."""
