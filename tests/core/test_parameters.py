"""Parameters are views of their part, masters come back exactly, and pieces cover each part once."""

import math

import pytest
import torch

from lowmem.core import parameters as store_module
from lowmem.core import precision
from lowmem.core.decoder import Decoder
from lowmem.core.layout import Layout
from lowmem.core.optimizers import BLOCK, OPTIMIZERS, Hyperparameters, update
from lowmem.core.parameters import Store
from lowmem.core.precision import split
from lowmem.models.build import build_model
from reference import tiny_config, tiny_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAMILIES = ["gpt2", "llama"]  # tied and not


def make(family: str, dtype=torch.float32, optimizer: str = "adamw", states_on_gpu: int = 99) -> tuple[Decoder, Store]:
    decoder = Decoder(build_model(tiny_config(family)))
    return decoder, Store(decoder, CPU, dtype, OPTIMIZERS[optimizer], Layout(1, states_on_gpu=states_on_gpu))


def weights_of(family: str) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in tiny_model(family).named_parameters()}


def inside(tensor: torch.Tensor, flat: torch.Tensor) -> bool:
    first, last = flat.data_ptr(), flat.data_ptr() + flat.nbytes
    return first <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= last


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_views_of_their_part_in_shape_and_dtype(family, dtype):
    shapes = {name: parameter.shape for name, parameter in tiny_model(family).named_parameters()}
    decoder, store = make(family, dtype)
    for name, parameter in decoder.model.named_parameters():
        part = store.part_of(name)
        assert inside(parameter, part.working), name
        assert parameter.shape == shapes[name] and parameter.is_contiguous() and parameter.requires_grad
        assert parameter.dtype is (dtype if parameter.dim() >= 2 else torch.float32)
    assert shapes.keys() == {name for part in store.parts for name in part.names()}


def test_what_is_written_into_a_part_is_what_the_model_computes_with():
    decoder, store = make("gpt2")
    store.write(iter(weights_of("gpt2").items()))
    input_ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        expected = tiny_model("gpt2").eval()(input_ids=input_ids).logits
        assert torch.equal(decoder.model.eval()(input_ids=input_ids).logits, expected)
        for part in store.parts:
            part.working.zero_()
    assert all(parameter.count_nonzero() == 0 for parameter in decoder.model.parameters())


def test_the_decoders_units_hold_the_parameters_of_the_model():
    decoder, _ = make("gpt2")
    for unit in decoder.units:
        for name, parameter in unit.parameters.items():
            assert decoder.model.get_parameter(name) is parameter


def test_a_tied_weight_stays_one_parameter_in_all_its_places():
    decoder, store = make("gpt2")
    model = decoder.model
    assert model.lm_head.weight is model.transformer.wte.weight is decoder.head_weight
    assert decoder.head_weight is decoder.units[0].parameters["transformer.wte.weight"]
    assert [part.name for part in store.parts if "transformer.wte.weight" in part.names()] == ["embedding matrices"]
    assert decoder.model.num_parameters() == tiny_model("gpt2").num_parameters()


def test_an_untied_head_is_the_final_units_own():
    decoder, store = make("llama")
    assert decoder.model.lm_head.weight is decoder.head_weight
    assert store.part_of("lm_head.weight").name == "final matrices"
    assert decoder.model.num_parameters() == tiny_model("llama").num_parameters()


@pytest.mark.quick(12)
@pytest.mark.parametrize("run_elements", [2**20, 50])
@pytest.mark.parametrize("states_on_gpu", [0, 2, 99])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_masters_come_back_as_they_were_written(family, dtype, states_on_gpu, run_elements, monkeypatch):
    """Exactly, for fp16 where its neighbour is normal: below 2**-14 to 2**-40."""
    monkeypatch.setattr(precision, "CHUNK_ELEMENTS", run_elements)
    monkeypatch.setattr(store_module, "CHUNK_ELEMENTS", run_elements)
    weights = weights_of(family)
    _, store = make(family, dtype, states_on_gpu=states_on_gpu)
    store.write((name, run) for name, weight in weights.items() for run in weight.flatten().split(run_elements // 3))
    masters = {name: store.part_of(name).master(name) for name in store.names()}
    runs: dict[str, list] = {}
    for name, run in store.masters():
        assert run.numel() <= run_elements
        runs.setdefault(name, []).append(run.flatten())
    assert list(runs) == store.names()
    assert all(torch.equal(torch.cat(runs[name]), masters[name].flatten()) for name in runs)
    assert masters.keys() == weights.keys()
    for name, weight in weights.items():
        assert masters[name].dtype is torch.float32 and masters[name].shape == weight.shape
        exact = weight.abs() >= 2.0**-14 if dtype is torch.float16 else torch.ones_like(weight, dtype=torch.bool)
        assert torch.equal(masters[name][exact], weight[exact]), name
        assert (masters[name] - weight).abs().max() <= 2.0**-40
        assert not inside(masters[name], store.part_of(name).working), "a master is a copy"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_working_weights_are_the_upper_halves(dtype):
    weights = weights_of("llama")
    decoder, store = make("llama", dtype)
    store.write(iter(weights.items()))
    for name, parameter in decoder.model.named_parameters():
        assert torch.equal(parameter, split(weights[name], parameter.dtype)[0]), name


def test_weights_of_another_dtype_or_layout_are_taken():
    decoder, store = make("gpt2", torch.bfloat16)
    name = "transformer.h.0.mlp.c_fc.weight"
    given = torch.randn(decoder.model.get_parameter(name).shape[::-1]).half().T
    store.write(iter([(name, given)]))
    assert torch.equal(store.part_of(name).master(name), given.float())


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_and_vectors_lie_apart_and_matrices_alone_decay(family):
    decoder, store = make(family, torch.bfloat16)
    for part in store.parts:
        dimensions = {decoder.model.get_parameter(name).dim() for name in part.names()}
        decays = {piece.decay for piece in part.pieces}
        if part.name.endswith("matrices"):
            assert dimensions == {2} and decays == {True} and part.working.dtype is torch.bfloat16
            assert part.state.keys() == {"low", "m", "v"}
        else:
            assert dimensions == {1} and decays == {False} and part.working.dtype is torch.float32
            assert part.state.keys() == {"m", "v"}


def test_parts_come_in_the_order_of_the_units_and_have_names_of_their_own():
    decoder, store = make("gpt2")
    assert [part.unit for part in store.parts] == sorted(part.unit for part in store.parts)
    assert len({part.name for part in store.parts}) == len(store.parts)
    for part in store.parts:
        assert part.name.startswith(decoder.units[part.unit].name)
        assert set(part.names()) <= decoder.units[part.unit].parameters.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_starts_at_a_multiple_of_a_block_and_none_overlap(family):
    decoder, store = make(family, torch.bfloat16)
    for part in store.parts:
        end = 0
        for name in part.names():
            parameter = decoder.model.get_parameter(name)
            start = (parameter.data_ptr() - part.working.data_ptr()) // parameter.element_size()
            assert start % BLOCK == 0
            assert start == end
            end = start + math.ceil(parameter.numel() / BLOCK) * BLOCK
        assert part.working.numel() == end


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pieces_cover_every_part_once_with_the_states_of_their_elements(monkeypatch, optimizer):
    monkeypatch.setattr(store_module, "PIECE", 8 * BLOCK)
    _, store = make("gpt2", torch.bfloat16, optimizer)
    assert [piece for part in store.parts for piece in part.pieces] == store.pieces
    assert max(len(part.pieces) for part in store.parts) > 2
    for part in store.parts:
        assert [piece.start for piece in part.pieces] == [0, *(piece.stop for piece in part.pieces[:-1])]
        assert part.pieces[-1].stop == part.working.numel()
        for piece in part.pieces:
            assert 0 < piece.stop - piece.start <= 8 * BLOCK and piece.start % BLOCK == 0
            assert piece.part is part
            assert piece.state.keys() == part.state.keys()
        for name, flat in part.state.items():
            parts = [piece.state[name] for piece in part.pieces]
            assert parts[0].data_ptr() == flat.data_ptr()
            for number, piece in enumerate(parts):
                piece.fill_(number % 100 + 1)
            assert sum(piece.numel() for piece in parts) == flat.numel() == (flat != 0).sum()
            assert torch.equal(torch.cat(parts), flat)


@pytest.mark.parametrize(("states_on_gpu", "expected"), [(0, 0), (1, 1), (3, 3), (6, 6), (99, 6)])
def test_the_first_units_are_resident_and_the_rest_streamed(states_on_gpu, expected):
    _, store = make("gpt2", torch.bfloat16, states_on_gpu=states_on_gpu)
    assert {piece.part.unit for piece in store.pieces if not piece.streamed} == set(range(expected))
    assert {piece.part.unit for piece in store.pieces if piece.streamed} == set(range(expected, 6))
    assert all(tensor.count_nonzero() == 0 for part in store.parts for tensor in part.state.values())


def test_gradients_come_into_being_with_the_first_call_and_are_views_in_fp32():
    decoder, store = make("gpt2", torch.bfloat16)
    name, other = "transformer.h.1.attn.c_attn.weight", "transformer.h.1.mlp.c_fc.weight"
    part = store.part_of(name)
    assert part.gradient is None
    gradient = part.gradient_of(name)
    assert gradient.shape == decoder.model.get_parameter(name).shape and gradient.dtype is torch.float32
    assert part.gradient.shape == part.working.shape
    gradient.fill_(1)
    assert part.gradient.sum() == gradient.numel() and part.gradient_of(other).count_nonzero() == 0
    assert part.gradient_of(name).data_ptr() == gradient.data_ptr()
    assert store.part_of("transformer.h.2.attn.c_attn.weight").gradient is None


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_padding_between_parameters_stays_zero_through_updates(optimizer):
    """Not so with adamw8bit, whose codes make a small number of a zero beside others; nothing reads padding."""
    _, store = make("llama", torch.bfloat16, optimizer)
    store.write(iter(weights_of("llama").items()))
    for number in (1, 2):
        for piece in store.pieces:
            for name in piece.part.names():
                piece.part.gradient_of(name).fill_(0.1)
            place = slice(piece.start, piece.stop)
            hyper = Hyperparameters(learning_rate=0.1, weight_decay=0.1, update=number)
            working, gradient = piece.part.working[place], piece.part.gradient[place]
            update(OPTIMIZERS[optimizer], working, piece.state, gradient, hyper, piece.decay)
    padded = 0
    for part in store.parts:
        is_padding = torch.ones(part.working.numel(), dtype=torch.bool)
        for name in part.names():
            part.view(is_padding, name).fill_(False)
        padded += is_padding.sum()
        assert part.working[is_padding].count_nonzero() == 0
    assert padded > 0


def test_buffers_are_on_the_stores_device():
    """Seen from real ones that are handed a device of another name: `meta` stands for a GPU."""
    decoder = Decoder(build_model(tiny_config("llama")))
    buffers = dict(decoder.model.named_buffers())
    assert buffers and all(buffer.device == CPU for buffer in buffers.values())
    Store(decoder, torch.device("meta"), torch.bfloat16, OPTIMIZERS["adamw"], Layout(1, states_on_gpu=99))
    assert {name: buffer.device.type for name, buffer in decoder.model.named_buffers()} == dict.fromkeys(
        buffers, "meta"
    )
