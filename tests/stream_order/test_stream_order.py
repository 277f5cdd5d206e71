"""No arrangement of training has a race between streams, and the checker finds missing waits (README.md)."""

import pytest
import torch

from experiments.harness import rows as row_file
from experiments.harness.tables import written
from tests.stream_order import mutations, table
from tests.stream_order.arrangements import ARRANGEMENTS
from tests.stream_order.check import WAYS, checked
from tests.stream_order.checker import HOST, Access, Allocate, Free, Record, Trace, Wait, Work, races
from tests.stream_order.mutation_list import MUTATIONS, Mutation, without_effect
from tests.stream_order.recorder import Recorder

ONE, TWO, THREE = 1, 2, 3  # streams


def found(*operations, reading_waits: bool = True) -> list[str]:
    return list(races(Trace([*operations], ["host", "one", "two", "three"], ["x", "y"]), reading_waits))


def write(stream: int, start: int = 0, stop: int = 8, memory: int = 0) -> Work:
    return Work(stream, "write", (Access(memory, start, stop, True),))


def read(stream: int, start: int = 0, stop: int = 8, memory: int = 0) -> Work:
    return Work(stream, "read", (Access(memory, start, stop, False),))


# --- the project


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_an_arrangement_has_no_race_and_the_bits_of_the_plain_run(name):
    if ARRANGEMENTS[name].case.get("optimizer") == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    result = checked(ARRANGEMENTS[name])
    assert result["races"] == {} and result["different"] == []
    assert result["operations"] > 10_000


FOUND = {  # a mutation that both ways of counting .item() find, and one that only one of them does
    "an update does not wait for its state": (set(WAYS), "unordered: write by copy_ on states in"),
    "updates are made ready without a wait for what computes": ({"reading does not wait"}, "unordered: read by"),
}


@pytest.mark.exhaustive
def test_the_checker_finds_what_is_taken_out():
    chosen = [mutation for mutation in MUTATIONS if mutation.name in FOUND]
    rows = {row["mutation"]: row for row in mutations.tried(chosen, ["deferred"], "checker")}
    assert rows.keys() == FOUND.keys()
    for name, (ways, report) in FOUND.items():
        assert rows[name]["found"].keys() == ways and not rows[name]["failed"] and not rows[name]["wrong"]
        assert all(race["report"].startswith(report) for race in rows[name]["found"].values())


def test_every_mutation_changes_the_one_place_that_it_means():
    assert without_effect(MUTATIONS, row_file.ROOT / "lowmem") == []
    with pytest.raises(ValueError, match="0 places in core/window.py have the text"):
        Mutation("core/window.py", "no such text", "no such text", "").apply(row_file.ROOT / "lowmem")


def test_the_readme_says_what_the_rows_say():
    rows = row_file.read(table.RESULTS)
    assert written(table.README, table.BEGIN) == table.tables(rows)
    assert {row["mutation"] for row in rows if row["method"] == "checker"} == {mutation.name for mutation in MUTATIONS}


# --- the checker


ORDERS = {  # what comes between a write on stream one and one on stream two, and whether it orders them
    "nothing": ([], False),
    "an event": ([Record(0, ONE), Wait(TWO, 0)], True),
    "a chain through a third stream": ([Record(0, ONE), Wait(THREE, 0), Record(1, THREE), Wait(TWO, 1)], True),
    "the host waits for an event": ([Record(0, ONE), Wait(HOST, 0)], True),
    "an event of another stream": ([Record(0, THREE), Wait(TWO, 0)], False),
    "the wait is another stream's": ([Record(0, ONE), Wait(THREE, 0)], False),
    "an event, its wait before it": ([Record(0, TWO), Wait(ONE, 0)], False),
}


@pytest.mark.parametrize("name", ORDERS)
def test_events_and_waits_order_what_is_in_two_streams(name):
    between, ordered = ORDERS[name]
    reports = found(write(ONE), *between, write(TWO))
    assert reports == ([] if ordered else ["unordered: write by write on one and write by write on two, memory of x"])
    assert found(write(ONE), *between, read(TWO)) == [report.replace("write by write on two", "read by read on two")
                                                      for report in reports]  # fmt: skip


def test_an_event_recorded_before_the_work_does_not_cover_it():
    assert found(Record(0, ONE), write(ONE), Wait(TWO, 0), write(TWO))


def test_only_overlapping_bytes_of_which_some_are_written_have_to_be_ordered():
    assert found(read(ONE), read(TWO)) == []
    assert found(write(ONE, 0, 8), write(TWO, 8, 16)) == []
    assert found(write(ONE, 0, 8), write(TWO, 0, 8, memory=1)) == []
    assert found(write(ONE, 0, 8), write(TWO, 7, 16))
    assert found(read(ONE), write(ONE), read(ONE)) == []


def test_an_access_is_remembered_as_long_as_something_may_race_with_it():
    """A later access to a part of the bytes, or a read after a write, does not replace it."""
    first, ordered = write(ONE, 0, 16), [Record(0, ONE), Wait(TWO, 0)]
    assert found(first, *ordered, write(TWO, 0, 8), Record(1, TWO), Wait(THREE, 1), write(THREE, 8, 16)) == []
    assert found(first, *ordered, write(TWO, 0, 8), read(THREE, 8, 16))
    assert found(first, *ordered, read(TWO, 0, 16), read(THREE, 0, 16))
    assert found(read(ONE), *ordered, read(TWO), write(THREE))


def test_what_the_host_reads_orders_only_where_reading_is_counted():
    operations = write(ONE), Record(0, ONE), Wait(HOST, 0, reading=True), write(TWO)
    assert found(*operations, reading_waits=True) == []
    assert found(*operations, reading_waits=False)
    assert found(write(ONE), write(HOST)) and found(write(ONE), Record(0, ONE), Wait(HOST, 0), write(HOST)) == []


def test_freed_memory_may_be_handed_out_by_its_pool_at_once():
    used = Allocate(0, ONE), Record(0, ONE), Wait(TWO, 0), write(TWO), Free(0)  # while stream two is at work on it
    again = Allocate(1, ONE), write(ONE, memory=1)
    in_use = "freed while in use: write by write on two may be under way at an allocation of y"
    assert found(*used, *again) == [
        in_use, "reused while in use: write by write on two and write by write on one, memory of y"
    ]  # fmt: skip
    waits = Record(1, TWO), Wait(ONE, 1)
    assert found(*used, *waits, *again) == []
    assert found(*used, Allocate(1, ONE), *waits, write(ONE, memory=1)) == [in_use], "it may be given to the driver"
    assert found(*used, *waits, Allocate(1, ONE), write(THREE, memory=1)), "a third stream has not waited"
    assert found(*used, Allocate(1, TWO), write(TWO, memory=1)) == [in_use], "another pool has other memory"


# --- the recorder


def recorded(work) -> list:
    """Returns the record of `work(recorder)`, with names for streams, without numbers of events and memories."""
    recorder = Recorder()
    with recorder.imitating() as trace:
        kept = work(recorder)
    del kept
    said = []
    for operation in trace.operations:
        match operation:
            case Work(stream, name, accesses):
                said.append((trace.streams[stream], name, [(a.start, a.stop, a.write) for a in accesses]))
            case Record(_, stream):
                said.append(("record", trace.streams[stream]))
            case Wait(stream, _, reading):
                said.append(("reads" if reading else "waits", trace.streams[stream]))
            case Allocate(_, stream):
                said.append(("allocates", trace.streams[stream]))
            case Free():
                said.append("free")
    return said


def test_an_operator_reads_and_writes_the_bytes_of_its_arguments():
    a, b = torch.zeros(4, 8), torch.ones(8)

    def work(recorder):
        a[1].add_(b[:])  # views are no work
        torch.mul(a[2:], 2.0, out=a[:2])
        return a.T.sum(0)

    assert recorded(work) == [
        ("compute", "add_", [(32, 64, True), (0, 32, False)]),
        ("compute", "mul", [(64, 128, False), (0, 64, True)]),
        ("allocates", "compute"),
        ("compute", "sum", [(0, 128, False), (0, 16, True)]),
    ]


def test_streams_and_events_are_those_of_torch_cuda():
    a = torch.zeros(2)

    def work(recorder):
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        side.wait_event(event)  # never recorded
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a.zero_()
            event.record()
        torch.cuda.current_stream().wait_event(event)
        event.synchronize()
        side.synchronize()

    assert recorded(work) == [
        *(("record", "compute"), ("waits", "another"), ("another", "zero_", [(0, 8, True)]), ("record", "another")),
        *(("waits", "compute"), ("waits", "host"), ("record", "another"), ("waits", "host")),
    ]
    with pytest.raises(Exception):  # noqa: B017  whatever a build without CUDA says
        torch.cuda.Event().record()


def test_memory_is_freed_when_the_last_of_views_and_graphs_is_gone():
    weight = torch.ones(3, requires_grad=True)

    def work(recorder):
        squared = weight * 2.0
        product = (squared * weight).sum()  # whose graph keeps `squared`
        view = squared[1:]
        del squared
        product.backward()
        del product
        recorder.trace.operations.append(Work(HOST, "the graph is gone", ()))
        del view

    said = recorded(work)
    assert said[-2:] == [("host", "the graph is gone", []), "free"]


def test_copies_to_and_from_the_host_are_transfers_and_all_else_there_is_its_own_work():
    device = torch.zeros(2)

    def work(recorder):
        home = recorder.host_tensor(2, torch.float32)
        device.copy_(home, non_blocking=True)
        home.copy_(device)
        doubled = home * 2  # in memory of the host
        doubled.add_(device)  # for which a copy comes first
        return doubled.sum().item() + device.sum().item()

    half, whole = (0, 8, False), (0, 8, True)
    assert recorded(work) == [
        ("compute", "copy_", [whole, half]),
        *(("compute", "copy_", [whole, half]), ("record", "compute"), ("waits", "host")),
        ("host", "mul", [half, whole]),
        *(("compute", "add_ (copied for the host)", [half]), ("record", "compute"), ("waits", "host")),
        ("host", "add_", [whole]),
        *(("host", "sum", [half, (0, 4, True)]), ("host", "_local_scalar_dense", [(0, 4, False)])),
        *(("allocates", "compute"), ("compute", "sum", [half, (0, 4, True)])),
        *(("compute", "_local_scalar_dense", [(0, 4, False)]), ("record", "compute"), ("reads", "host"), "free"),
    ], "no memory of the host is ever handed out again"
