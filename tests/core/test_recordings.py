"""Recordings: a repeat has the bits and the memory of the recorded run; what cannot be repeated runs as before."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.harness import trainings
from experiments.harness.trainings import PLAIN, STREAMED, WEIGHTS_STREAMED, make_step
from families import FAMILIES, MORE_FAMILIES
from lowmem.core import operation_recorder as recorder
from lowmem.core.operation_recorder import Recording, called_again
from lowmem.core.recordings import MOST_SHAPES, RUNS_BEFORE, Recordings
from lowmem.models.build import build_model
from lowmem.models.load import random_weights
from reference import make_batch, tiny_model

ALL_FAMILIES = FAMILIES | MORE_FAMILIES
VALUES_DECIDE = {"mixtral", "olmoe", "deepseek_v2"}  # which rows an expert gets


def recorded(step) -> list[object]:
    return [found for known in step.operations.recordings._known.values() for found in known.values()]


UNCHANGED = lambda model: None  # noqa: E731


def train(family: str, repeats: bool, rows=8, change=UNCHANGED, **kind):
    """Three steps. `change` is called with the model before the last one."""
    config = ALL_FAMILIES[family]()
    step, store = make_step(build_model(config), random_weights(config, seed=0), **PLAIN | kind)
    if not repeats:
        step.operations.recordings = None
    batches = [make_batch(seed, rows, 24) for seed in range(3)]
    skippable = step._decoder.skippable_layers
    before_step = lambda step, index: index == 2 and change(step._decoder.model)  # noqa: E731
    outcome = trainings.train(step, store, batches, before_step=before_step)
    assert change is not UNCHANGED or step._decoder.skippable_layers is skippable
    return outcome, step


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", sorted(ALL_FAMILIES, key=lambda name: name not in ("gpt2", "llama", "mixtral")))
def test_repeating_a_segment_changes_no_bit(family):
    """Twelve micro-batches, so that most are repeated; with dropout where the family has it."""
    plain, _ = train(family, repeats=False, segment_blocks=2)
    outcome, step = train(family, repeats=True, segment_blocks=2)
    assert outcome.differences(plain) == []
    found = recorded(step)
    assert found and all((type(one) is Recording) == (family not in VALUES_DECIDE) for one in found)


@pytest.mark.quick(4)
@pytest.mark.parametrize("layout", [STREAMED, WEIGHTS_STREAMED, {"kept": 1 / 3, "group": 2}, {"kept": 4 / 3}])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_repeating_changes_no_bit_wherever_numbers_are(precision, layout):
    plain, _ = train("gpt2", repeats=False, precision=precision)
    outcome, step = train("gpt2", repeats=True, precision=precision, **layout)
    assert outcome.differences(plain) == []
    assert any(type(one) is Recording for one in recorded(step)) == (layout != {"kept": 4 / 3})


def test_a_repeated_segment_calls_no_module_of_the_model():
    step, store = make_step(tiny_model("gpt2"), **PLAIN)
    calls = []

    def forward(run, *arguments, **keywords):
        calls.append(None)
        return run(*arguments, **keywords)

    for block in step._decoder.blocks:
        block.forward = partial(forward, block.forward)
    trainings.train(step, store, [make_batch(seed, 8, 24) for seed in range(5)])
    assert len(calls) == 4 * 2 * (RUNS_BEFORE + 1)  # of twenty micro-batches: blocks, forward and again


def test_segments_of_other_lengths_and_micro_batches_of_other_sizes_are_repeated_too(monkeypatch):
    repeats, run = [], Recording.__call__
    monkeypatch.setattr(Recording, "__call__", lambda self, arguments: repeats.append(None) or run(self, arguments))
    train("gemma3_text", repeats=True, rows=15, segment_blocks=2)  # 8 micro-batches a step, the last with one row
    of_two_rows, of_one = (2 * 2 * (runs - RUNS_BEFORE - 1) for runs in (3 * 7, 3))  # two segments, both directions
    assert len(repeats) == of_two_rows + of_one


def change_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5


CHANGES = {
    "dropout": change_dropout,
    "an activation": lambda model: setattr(model.transformer.h[0].mlp, "act", nn.ReLU()),
    "a number": lambda model: setattr(model.transformer.h[1].ln_1, "eps", 0.1),
    "a hook": lambda model: model.transformer.h[1].register_forward_hook(lambda *given: given[2] * 2),
    "a hook of gradients": lambda model: model.transformer.h[1].mlp.c_fc.weight.register_hook(lambda g: 2 * g),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_user_changes_between_steps_counts(name):
    plain, _ = train("gpt2", repeats=False, change=CHANGES[name])
    outcome, _ = train("gpt2", repeats=True, change=CHANGES[name])
    assert outcome.differences(plain) == []
    assert outcome.losses[2] != train("gpt2", repeats=True)[0].losses[2] or "gradients" in name


@pytest.mark.parametrize("at", [0, 2])
def test_a_product_that_a_users_hook_needs_is_computed_again(at):
    """The layer's product is skipped without the hook, whose gradient needs the product. At the first step, and later:
    then it was skipped before."""
    outcomes = []
    for kept in (0, 4 / 3):  # all blocks run again, and none
        step, store = make_step(tiny_model("gpt2"), **PLAIN | {"kept": kept})
        assert None not in step._decoder.skippable_layers

        def hook(step, index):
            if index == at:
                step._decoder.blocks[1].mlp.c_proj.register_forward_hook(lambda *given: torch.tanh(given[2]))

        batches = [make_batch(seed, 8, 24) for seed in range(3)]
        outcomes.append(trainings.train(step, store, batches, before_step=hook))
    assert outcomes[0].differences(outcomes[1]) == []


def test_a_segment_with_a_users_hook_is_not_recorded():
    step, store = make_step(tiny_model("gpt2"), **PLAIN)
    calls = []
    step._decoder.blocks[1].mlp.register_forward_hook(lambda *_: calls.append(None))
    trainings.train(step, store, [make_batch(seed, 8, 24) for seed in range(5)])
    assert len(calls) == 2 * 20 and recorded(step).count(None) == 2


# --- what can be recorded


def table(rows: int = 5) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.linspace(-1, 1, rows * 3).view(rows, 3))
    module.register_buffer("shift", torch.tensor([0.5, -0.5, 1.0]))
    module.register_buffer("places", torch.tensor([2, 0]))
    return module


def filled(empty: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As a kernel that PyTorch's dispatcher does not see."""
    empty.numpy()[:] = 3 * x.numpy()
    return empty


def written(x: torch.Tensor) -> torch.Tensor:
    halves = [torch.empty(x.shape[0], 1), torch.empty(x.shape[0], 2)]
    torch.ops.aten.split_with_sizes_copy.out(x, [1, 2], 1, out=halves)
    return torch.cat(halves[::-1], 1)


FOREIGN = torch.tensor(3.0)
RECORDED = {
    "products and views": lambda m, x: (x @ m.weight.T @ m.weight).T.contiguous().T + m.shift,
    "changes in place": lambda m, x: x.clone().mul_(2).add_(m.shift),
    "a list of tensors": lambda m, x: torch.cat([x, m.shift.expand_as(x), x[:, :1]], 1),
    "several results": lambda m, x: torch.add(*torch.split(torch.cat([x, 3 * x], 1), 3, 1)),
    "places of numbers": lambda m, x: x[:, m.places],
    "random numbers": lambda m, x: torch.dropout(x, 0.5, True) if called_again(torch.manual_seed, 1) is None else x,
    "numbers of Python": lambda m, x: x * torch.tensor(2.0).add_(x.sum()) + x[:, [0]],
    "a tensor as a keyword argument": lambda m, x: torch.ops.aten.add.Tensor(x, other=m.shift),
    "a list of tensors as a keyword argument": lambda m, x: written(x),
    "its argument": lambda m, x: x.view(-1).view(x.shape),
}
REFUSED = {
    "a value that Python reads": lambda m, x: x * (2 if x.sum().item() > 0 else 3),
    "a mask": lambda m, x: x[x > 0].sum() + x,
    "a choice of rows": lambda m, x: m.weight[x.argmax(0)] * (1 + x.argmax(0).tolist()[0]),
    "another tensor": lambda m, x: x * FOREIGN,
    "a shape that is changed in place": lambda m, x: x.clone().t_().contiguous(),
    "complex numbers": lambda m, x: torch.view_as_real(torch.complex(x, x) * 2j).sum(-1),
    "memory that a kernel of one's own fills": lambda m, x: filled(torch.empty_like(x), x) * 2,
    "another device": lambda m, x: x + x.to("meta").shape[0],
}


def runs(kept: Recordings, function, module: nn.Module, count: int = RUNS_BEFORE + 3, rows: int = 2) -> None:
    for seed in range(count):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = function(module, x.clone())
            found = kept.run("it", lambda x=x: function(module, x), (x,), [], [module])
        assert torch.equal(found, expected), seed


def found_in(kept: Recordings) -> object:
    (found,) = kept._known["it"].values()
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_repeated(name):
    runs(kept := Recordings(), RECORDED[name], table())
    assert type(found_in(kept)) is Recording


@pytest.mark.parametrize("name", REFUSED)
def test_what_values_may_decide_runs_as_it_is(name):
    runs(kept := Recordings(), REFUSED[name], table())
    assert found_in(kept) is None


def test_parameters_are_those_of_the_moment_and_calls_are_made_anew():
    module, x, calls = table(), torch.ones(2, 3), []

    def run():
        called_again(calls.append, x)
        return x @ module.weight.T

    kept = Recordings()
    for number in range(6):
        with torch.no_grad():
            module.weight.data = torch.full((5, 3), float(number))  # as when weights arrive in another buffer
            assert kept.run("it", run, (x,), [], [module])[0, 0] == 3 * number
    assert len(calls) == 6 and all(call is x for call in calls)


def test_what_differs_in_shape_in_other_arguments_or_in_shared_memory_is_recorded_apart():
    kept, x, y = Recordings(), torch.ones(2, 3), torch.full((2, 3), 2.0)
    cases = [
        ([((y,), {"scale": 2})], 4.0), ([((y,), {"scale": 3})], 6.0), ([((x,), {"scale": 3})], 3.0),
        ([((y,), {"times": 3})], 6.0), ([((y.double(),), {"scale": 3})], 6.0), ([(((y, (x,)),), {"scale": 3})], 6.0),
    ]  # fmt: skip
    for extras, expected in (case for case in cases for _ in range(RUNS_BEFORE + 2)):
        ((other,), keywords) = extras[0]
        other = other[0] if isinstance(other, tuple) else other
        run = lambda other=other, keywords=keywords: x * other * [*keywords.values()][0]  # noqa: E731
        assert kept.run("it", run, (x,), extras, []).eq(expected).all()
    assert len(kept._known["it"]) == MOST_SHAPES
    kept._known.clear()
    kept.run("it", lambda: x + 1, (x,), [((object(),), {})], [])
    assert not kept._known, "what cannot be compared is never recorded"


def test_only_the_last_shapes_are_kept():
    kept = Recordings()
    for rows in range(1, 4 + MOST_SHAPES):
        runs(kept, RECORDED["products and views"], table(), rows=rows)
    assert len(kept._known["it"]) == MOST_SHAPES


def test_an_error_while_it_is_recorded_leaves_nothing_behind():
    kept, x, fails = Recordings(), torch.ones(2, 3), iter([False] * RUNS_BEFORE + [True] + [False] * 3)

    def run():
        if next(fails):
            raise torch.OutOfMemoryError
        return x + 1

    for number in range(RUNS_BEFORE + 3):
        if number == RUNS_BEFORE:
            with pytest.raises(torch.OutOfMemoryError):
                kept.run("it", run, (x,), [], [])
            assert recorder._active is None
        else:
            assert kept.run("it", run, (x,), [], []).eq(2).all()
    assert type(found_in(kept)) is Recording


# --- memory


def test_a_result_is_freed_where_it_was_freed():
    alive = []

    def note(tensor):
        alive.append(weakref.ref(tensor.untyped_storage()))

    def run():
        first = x * 2
        called_again(note, first)
        second = first + 1
        called_again(note, second)
        del first
        called_again(dead.append, second)
        return second * 3

    class Dead(list):
        def append(self, _):
            super().append([reference() is None for reference in alive])
            alive.clear()

    kept, x, dead = Recordings(), torch.ones(2, 3), Dead()
    for _ in range(RUNS_BEFORE + 3):
        kept.run("it", run, (x,), [], [])
    assert type(found_in(kept)) is Recording
    assert dead == [[True, False]] * (RUNS_BEFORE + 3)


class Alive(TorchDispatchMode):
    """Notes after each operation the bytes of all results that are alive."""

    def __init__(self):
        super().__init__()
        self.bytes, self.log = {}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for one in () if function.is_view else tree_leaves(result):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage._cdata not in self.bytes:
                    self.bytes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.bytes.pop, storage._cdata)
        if not function.is_view:
            self.log.append((function, sum(self.bytes.values())))
        return result


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_memory_is_that_of_the_recorded_run_at_each_operation(family, monkeypatch):
    logs, run = {}, Recordings.run
    recorder.holders_if_alone()  # once, outside

    def watched(self, name, *arguments):
        with Alive() as alive:
            result = run(self, name, *arguments)
        logs.setdefault(name, []).append(alive.log)
        return result

    monkeypatch.setattr(Recordings, "run", watched)
    config = ALL_FAMILIES[family]()
    step, _ = make_step(build_model(config), random_weights(config, seed=0), **PLAIN | {"segment_blocks": 2})
    step(make_batch(0, 10, 24), 0, 1e-3)
    for name, of_name in logs.items():
        recorded, repeat = of_name[RUNS_BEFORE : RUNS_BEFORE + 2]
        assert recorded == repeat and len(repeat) > 20, name


class Kept(torch.autograd.Function):
    """Triples, and keeps the gradient that it returns."""

    gradients: list = []

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        Kept.gradients.append(3 * gradient)
        return Kept.gradients[-1]


def test_a_gradient_that_something_else_holds_is_not_added_to_in_place():
    """Autograd sums in place what only it holds. The other product comes last, so its gradient is the first one."""
    x, versions = torch.ones(2, 3), []

    def run(product):
        leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            doubled = 2 * leaf
            doubled.register_hook(lambda gradient: versions.append(gradient._version))
            (4 * doubled - product(doubled)).sum().backward()
        return leaf.grad

    for product, in_place in ((Kept.apply, 0), (lambda y: 3 * y, 1), (lambda y: 3 * y.sum() / 6, 0)):
        Kept.gradients.clear()
        alone = recorder.holders_if_alone()
        with recorder.OperationRecorder((x,), [], alone) as noted:
            assert run(product).eq(2).all()
        functions = [call.function for call in noted._calls]
        assert functions.count(torch.ops.aten.add_.Tensor) == versions.pop() == in_place
        assert all(gradient.eq(-3).all() for gradient in Kept.gradients)
