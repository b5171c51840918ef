"""What travels: message header, pickles, tensors. No sockets in here."""
