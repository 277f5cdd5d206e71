"""`lowmem.cuda_peak`: the peak of plain PyTorch code that says "cuda", on a machine without a GPU."""

import re
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, get_device_states
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MixtralConfig

import lowmem
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.units import MIB
from runs import ROOT, python

WIDTH, ROWS = 1024, 512
WEIGHTS = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)


class Net(nn.Module):
    """Two layers and GELU, tied to nothing; recomputed if asked."""

    def __init__(self, recompute: bool = False):
        super().__init__()
        self.first, self.second, self.recompute = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), recompute

    def forward(self, x):
        if self.recompute:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x):
        return F.dropout(self.second(F.gelu(self.first(x))), 0.1)


def training(place, recompute=False, autocast=None, **options):
    """Two steps, the model brought to the device by `place`."""

    def run():
        model = place(lambda: Net(recompute))
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        x = torch.zeros(ROWS, WIDTH, device="cuda")
        for _ in range(2):
            with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(x).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def made_there(make):
    with torch.device("cuda"):
        return make()


PLACES = {
    "to": lambda make: make().to("cuda"),
    "to a device": lambda make: make().to(torch.device("cuda", 0)),
    "cuda": lambda make: make().cuda(),
    "made there": made_there,
    "meta": lambda make: make().to("meta"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_models_way_to_the_gpu_does_not_matter(place):
    peak = lowmem.cuda_peak(training(place))
    assert peak.by_name["weights"] == WEIGHTS and peak.by_name["optimizer_states"] >= 2 * WEIGHTS
    assert peak.by_name["gradients"] == WEIGHTS
    assert sum(peak.by_name.values()) == peak.allocated_bytes <= peak.reserved_bytes
    assert replace(peak, seconds=0) == replace(lowmem.cuda_peak(training(made_there)), seconds=0)
    assert peak.seconds > 0  # initialization counts too


def test_the_optimizer_updates_lists_of_tensors_as_on_cuda_unless_it_is_told_otherwise():
    """foreach has a temporary as large as the weights, the root of the second moments; the other two have none."""
    foreach, single, fused = (
        lowmem.cuda_peak(training(made_there, **options)).by_name.get("update", 0)
        for options in ({}, {"foreach": False}, {"fused": True})
    )
    assert foreach >= WEIGHTS > single >= 4 * WIDTH * WIDTH > MIB > fused


def test_recomputed_blocks_keep_nothing_and_run_cudas_functions_again_in_backward():
    kept, recomputed = (lowmem.cuda_peak(lambda again=again: forward_alone(again)) for again in (False, True))
    assert kept.allocated_bytes - recomputed.allocated_bytes > 4 * 16 * ROWS * WIDTH * 4


def forward_alone(recompute: bool):
    model = made_there(lambda: nn.Sequential(*(Net(recompute) for _ in range(4))))
    model(torch.zeros(16 * ROWS, WIDTH, device="cuda", requires_grad=True)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_run_in_autocasts_dtype_and_again_where_blocks_are_recomputed(dtype):
    seen = []

    def block(x, weight):
        seen.append(F.linear(x, weight).dtype)
        with torch.autocast("cuda", enabled=False):
            seen.append(F.linear(x, weight).dtype)
        return F.linear(x, weight)

    def run():
        x, weight = torch.zeros(4, 4, device="cuda"), torch.zeros(4, 4, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype):
            out = checkpoint(block, x, weight, use_reentrant=False)
        out.sum().backward()

    lowmem.cuda_peak(run)
    assert seen == [dtype, torch.float32] * 2


def test_tied_weights_stay_tied_and_code_sees_a_cuda_device():
    def run():
        embedding, head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head).to("cuda")
        assert model[1].weight is model[0].weight
        x = torch.zeros(4, device=model[0].weight.device, dtype=torch.int64)
        assert x.is_cuda and x.device == torch.device("cuda", 0) and torch.device("cuda").type == "cuda"
        assert not torch.zeros(1).is_cuda
        torch.einsum("cuda,ad->cu", torch.ones(1, 2, 3, 4, device="cuda"), torch.ones(4, 3, device="cuda"))
        model(x.pin_memory())

    assert lowmem.cuda_peak(run).by_name["weights"] == 1000 * 64 * 4


def test_the_generators_state_that_checkpoints_keep_is_that_of_a_gpu():
    """Seen to fail once CUDA was initialized: "Device index must not be negative"."""

    def run():
        x = torch.ones(4, 4, device="cuda", requires_grad=True)
        assert x.get_device() == 0 and torch.ones(1).get_device() == -1
        with patch.multiple(torch.cuda, device=Mock(return_value=nullcontext()), get_rng_state=Mock()):
            devices.extend(get_device_states(x)[0])

    devices: list[int] = []
    lowmem.cuda_peak(run)
    assert devices == [0]


def test_nothing_is_saved_over_the_users_files(tmp_path):
    path, config = tmp_path / "checkpoint.pt", GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    path.write_bytes(b"kept")
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.rglob("*") if file.is_file()}

    def saving(save):
        model = GPT2LMHeadModel(config).to("cuda")
        save(model, torch.optim.AdamW(model.parameters()))

    for save in (
        lambda model, _: torch.save(model.state_dict(), path),
        lambda model, _: torch.save(model, path),
        lambda model, optimizer: torch.serialization.save({"settings": [1], "optimizer": optimizer}, path),
        lambda model, _: torch.save(model.lm_head.weight.untyped_storage(), path),
        lambda model, _: model.save_pretrained(tmp_path / "model"),
        lambda model, _: save_file({"head": model.lm_head.weight.detach()}, path),
    ):
        with pytest.raises(lowmem.InputError, match="saves tensors|cannot be simulated without a GPU: .*no data"):
            lowmem.cuda_peak(lambda save=save: saving(save))
    assert before == {
        file: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.rglob("*") if file.is_file()
    }
    lowmem.cuda_peak(lambda: saving(lambda *_: torch.save({"losses": torch.ones(3)}, path)))
    assert torch.load(path)["losses"].tolist() == [1, 1, 1]
    with pytest.raises(lowmem.InputError):
        lowmem.cuda_peak(lambda: open(path).close())  # reading is not saving


@pytest.mark.parametrize("product", [lambda x, w: F.linear(x, w), lambda x, w: x @ w, torch.bmm], ids=range(3))
def test_inference_mode_costs_what_no_grad_costs(product):
    """Seen to fail: a time 18 times too short, and no workspace."""

    def run(mode, enabled=True):
        factors = torch.ones(2, 256, 256, device="cuda"), torch.ones(256, 256, device="cuda")
        with mode(enabled):
            product(factors[0], factors[0] if product is torch.bmm else factors[1])

    without = lowmem.cuda_peak(lambda: run(lambda _: torch.no_grad()))
    assert lowmem.cuda_peak(lambda: run(torch.inference_mode)) == without and without.by_name["workspaces"]
    assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        assert torch.is_inference_mode_enabled()


def test_the_default_device_of_the_code_ends_with_it():
    def run():
        torch.set_default_device("cuda")
        assert torch.ones(256, 1024).is_cuda
        raise ValueError("of the code")

    for _ in range(2):
        with pytest.raises(ValueError, match="of the code"):
            lowmem.cuda_peak(run)
        assert torch.get_default_device() == torch.device("cpu") == torch.ones(1).device
    torch.set_default_device("meta")
    try:
        lowmem.cuda_peak(lambda: torch.set_default_device(torch.device("cuda", 0)) or torch.ones(1))
        assert torch.get_default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)
    with pytest.raises(lowmem.InputError, match="uses cuda:1"):
        lowmem.cuda_peak(lambda: torch.set_default_device("cuda:1"))


def test_a_sentence_says_that_devices_are_mixed_or_a_script_cannot_be_run():
    with pytest.raises(lowmem.InputError, match="a tensor on the CPU and one on 'cuda'"):
        lowmem.cuda_peak(lambda: torch.ones(3) + torch.ones(3, device="cuda"))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    with pytest.raises(lowmem.InputError, match="without a GPU: .*RecursiveScriptModule"):
        lowmem.cuda_peak(lambda: torch.jit.script(layers).to("cuda"))
    lowmem.cuda_peak(lambda: torch.jit.script(layers.to("cuda"))(torch.ones(2, 4, device="cuda")))


def test_a_limit_caps_the_allocator():
    free = lowmem.cuda_peak(training(made_there))
    assert lowmem.cuda_peak(training(made_there), limit=free.reserved_bytes) == free
    with pytest.raises(SimulatedOutOfMemory, match="20.0 MiB"):
        lowmem.cuda_peak(training(made_there), limit="20MiB")
    expanding = lowmem.cuda_peak(training(made_there), expandable_segments=True)
    assert expanding.allocated_bytes <= free.allocated_bytes


def test_the_card_decides():
    small, large = (lowmem.cuda_peak(training(made_there), card) for card in ("T4", "H100"))
    assert small.seconds > large.seconds and small.by_name["workspaces"] < large.by_name["workspaces"]


READING = (
    lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: x.tolist(), lambda x: x.numpy(),
    lambda x: range(x.long().sum()), lambda x: torch.zeros(x.long().sum(), device="cuda"), lambda x: 3 in x,
    lambda x: f"{x.sum():.3f}", lambda x: torch.allclose(x, x), lambda x: torch.allclose(input=x, other=x),
)  # fmt: skip
REFUSED = {
    "nonzero": lambda x: x.nonzero(), "unique": lambda x: x.unique(), "copy out of meta": lambda x: x.cpu(),
    "dummy base class": lambda _: torch.cuda.Event(enable_timing=True),
    "_cuda_setDevice": lambda _: torch.cuda.set_device(0),
    "torch.compile": lambda x: torch.compile(Net())(x),
    "sparse tensors": lambda x: F.embedding(x.long(), nn.Parameter(x[:, None]), sparse=True).sum().backward(),
}  # fmt: skip
SECOND_GPU = (
    lambda x: x.to("cuda:1"), lambda x: x.to(1), lambda x: x.cuda(1), lambda x: Net().to(1), lambda x: Net().cuda(1),
    lambda x: torch.ones(1, device=torch.device("cuda", 1)), lambda x: torch.ones(1, device=1),
    lambda x: torch.ones(1, device=torch.device(1)), lambda x: x.new_zeros(1, device="cuda:1"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("said", "code"),
    [
        *(("reads a tensor's value", code) for code in READING),
        *(("uses cuda:1, and the simulation has one GPU", code) for code in SECOND_GPU),
        *REFUSED.items(),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_code_that_needs_numbers_is_refused_in_a_sentence(said, code):
    with pytest.raises(lowmem.InputError, match=said) as refused:
        lowmem.cuda_peak(lambda: code(torch.zeros(3, device="cuda")))
    assert "\n" not in str(refused.value)
    if "reads" in said:
        assert str(refused.value).startswith("test_peak.py:")


def test_an_error_of_the_code_itself_is_not_taken_for_a_missing_gpu():
    with pytest.raises(AttributeError, match="use_cuda_graphs"):
        lowmem.cuda_peak(lambda: Net().use_cuda_graphs)


def test_what_the_cpu_computes_takes_nothing_of_the_card():
    def code(products):
        x = torch.ones(1024, 1024, requires_grad=True)
        for _ in range(products):
            x = x @ x
        x.sum().backward()  # adds the gradients of both factors
        return torch.ones(1).cuda()

    without, with_products = (lowmem.cuda_peak(lambda n=n: code(n)) for n in (0, 3))
    assert with_products.by_name == without.by_name
    assert with_products.seconds - without.seconds < 5e-4  # what the host takes to launch these operations


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_code_that_uses_no_gpu_is_refused():
    def usual():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        module = torch.nn.Linear(64, 64).to(device)
        module(torch.ones(2, 64, device=device)).sum().backward()

    for code in (usual, lambda: None):
        with pytest.raises(lowmem.InputError, match="put nothing on a GPU; name the device 'cuda' in it: here"):
            lowmem.cuda_peak(code)
    with patch.object(torch.cuda, "is_available", lambda: True):
        with pytest.raises(lowmem.InputError, match="put nothing on a GPU; name the device 'cuda' in it$"):
            lowmem.cuda_peak(lambda: None)


def test_tensors_made_of_numbers_count_and_so_does_what_is_resized():
    """Seen to fail: 64 MiB of torch.tensor(list) were nothing until an operation used them."""
    numbers = [0.0] * MIB

    def made():
        kept = [torch.tensor(numbers, device="cuda"), torch.as_tensor(numbers, device="cuda:0")]
        with torch.device("cuda"):
            kept += [torch.tensor(numbers, requires_grad=True), torch.as_tensor(data=kept[0], device=0)]
        assert torch.tensor(numbers).device.type == "cpu" and kept[2].is_leaf and kept[3] is kept[0]
        kept += [kept[0].new_tensor(numbers), torch.as_tensor(torch.zeros(MIB, requires_grad=True), device="cuda")]
        torch.tensor([kept[0][0], kept[0][1]], device="cuda")

    def resized():
        grown, emptied = torch.empty(0, device="cuda").resize_(MIB), torch.zeros(8 * MIB, device="cuda")
        emptied.untyped_storage().resize_(0)
        del grown

    def written():
        a, b, c = (torch.empty(size, device="cuda") for size in (MIB, 0, 0))
        torch.mul(a, a, out=b)
        c.resize_as_(b)

    assert lowmem.cuda_peak(made).allocated_bytes == 5 * 4 * MIB + 512
    assert lowmem.cuda_peak(written).allocated_bytes == 3 * 4 * MIB
    assert lowmem.cuda_peak(resized).allocated_bytes == 9 * 4 * MIB
    assert lowmem.cuda_peak(lambda: (resized(), resized())).allocated_bytes == 9 * 4 * MIB


def test_devices_by_number_are_the_gpu_and_an_autocast_made_before_is_refused():
    def moved():
        assert nn.Linear(4, 4).to(0)(torch.zeros(2, 4, device=0)).is_cuda and torch.zeros(1).to(0).is_cuda
        with torch.device(0):
            assert torch.zeros(2, device=torch.device(0)).is_cuda and torch.zeros(2).is_cuda

    lowmem.cuda_peak(moved)
    with pytest.warns(UserWarning, match="CUDA is not available") if not torch.cuda.is_available() else nullcontext():
        before = torch.autocast("cuda", torch.bfloat16)
    with pytest.raises(lowmem.InputError, match="was made before this function was called: make it inside"):
        lowmem.cuda_peak(lambda: before(moved)())
    on_cpu = torch.autocast("cpu", torch.bfloat16)
    lowmem.cuda_peak(lambda: on_cpu(moved)())


def test_mixtures_of_experts_run():
    """Seen to fail: transformers asks for the card's compute capability."""
    config = MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip

    def trained():
        model = made_there(lambda: AutoModelForCausalLM.from_config(config))
        sizes.append(4 * sum(parameter.numel() for parameter in model.parameters()))
        ids = torch.zeros(2, 32, dtype=torch.int64, device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()

    sizes: list[int] = []
    assert lowmem.cuda_peak(trained, card="H100").by_name["weights"] == pytest.approx(sizes[0], rel=0.01)


@pytest.mark.parametrize("limit", ["x", "0", -1, True])
def test_a_limit_that_is_no_size_is_refused(limit):
    with pytest.raises(lowmem.InputError, match="limit: .*is not a size"):
        lowmem.cuda_peak(lambda: None, limit=limit)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_code_that_needs_a_gpu_is_refused_and_other_errors_are_its_own():
    with pytest.raises(lowmem.InputError, match="without a GPU"):
        lowmem.cuda_peak(torch.cuda.synchronize)
    with pytest.raises(RuntimeError, match="my accelerator"):
        lowmem.cuda_peak(Mock(side_effect=RuntimeError("my accelerator pedal")))
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        lowmem.cuda_peak(lambda: torch.zeros(2, 3, device="cuda") @ torch.zeros(2, 3, device="cuda"))
    with pytest.raises(lowmem.InputError, match="card abacus: there is no such card.*limit=") as refused:
        lowmem.cuda_peak(lambda: None, "abacus")
    assert "--gpu" not in str(refused.value)


def test_nothing_of_the_simulation_is_left_behind():
    lowmem.cuda_peak(training(made_there, recompute=True, autocast=torch.bfloat16))
    assert torch.zeros(1).device.type == "cpu" and not torch.__future__.get_swap_module_params_on_conversion()
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(torch.zeros(2, 2), torch.zeros(2, 2)).dtype is torch.bfloat16
    model = Net(recompute=True)
    model(torch.zeros(2, WIDTH)).sum().backward()
    assert model.first.weight.grad is not None


@pytest.mark.exhaustive
def test_the_example_in_docs_runs_as_it_stands():
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text("utf-8"), re.DOTALL)[1]
    assert "cuda_peak" in code
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+\.\d GiB", done.stdout)
