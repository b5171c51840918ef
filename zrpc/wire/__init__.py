"""One message: its header, its pickle and its tensors. No sockets in here.

Other rooms may import:

- `message`: `Message`, and reading one from its frames (`parse`);
- `kind`: the kinds of messages;
- `member_id`: which member of the mesh a message belongs to;
- `pickling`: `Encoder`, `Decoder`, and `register_reducer` for types of upper rooms;
- `exceptions`: the errors of handlers.
"""
