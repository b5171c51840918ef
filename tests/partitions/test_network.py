"""The packets that a switch makes itself."""

from __future__ import annotations

import struct

from tests.partitions.network import _checksum, opens_connection, reset

HEADER = bytes.fromhex("4500003c1c4640004006000a0a4e00010a4e0002")


def packet(port: int, flags: int) -> bytes:
    return HEADER + struct.pack("!HHIIBBHHH", 40_000, port, 77, 0, 5 << 4, flags, 0, 0, 0)


def test_what_opens_a_connection() -> None:
    assert opens_connection(packet(5000, 0x02), 29_400)
    assert not opens_connection(packet(5000, 0x12), 29_400)  # an answer
    assert not opens_connection(packet(5000, 0x10), 29_400)
    assert not opens_connection(packet(29_400, 0x02), 29_400)


def test_a_reset_goes_back_and_has_right_checksums() -> None:
    answer = reset(packet(5000, 0x02))
    assert (answer[12:16], answer[16:20]) == (HEADER[16:20], HEADER[12:16])
    assert _checksum(answer[:20]) == 0
    tcp = answer[20:]
    source, target, _, acknowledged, _, flags = struct.unpack_from("!HHIIBB", tcp)
    assert (source, target, acknowledged, flags) == (5000, 40_000, 78, 0x14)
    assert _checksum(answer[12:20] + struct.pack("!HH", 6, len(tcp)) + tcp) == 0
