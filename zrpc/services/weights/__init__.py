"""Published weights: a publisher's versions of a model, for subscribers on all workers.

A version is one flat buffer. It lies in a segment of shared memory that the publisher holds, and
that is lent to each subscriber on its host. On every other host one worker gets it once, and holds
a copy that it lends in the same way. So a version lives as long as somebody has it, by the rules of
shared memory, and nothing here counts readers. ``layout`` says what is where in a version,
``publications`` who publishes what; both are without I/O. ``versions`` has the newest version at
the publisher, and at the worker that gets versions for its host. ``publisher`` is the publisher's
side, ``subscriber`` the reader's. ``service`` puts them together.
"""
