"""What a request says of a part that its receiver asks another worker for, as bytes."""

from __future__ import annotations

import struct

NUMBER = struct.Struct("<Q")  # of a part among its caller's
TICKET = struct.Struct("<QQQ")  # the relay's member id, the number of the part, and its size
