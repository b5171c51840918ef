"""What the workers of a mesh check of each other's device maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zrpc.errors import OptionError
from zrpc.membership.device_maps import check_device_maps, maps_between
from zrpc.membership.device_settings import DeviceSettings
from zrpc.membership.peer_record import PeerRecord

TWO = {"cuda": 2}


def record(
    name: str, counts: dict[str, int] = TWO, maps: Any = None, devices: list[str] | None = None
) -> PeerRecord:
    text = DeviceSettings(counts, maps or {}, devices or []).dump()
    rank = int(name[-1])
    return PeerRecord(name, rank, 3, f"{rank:032x}", "", "", "", devices=text)


def check(*records: PeerRecord, complete: bool = True) -> None:
    check_device_maps(records, complete)


def test_maps_that_fit_are_accepted() -> None:
    check(record("w0"), record("w1"))
    swapped = {"cuda:0": "cuda:1", "cuda:1": "cuda:0", "cpu": "cpu"}
    check(record("w0", maps={"w1": swapped}, devices=["cuda:1", "cuda:0"]), record("w1"))
    check(record("w0", maps={"w0": {"cuda:0": "cuda:1"}}))
    check(record("w0", {}, maps={"w1": {"cpu": "xpu:0"}}), record("w1", {"xpu": 1}))


def test_what_does_not_fit_is_refused_with_the_text_of_torch() -> None:
    def maps(entries: dict[str, str], *devices: str) -> dict[str, Any]:
        return {"maps": {"w1": entries}, "devices": [*devices]}

    same = {"cuda:0": "cuda:0"}
    of_map = "in its device map for w1"
    for text, first, second in (
        ("w0 has invalid target node names in its device maps", {"maps": {"none": {}}}, []),
        (f"w0 has source devices with invalid indices {of_map}", maps({"cuda:2": "cuda:0"}), []),
        (f"w0 has target devices with invalid indices {of_map}", maps({"cuda:0": "cuda:2"}), []),
        (f"w0 has duplicated target devices {of_map}", maps({**same, "cuda:1": "cuda:0"}), []),
        (f"w0 has unexpected source devices {of_map}", maps(same, "cuda:1"), []),
        (f"w0 has unexpected target devices {of_map}", maps(same), ["cuda:1"]),
        ("w1 has duplicated devices", {}, ["cuda:1", "cuda:1"]),
        ("w1 has devices with invalid indices", {}, ["cuda:2"]),
    ):
        with pytest.raises(OptionError, match=f"^Node {text}\n"):
            check(record("w0", **first), record("w1", devices=second))


def test_a_worker_that_lacks_the_type_of_a_device_is_told() -> None:
    with pytest.raises(ValueError, match=r"target devices with .* w1\n.*\ndevice count = {}"):
        check(record("w0", maps={"w1": {"cuda:0": "cuda:0"}}), record("w1", {}))


def test_a_map_for_all_others_is_checked_with_each_of_them() -> None:
    maps = {"*": {"cuda:1": "cuda:1"}, "w1": {"cuda:0": "cuda:0"}}
    one = {"cuda": 1}
    check(record("w0", maps=maps), record("w1", one), record("w2"))
    with pytest.raises(ValueError, match=r"target devices with invalid .* for w2"):
        check(record("w0", maps=maps), record("w1", one), record("w2", one))


def test_a_map_may_name_a_worker_that_joins_later() -> None:
    maps = {"w1": {"cuda:0": "cuda:1"}}
    check(record("w0", maps=maps), complete=False)
    with pytest.raises(ValueError, match="target devices with invalid"):
        check(record("w0", maps=maps), record("w1", {}), complete=False)


def test_a_workers_own_map_counts_and_not_that_for_all_others() -> None:
    one = record("w0", maps={"*": {"cuda:0": "cuda:0"}, "w1": {"cuda:1": "cuda:0"}})
    requests, _ = maps_between(one, record("w1"))
    assert (requests.targets, requests.current) == ({"cuda:1": "cuda:0"}, "cuda:0")
    requests, _ = maps_between(one, record("w2"))
    assert requests.targets == {"cuda:0": "cuda:0"}


def test_answers_take_the_inverse_of_the_callers_map() -> None:
    caller = record("w0", maps={"w1": {"cuda:0": "cuda:1", "cpu": "cuda:0"}})
    requests, answers = maps_between(record("w1"), caller)
    assert requests.targets == {}
    assert answers.targets == {"cuda:1": "cuda:0", "cuda:0": "cpu"}


def test_the_first_of_the_callees_devices_is_current_if_a_map_names_several() -> None:
    caller = record("w0", maps={"w1": {"cuda:0": "cuda:0", "cuda:1": "cuda:1"}})
    for devices, current in (([], "cuda:0"), (["cuda:1", "cuda:0"], "cuda:1")):
        requests, _ = maps_between(caller, record("w1", devices=devices))
        assert requests.current == current


def test_workers_without_devices_have_no_maps() -> None:
    assert maps_between(record("w0", {}), record("w1", {})) is None
    assert record("w0", {}).devices == ""


def test_what_a_record_says_of_devices_arrives() -> None:
    sent = record("w0", maps={"*": {"cpu": "cuda:1"}}, devices=["cuda:1"])
    assert PeerRecord.parse(sent.dump()) == sent
    found = DeviceSettings.parse(sent.devices)
    assert found == DeviceSettings(TWO, {"*": {"cpu": "cuda:1"}}, ["cuda:1"])


def test_a_record_with_damaged_devices_is_refused() -> None:
    few = "x", "[]", "[1, 2, 3]", '[{"cuda": "x"}, {}, []]'
    for text in (*few, '[{}, {"w": 1}, []]', '[{}, {}, ["no"]]'):
        with pytest.raises(ValueError, match="a peer record has wrong devices"):
            PeerRecord.parse(replace(record("w0"), devices=text).dump())
