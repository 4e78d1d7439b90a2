"""FAULT as data: what is read, and that everything wrong is said at once."""

from __future__ import annotations

import errno

import pytest

from baton.errors import Reason, ServiceError
from baton.faults.points import FLOW, POINTS, Action
from baton.faults.spec import PAUSE_S_MAX, SPEC_CHARS_MAX, Fault, FaultSpecError, parse_faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("decode.mid_fetch:pause:3", Fault(point="decode.mid_fetch", action="pause", seconds=3.0)),
        (
            "prefill.mid_upload:exit:once",
            Fault(point="prefill.mid_upload", action="exit", is_once=True),
        ),
        ("kv.get:absent", Fault(point="kv.get", action="absent")),
        ("kv.read_chunk:short:0", Fault(point="kv.read_chunk", action="short", size_bytes=0)),
        ("kv.read_chunk:flip_byte", Fault(point="kv.read_chunk", action="flip_byte")),
        (
            "kv.read_chunk:flip_byte:7:once",
            Fault(point="kv.read_chunk", action="flip_byte", size_bytes=7, is_once=True),
        ),
        ("decode.step:fail", Fault(point="decode.step", action="fail")),
        ("decode.step:fail:EIO", Fault(point="decode.step", action="fail", error_name="EIO")),
    ],
)
def test_each_form_is_read(text: str, fault: Fault) -> None:
    """The grammar that field reports and drills are written in."""
    assert parse_faults(text) == (fault,)


def test_several_faults_keep_their_order() -> None:
    """A pause before a failure at the same point is a different drill from the reverse."""
    found = parse_faults("decode.step:pause:0.5, decode.step:fail:once,kv.get:absent")
    assert [(one.point, one.action) for one in found] == [
        ("decode.step", Action.PAUSE),
        ("decode.step", Action.FAIL),
        ("kv.get", Action.ABSENT),
    ]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("decode.stop:fail", "no point is named 'decode.stop'; there are "),
        ("decode.step", "names no action; decode.step offers exit, fail, pause"),
        ("decode.step:short:4", "is no action of decode.step; it offers exit, fail, pause"),
        ("decode.step:pause", "pause needs its seconds"),
        ("decode.step:pause:", "pause needs its seconds"),
        ("decode.step:pause:nan", "pause needs its seconds"),
        ("decode.step:pause:-1", "pause needs its seconds"),
        (f"decode.step:pause:{PAUSE_S_MAX + 1}", "pause needs its seconds"),
        ("decode.step:exit:3", "exit takes no argument"),
        ("kv.get:absent:x", "absent takes no argument"),
        ("kv.read_chunk:short", "short counts in whole bytes"),
        ("kv.read_chunk:short:-1", "short counts in whole bytes"),
        ("kv.read_chunk:flip_byte:1.5", "flip_byte counts in whole bytes"),
        ("decode.step:fail:NOPE", "neither a reason"),
        ("decode.step:fail:once:once:once", "one argument at most"),
        ("", "no point is named ''"),
    ],
)
def test_what_is_wrong_is_named(entry: str, says: str) -> None:
    """A drill with a typing error must not pass as a drill without a fault."""
    with pytest.raises(FaultSpecError) as refused:
        parse_faults(entry)
    assert len(refused.value.faults) == 1
    assert says in refused.value.faults[0]
    assert refused.value.exit_code == 2


def test_all_that_is_wrong_is_listed_at_once() -> None:
    """Mending one fault to be told of the next wastes a start each."""
    with pytest.raises(FaultSpecError) as refused:
        parse_faults("nowhere:fail,decode.step:pause:x,kv.get:absent,kv.get:absent")
    assert [fault.split("'")[1] for fault in refused.value.faults] == [
        "nowhere:fail",
        "decode.step:pause:x",
        "kv.get:absent",
    ]
    assert "already has a absent" in refused.value.faults[2]


def test_a_specification_is_bounded() -> None:
    """It also comes over HTTP."""
    with pytest.raises(FaultSpecError, match=str(SPEC_CHARS_MAX)):
        parse_faults("x" * (SPEC_CHARS_MAX + 1))


def test_fail_raises_what_was_asked_for() -> None:
    """A fault of a disk and a fault of a peer take different ways through the code."""
    plain = parse_faults("decode.step:fail")[0].error()
    assert isinstance(plain, ServiceError)
    assert plain.reason is Reason.INTERNAL
    assert plain.metadata == {"fault_point": "decode.step"}
    lost = parse_faults("decode.step:fail:WORKER_LOST")[0].error()
    assert isinstance(lost, ServiceError)
    assert lost.reason is Reason.WORKER_LOST
    broken = parse_faults("kv.before_commit:fail:EIO")[0].error()
    assert isinstance(broken, OSError)
    assert broken.errno == errno.EIO


def test_every_point_can_pause_fail_and_exit() -> None:
    """The kill matrix runs over all of them."""
    assert all(point.actions >= FLOW for point in POINTS.values())
