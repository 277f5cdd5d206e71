"""The variables with which torchrun starts a process, and those of other programs."""

import socket

import pytest

from lowmem.distributed.launch import first_rank_here, joined, launched_rank, local_ranks
from lowmem.errors import InputError, LowmemError

TORCHRUN = {
    "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


def set_variables(monkeypatch, **changed: str | None) -> None:
    for name, value in (TORCHRUN | changed).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("RANK", None, "RANK is not set"), ("RANK", "", "RANK is '', not a number"), ("MASTER_PORT", "abc", "is 'abc'"),
    ("MASTER_ADDR", None, "MASTER_ADDR is not set"),
    ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'"), ("LOCAL_WORLD_SIZE", "-1", "LOCAL_WORLD_SIZE is '-1'"),
])  # fmt: skip
def test_variables_that_are_missing_or_no_numbers_are_refused(monkeypatch, name, value, said):
    """Seen to fail: ended in a traceback."""
    set_variables(monkeypatch, **{name: value})
    assert launched_rank() == first_rank_here() == 0
    with pytest.raises(InputError, match=f"{said}.*: start with torchrun, or unset WORLD_SIZE"), joined("cpu"):
        pass


@pytest.mark.parametrize(("name", "value"), [("RANK", "2"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "99999")])
def test_variables_that_do_not_fit_together_are_refused(monkeypatch, name, value):
    """Seen to fail: the process waited for the others, for two hours."""
    set_variables(monkeypatch, **{name: value})
    with pytest.raises(InputError, match=f"{name}={value} .*do not fit together: start with torchrun"), joined("cpu"):
        pass


@pytest.mark.parametrize("count", [None, "", "1"])
def test_one_process_needs_no_variables(monkeypatch, count):
    set_variables(monkeypatch, WORLD_SIZE=count, RANK="", LOCAL_RANK=None, LOCAL_WORLD_SIZE="", MASTER_PORT="x")
    with joined("cpu") as ranks:
        assert ranks.count == local_ranks() == 1


def test_ranks_that_do_not_find_one_another_say_where_they_looked(monkeypatch):
    """Seen to fail: another rank was said to have ended."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        set_variables(monkeypatch, MASTER_PORT=port)
        with pytest.raises(LowmemError, match=f"the ranks do not find one another at 127.0.0.1:{port} "), joined("cpu"):
            pass
