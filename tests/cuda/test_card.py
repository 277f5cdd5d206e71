"""The card of the stand-in itself: its limits, its streams and events, its page-locked and managed memory."""

import ctypes
import signal
import textwrap

import on_card
import pytest
import torch

from lowmem.core import homes
from lowmem.cudasim.gpus import CARDS
from lowmem.units import MIB
from stand_in import __main__ as command
from stand_in.card_library import counts, order, page_locked_limit

ORDERS = ("issue", "late", "lowest", "highest", "random:1", "random:2")
CUDA = torch.device("cuda")


def printed(program: str, *options: str) -> list[str]:
    return on_card.output("-c", textwrap.dedent(program), options=options).split()


def test_the_card_is_that_of_the_table():
    card, found = CARDS["rtx3060"], torch.cuda.get_device_properties(0)
    assert found.name == "NVIDIA GeForce RTX 3060"
    assert (found.major, found.minor) == card.capability
    assert found.multi_processor_count == card.multiprocessors
    assert found.total_memory == card.memory_bytes


def test_memory_ends_where_the_cards_does():
    free, total = torch.cuda.mem_get_info()
    assert free < total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device=CUDA)
    before = counts()["device_bytes"]
    # Values are on in this process, so that new memory is written; a part of the card will do.
    half = torch.empty(256 * MIB, dtype=torch.uint8, device=CUDA)
    assert counts()["device_bytes"] - before >= half.nbytes
    del half
    torch.cuda.empty_cache()
    assert counts()["device_bytes"] <= before


@pytest.mark.parametrize("expandable", (True, False))
def test_a_card_is_full_to_its_last_page(expandable):
    program = """
        import os
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:%s"
        import torch
        pieces = []
        try:
            while True:
                pieces.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            print(len(pieces), torch.cuda.mem_get_info()[0] >> 20)
        """
    pieces, free = map(int, printed(program % expandable, "--memory", "1GiB"))
    # CUDA's context takes 256 MiB. Expandable segments grow by 20 MiB at a time: 38 times, to 760 of the 768 left.
    assert (pieces, free) == ((11, 768 - 36 * 20) if expandable else (12, 0))


def test_new_memory_is_not_zero():
    before = counts()["device_bytes"]
    new = torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA)
    assert counts()["device_bytes"] > before
    assert new[-MIB:].view(torch.float32).isnan().all()


def test_memory_that_was_given_back_cannot_be_used():
    program = """
        import ctypes, torch
        tensor = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        address = tensor.data_ptr()
        del tensor
        torch.cuda.empty_cache()
        ctypes.memset(address, 0, 1)
        """
    assert on_card.run("-c", textwrap.dedent(program)).returncode == -signal.SIGSEGV


def copied_twice(first: int, waits: bool) -> float:
    """Sends a number to the device on one stream and back on another, which waits for the first if `waits`."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    source, result = (torch.zeros(4, pin_memory=True) for _ in range(2))
    device = torch.zeros(4, device=CUDA)
    torch.cuda.synchronize()
    source.fill_(1)
    with torch.cuda.stream(streams[first]):
        device.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    with torch.cuda.stream(streams[1 - first]):
        if waits:
            copied.wait()
        result.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    return result[0].item()


@pytest.mark.parametrize("name", ORDERS)
def test_a_wait_is_kept_in_every_order(name):
    with order(name):
        assert [copied_twice(first, waits=True) for first in (0, 1)] == [1.0, 1.0]


def test_a_missing_wait_gives_something_else_in_some_order():
    found = {}
    for name in ORDERS:
        with order(name):
            found[name] = [copied_twice(first, waits=False) for first in (0, 1)]
    assert found["issue"] == [1.0, 1.0]  # by luck, as on a card
    assert found["lowest"] != found["highest"]
    assert 0.0 in found["lowest"] and 0.0 in found["highest"]


@pytest.mark.parametrize("pinned, name, arrives", ((False, "late", 1.0), (True, "late", 2.0), (True, "issue", 1.0)))
def test_a_page_locked_source_must_not_change_before_its_copy_is_done(pinned, name, arrives):
    with order(name):
        source = torch.ones(4, pin_memory=pinned)
        device = torch.zeros(4, device=CUDA)
        torch.cuda.synchronize()
        device.copy_(source, non_blocking=True)  # of pageable memory CUDA has made a copy when this returns
        source.fill_(2)
        assert device.cpu()[0].item() == arrives


def incremented_and_multiplied(waits: bool) -> float:
    side = torch.cuda.Stream()
    number = torch.zeros(1, device=CUDA)
    torch.cuda.synchronize()
    number += 1
    with torch.cuda.stream(side):
        if waits:
            side.wait_stream(torch.cuda.default_stream())
        number *= 10
    torch.cuda.synchronize()
    return number.item()


def test_kernels_compute_in_the_order_of_their_streams():
    for name in ORDERS:
        with order(name):
            assert incremented_and_multiplied(waits=True) == 10.0
    with order("highest"):
        assert incremented_and_multiplied(waits=False) == 1.0


@pytest.mark.parametrize("recorded", (True, False))
def test_memory_freed_too_early_is_overwritten(recorded):
    """A tensor that another stream still reads, freed without record_stream: the next of its size takes its place."""
    with order("lowest"):
        side = torch.cuda.Stream()
        one = torch.ones(1 << 18, device=CUDA)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            result = one + one
        if recorded:
            one.record_stream(side)
        del one
        other = torch.full((1 << 18,), 7.0, device=CUDA)
        torch.cuda.synchronize()
        assert (result[0].item() == 2.0) == recorded
        del other


def test_events_are_done_when_what_they_record_is():
    with order("late"):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.ones(8, device=CUDA)
        end.record()
        assert not end.query()
        end.synchronize()
        assert end.query() and start.elapsed_time(end) > 0
        torch.ones(8, device=CUDA)
        end.record()
        assert any(end.query() for _ in range(10_000))  # whoever asks again and again sees it done


def test_page_locked_memory_is_refused_beyond_its_limit():
    small, large = (homes.host_tensor(entries, torch.float32) for entries in (1 << 10, 1 << 20))
    with page_locked_limit(counts()["page_locked_bytes"] + MIB):
        assert homes.page_lock(small) and not homes.page_lock(large)
        assert torch.ones(3, device=CUDA).sum().item() == 3.0  # the refusal is not somebody else's error
    assert homes.page_lock(large)


@pytest.mark.parametrize("ram", (False, True))
def test_a_process_takes_the_ram_that_it_would_with_a_gpu(ram):
    """Without values nothing is copied; with --ram, host memory is taken all the same."""
    program = """
        import torch
        from lowmem.core import homes
        def resident_bytes():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        on_card = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        before = resident_bytes()
        locked = homes.host_tensor(96 << 20, torch.uint8)
        homes.page_lock(locked)
        middle = resident_bytes()
        copied = on_card.cpu()
        print(middle - before >> 20, resident_bytes() - middle >> 20)
        """
    locked, copied = map(int, printed(program, *(["--ram"] if ram else [])))
    expected = (96, 64) if ram else (0, 0)
    assert abs(locked - expected[0]) <= 4 and abs(copied - expected[1]) <= 4


def test_what_was_page_locked_can_be_again():
    for _ in range(2):
        tensor = homes.host_tensor(1 << 12, torch.float32)
        assert homes.page_lock(tensor)
        assert tensor.is_pinned()
        del tensor


def test_managed_memory_moves_by_prefetch_and_makes_room():
    program = """
        import ctypes, os, torch
        from stand_in.card_library import counts, order, page_locked_limit
        cuda = ctypes.CDLL(os.environ["STAND_IN_LIBRARIES"] + "/libcudart.so.13")
        class Location(ctypes.Structure):
            _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]
        device, host = Location(1, 0), Location(2, 0)
        torch.zeros(1, device="cuda")
        address, size = ctypes.c_void_p(), ctypes.c_size_t(64 << 20)
        assert cuda.cudaMallocManaged(ctypes.byref(address), size, 1) == 0
        print(counts()["managed_resident_bytes"] >> 20)
        assert cuda.cudaMemPrefetchAsync(address, size, device, 0, None) == 0
        torch.cuda.synchronize()
        print(counts()["managed_resident_bytes"] >> 20)
        assert cuda.cudaMemPrefetchAsync(address, ctypes.c_size_t(16 << 20), host, 0, None) == 0
        torch.cuda.synchronize()
        print(counts()["managed_resident_bytes"] >> 20)
        room = torch.empty(torch.cuda.mem_get_info()[0] + (32 << 20), dtype=torch.uint8, device="cuda")
        print(counts()["managed_resident_bytes"] >> 20)
        ctypes.memset(address, 1, size.value)
        assert cuda.cudaFree(address) == 0 and counts()["managed_bytes"] == 0
        assert cuda.cudaMemPrefetchAsync(address, size, device, 0, None) != 0
        """
    assert printed(program, "--memory", "1GiB") == ["0", "64", "48", "16"]


def test_an_operator_that_fails_is_an_error_of_the_card():
    program = """
        import torch
        from stand_in import counterparts
        def fails(*arguments, **keywords): raise ValueError("made up")
        counterparts.COUNTERPARTS[torch.ops.aten.add.Tensor] = fails
        torch.ones(1, device="cuda") + torch.ones(1, device="cuda")
        torch.cuda.synchronize()
        """
    result = on_card.run("-c", textwrap.dedent(program), options=("--values",))
    assert result.returncode == 1 and "made up" in result.stderr and "unspecified launch failure" in result.stderr


@pytest.mark.parametrize(
    "arguments, says",
    (
        ([], "give the command after --"),
        (["--"], "there is no command"),
        (["--gpu", "voodoo2", "--", "-c", "1"], "invalid choice"),
        (["--order", "sideways", "--", "-c", "1"], "sideways: give issue"),
        (["--memory", "much", "--", "-c", "1"], "not a size"),
        (["--devices", "9", "--", "-c", "1"], "give 1 to 8"),
    ),
)
def test_bad_usage(arguments, says, capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2
    assert says in capsys.readouterr().err


def test_the_exit_code_is_the_commands():
    assert on_card.run("-c", "raise SystemExit(75)").returncode == 75
    assert (
        on_card.run("-c", "import torch; print(torch.cuda.device_count())", options=("--devices", "2")).stdout == "2\n"
    )


def test_alias_of_a_view():
    whole = torch.arange(12.0, device=CUDA).view(3, 4)
    assert torch.equal(whole.t()[1:, 1].cpu(), torch.tensor([5.0, 6.0, 7.0]))
    assert ctypes.c_float.from_address(whole[2, 3].data_ptr()).value == 11.0


def test_looking_for_pytorch_before_importing_it_leaves_values_on():
    program = 'import importlib.util; importlib.util.find_spec("torch"); import torch; '
    program += 'print((torch.ones(2, device="cuda") + 1).tolist())'
    assert on_card.output("-c", program, options=("--values",)) == "[2.0, 2.0]\n"
