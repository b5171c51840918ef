"""Bytes between the processes of a mesh: one inbox for each worker, and mailboxes for its peers.

A *peer* is a number that the caller chooses. This room knows neither ranks nor names, and does not
look into messages: no pickle and no torch in here.

Other rooms may import:

- `network`: `Network`, all sockets of one worker;
- `chunks`: large messages in chunks (`Assembler`, `chunks`);
- `address`: private directories, and interfaces of this host;
- `curve`: the keys of workers;
- `probes`: whether anything listens at an address, and large packets arrive.
"""
