"""Choosing the device: what is said of cards that this PyTorch has no code for, seen through an imitated torch.cuda."""

import os
import re

import pytest
import torch

import lowmem
from lowmem import device
from lowmem.device import expandable_segments, select_device, set_environment
from lowmem.errors import InputError
from lowmem.settings import Settings
from runs import python

TODAY = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def card(monkeypatch, capability, built):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1), (13, 0)])
def test_a_card_is_taken_where_there_is_code_for_its_version_or_code_to_compile(monkeypatch, capability):
    card(monkeypatch, capability, TODAY)
    assert select_device("auto") == select_device("cuda") == torch.device("cuda", 0)
    assert select_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "built"),
    [
        ((6, 1), TODAY),
        ((7, 0), TODAY),
        ((12, 0), ["sm_90a", "sm_100"]),
        ((8, 0), ["sm_86"]),
        ((12, 1), ["sm_120a", "compute_120a"]),
    ],
)
def test_a_card_without_code_is_refused_by_name(monkeypatch, capability, built):
    card(monkeypatch, capability, built)
    with pytest.raises(InputError, match=rf"a card \(sm_{capability[0]}{capability[1]}\); it has sm_"):
        select_device("auto")


def test_code_for_one_card_alone_runs_there(monkeypatch):
    card(monkeypatch, (12, 0), ["sm_75", "sm_120a"])
    assert select_device("auto").type == "cuda"


def test_a_gpu_that_is_not_there_is_an_error_only_for_who_asks_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == torch.device("cpu")
    with pytest.raises(InputError, match="--device cuda"):
        select_device("cuda")


def test_a_gpu_that_pytorch_cannot_use_is_no_gpu_and_the_reason_is_said(monkeypatch):
    def init():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by "
            "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
        )

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "glob", lambda pattern: [])
    assert device.why_no_gpu() is None
    monkeypatch.setattr(device, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.cuda, "init", init)
    old = "The NVIDIA driver on your system is too old (found version 12040)"
    assert device.why_no_gpu() == old
    with pytest.raises(InputError, match=rf"--device cuda: {re.escape(old)}; use --device cpu"):
        select_device("cuda")
    settings = Settings(model="gpt2-demo", init="random", seq=16, batch=2)
    with pytest.warns(UserWarning, match=f"because PyTorch cannot use the GPU here: {re.escape(old)}"):
        lowmem.load(settings)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.why_no_gpu() is None


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_set_for_the_allocator_stays_alone(monkeypatch, name):
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:64"})
    set_environment()
    assert [value for key, value in os.environ.items() if key.endswith("ALLOC_CONF")] == ["max_split_size_mb:64"]


@pytest.mark.parametrize(("text", "grow"), [
    (None, True), ("", False), ("expandable_segments:True", True),
    (" expandable_segments : True ,pinned_use_background_threads:True", True), ("expandable_segments:False", False),
    ("backend:native", False),
])  # fmt: skip
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_whether_segments_grow_is_what_the_environment_says(monkeypatch, name, text, grow):
    """As torch 2.14.1 was seen to read it; nothing said is what set_environment says."""
    monkeypatch.setattr(os, "environ", {} if text is None else {name: text})
    assert expandable_segments() == grow
    set_environment()
    assert expandable_segments() == grow


@pytest.mark.parametrize("environment", [
    {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
    {"PYTORCH_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8"},
    {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2]"},
    {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:1"},
    {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
    {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
])  # fmt: skip
def test_what_no_plan_can_be_made_for_is_refused_by_name(monkeypatch, environment):
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(InputError, match="|".join(environment)):
        expandable_segments()


FAULTS = """
import resource
import torch
from lowmem.device import keep_freed_memory, release_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for keep in (False, True, False):
    keep_freed_memory(keep)
    release_freed_memory()
    before = faults()
    for _ in range(40):
        torch.ones(4_000_000).sum()  # 16 MB
    print(faults() - before)
"""


@pytest.mark.quick(2)
@pytest.mark.skipif(not device.chooses_freed_memory(), reason="malloc is not glibc's, or its options are set")
def test_freed_memory_is_kept_for_new_tensors_or_goes_back_to_the_system():
    """Seen to fail: each new tensor had new pages, and a step of GPT-2 on the CPU spent a tenth of its time on them."""
    returned, kept, again = map(int, python("-c", FAULTS).stdout.split())
    assert kept < min(returned, again) / 3  # small blocks take the place of a large one now and then


def test_options_of_malloc_that_the_user_has_set_stay(monkeypatch):
    asked = []
    monkeypatch.setattr(device, "_mallopt", lambda: lambda *option: asked.append(option))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    device.keep_freed_memory(True)
    assert not asked and not device.chooses_freed_memory()
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    device.keep_freed_memory(True)
    assert asked
