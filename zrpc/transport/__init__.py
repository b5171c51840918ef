"""How messages travel: one inbox a worker, one mailbox for each peer. No pickle in here."""
