"""T5 in the same pieces, steps and placements as a decoder: against the model itself, against plain training, and bit
for bit among its own layouts."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import MT5Config, T5Config, T5ForConditionalGeneration, UMT5Config, UMT5ForConditionalGeneration

from experiments.harness import trainings
from experiments.harness.trainings import PLAIN, Outcome, make_step
from families import T5
from lowmem.core import accumulation
from lowmem.core.batch import Batch
from lowmem.core.encoder_decoder import take_apart
from lowmem.errors import InputError
from lowmem.models.build import build_model, model_from_config
from reference import VOCABULARY, plain_training
from runs import at_call, interrupt

SOURCE, TARGET, BATCH = 20, 12, 4
RATE = 3e-3
GENTLE_RATE = 1e-3


def t5_config(gated: bool = False, dropout: float = 0.0, kind=T5Config, **more):
    """That of families.py; gated as in version 1.1."""
    return kind(**T5 | {"dropout_rate": dropout, "feed_forward_proj": "gated-gelu" if gated else "relu"}, **more)


def t5(gated: bool = False, dropout: float = 0.0, seed: int = 0, gentle: bool = False, **more) -> nn.Module:
    """fp32, on the CPU, with weights at which attention and its biases matter; or, `gentle`, as transformers draws
    them, so that rounding differences do not grow from step to step: T5's scores are not scaled down."""
    torch.manual_seed(seed)
    model = model_from_config(t5_config(gated, dropout, **more))
    with torch.no_grad():
        if gentle:
            return model
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.normal_(1, 0.1)
        for stack in (model.encoder, model.decoder):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_(std=2)
    return model


def make_batches(count: int, seed: int = 1) -> list[Batch]:
    """Sources and targets of several lengths, padded on the right; token 0 is real, too, so that nothing can be told
    from it."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(count):
        source = torch.randint(0, VOCABULARY, (BATCH, SOURCE), generator=generator)
        target = torch.randint(0, VOCABULARY, (BATCH, TARGET), generator=generator)
        target[:, 1::2] = target[:, :-1:2] * 3 % VOCABULARY
        mask = torch.arange(SOURCE) < torch.tensor([SOURCE, 3 + index % 9, 1, 15])[:, None]
        labels = target.clone()
        labels[index % BATCH, 7:] = -100
        inputs = torch.cat([torch.zeros(BATCH, 1, dtype=torch.int64), target[:, :-1]], dim=1)
        batches.append(Batch(torch.cat([source, inputs], dim=1), labels, source_mask=mask))
    return batches


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(
        input_ids=batch.input_ids[:, :SOURCE], attention_mask=batch.source_mask.long(),
        decoder_input_ids=batch.input_ids[:, SOURCE:], use_cache=False,
    ).logits  # fmt: skip


class OfRows(nn.Module):
    """A stock model, as the reference calls one: the rows of `batches`, one batch after the other."""

    def __init__(self, model: nn.Module, batches: list[Batch]):
        super().__init__()
        self.model, self._batches = model, iter(batches)

    def forward(self, input_ids: Tensor, use_cache: bool):
        batch = next(self._batches)
        assert batch.input_ids is input_ids
        return self.model(
            input_ids=input_ids[:, :SOURCE], attention_mask=batch.source_mask.long(),
            decoder_input_ids=input_ids[:, SOURCE:], use_cache=use_cache,
        )  # fmt: skip


def stock(model: nn.Module) -> nn.Module:
    """The same weights in transformers' own model with its eager attention."""
    own = T5ForConditionalGeneration._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    own.load_state_dict(model.state_dict())
    return own


def train(batches, *, gated=False, dropout=0.1, **kind) -> Outcome:
    return trainings.train(*make_step(t5(gated, dropout), **kind), batches, [RATE] * len(batches))


@pytest.mark.parametrize("kind", [T5Config, MT5Config])
@pytest.mark.parametrize("gated", [False, True])
def test_pieces_make_the_whole(gated, kind):
    model = t5(gated, kind=kind).eval()
    batch = make_batches(1)[0]
    with torch.no_grad():
        whole = logits_of(model, batch)
        if kind is T5Config:
            assert torch.equal(whole, logits_of(stock(model).eval(), batch)), (
                "attention is transformers' own, bit for bit"
            )
        pieces = take_apart(model).logits(*batch.inputs)
    assert torch.equal(pieces, whole)
    assert torch.equal(logits_of(model, batch), whole), "taken apart, the model is what it was"


def test_what_is_padding_changes_nothing():
    model = t5().eval()
    batch = make_batches(1)[0]
    changed = batch.input_ids.clone()
    changed[:, :SOURCE][~batch.source_mask] += 1
    decoder = take_apart(model)
    with torch.no_grad():
        assert torch.equal(
            decoder.logits(*batch.inputs), decoder.logits(changed % VOCABULARY, None, None, batch.source_mask)
        )


def test_units_have_each_parameter_once_and_the_shared_ones_first():
    decoder = take_apart(build_model(t5_config()))
    assert decoder.needs_sources
    assert any(parameter is decoder.head_weight for parameter in decoder.units[0].parameters.values())
    names = [name for unit in decoder.units for name in unit.parameters]
    assert sorted(names) == sorted(name for name, _ in decoder.model.named_parameters())
    assert [unit.name for unit in decoder.units] == ["embedding", *(f"block {index}" for index in range(5)), "final"]
    assert set(decoder.units[0].parameters) == {
        "shared.weight",
        *(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for stack in ("encoder", "decoder")),
    }
    assert "encoder.final_layer_norm.weight" in decoder.units[4].parameters
    assert set(decoder.units[-1].parameters) == {"decoder.final_layer_norm.weight"}
    used = [block.layer[0].SelfAttention.__dict__["relative_attention_bias"] for block in decoder.blocks]
    assert all(use is own for use, own in zip(decoder.shared, used, strict=True))


def test_other_encoder_decoders_are_refused_by_name():
    model = UMT5ForConditionalGeneration(t5_config(kind=UMT5Config))
    with pytest.raises(InputError, match="UMT5ForConditionalGeneration is .*; of these only T5 and mT5"):
        take_apart(model)


@pytest.mark.parametrize("fields, reason", [
    ({"decoder_start_token_id": 5000}, "decoder_start_token_id, which is 5000, and the model has the ids 0 to 96"),
    ({"decoder_start_token_id": "0"}, "decoder_start_token_id, which is '0'"),
    ({"decoder_start_token_id": None, "pad_token_id": -1}, "decoder_start_token_id, which is -1"),
    ({"relative_attention_num_buckets": 1}, "relative_attention_num_buckets is 1, and it must be at least 4"),
    ({"relative_attention_max_distance": 4}, "is 8, and it must be at least 4 and at most 7"),
])  # fmt: skip
def test_fields_that_index_past_a_table_are_refused(fields, reason):
    with pytest.raises(InputError, match=reason):
        take_apart(T5ForConditionalGeneration(T5Config(**T5 | fields)))


@pytest.mark.quick(2)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("clip_norm", [0.5, None])
def test_fp32_follows_plain_transformers_and_torch_adamw(gated, clip_norm):
    """30 steps on three batches, of micro-batches with other numbers of labels. Largest relative
    deviation of a loss: 2.1e-7 measured, 1e-6 allowed, as for decoders; of a weight, as the norm of the difference:
    1.1e-6, 1e-5 allowed (Adam divides the rounding of small gradients by their own size)."""
    batches = 10 * make_batches(3)
    model = t5(gated, gentle=True)
    plain = stock(model)
    expected = list(
        plain_training(
            OfRows(plain, batches), [(batch.input_ids, batch.labels) for batch in batches],
            learning_rates=[GENTLE_RATE] * len(batches), clip_norm=clip_norm,
        )
    )  # fmt: skip
    assert expected[-1] < expected[0] - 0.15, "the reference must learn something"
    step, store = make_step(model, clip_norm=clip_norm, group=2, segment_blocks=2, states_on_gpu=0)
    losses = [step(batch, index, GENTLE_RATE).loss for index, batch in enumerate(batches)]
    step.flush()
    assert losses == pytest.approx(expected, rel=1e-6)
    theirs = dict(plain.named_parameters())
    weights: dict[str, list[Tensor]] = {}
    for name, run in store.masters():
        weights.setdefault(name, []).append(run.flatten())
    for name, runs in weights.items():
        other = theirs[name].detach().flatten()
        assert (torch.cat(runs) - other).norm() < 1e-5 * other.norm(), name


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_placement_and_order_change_no_bit(precision):
    """Groups, segments, what is kept, states in RAM and on a disk, weights and boundaries in RAM; with dropout."""
    batches = make_batches(4)
    kind = {"precision": precision, "micro_batch": 1, "gated": precision == "bf16"}
    plain = train(batches, **kind | PLAIN)
    assert all(plain.updated) and min(plain.norms) > 0.5, "clipping must bite"
    for case in (
        {"group": 2, "segment_blocks": 2, "states_on_gpu": 2},
        {"group": BATCH, "segment_blocks": 5, "states_on_gpu": 0},
        {"group": BATCH, "segment_blocks": 1, "fate": "dropped"},
        {"kept": 99},
        {"group": 2, "kept": 4},
        {"group": 2, "kept": 6, "states_on_gpu": 3},
        {"group": BATCH, "weights_on_gpu": 1, "states_on_gpu": 0, "boundaries_in_ram": True},
        {"group": 2, "weights_on_gpu": 4, "states_on_gpu": 0, "segment_blocks": 3, "kept": 2},
        {"group": 2, "states_on_disk": 99, "states_on_gpu": 0},
        {"group": BATCH, "fate": "sent", "states_on_gpu": 0, "segment_blocks": 2},
    ):
        assert train(batches, **kind | case).differences(plain) == [], case
    in_backward = {"clip_norm": None, "group": BATCH, "fate": "applied"}
    if precision != "fp16":
        unclipped = train(batches, **kind | PLAIN | {"clip_norm": None})
        assert train(batches, **kind | in_backward).differences(unclipped) == []
        assert (
            train(batches, **kind | in_backward | {"weights_on_gpu": 1, "states_on_gpu": 0}).differences(unclipped)
            == []
        )


def test_16_bit_training_stays_beside_autocast():
    """The distance of the loss curve from fp32's is at most that of plain bf16 autocast times 1.5, as for decoders."""
    batches = make_batches(20)

    def plain(autocast: bool) -> list[float]:
        rows = [(batch.input_ids, batch.labels) for batch in batches]
        model = OfRows(stock(t5(True)), batches)
        return list(plain_training(model, rows, learning_rates=[RATE] * len(rows), clip_norm=0.5, autocast=autocast))

    def distance(losses: list[float]) -> float:
        return sum(abs(loss - true) for loss, true in zip(losses, exact, strict=True))

    exact = plain(autocast=False)
    ours = train(batches, gated=True, dropout=0.0, precision="bf16", micro_batch=4).losses
    assert 0 < distance(ours) <= 1.5 * distance(plain(autocast=True))


def test_a_step_after_one_that_was_interrupted_adds_nothing_of_that(monkeypatch):
    """Also not to the shared biases' gradients, of which each use has its own."""
    batch, (uninterrupted, _) = make_batches(1)[0], make_step(t5())
    at_call(monkeypatch, accumulation, "_add_to_own", interrupt, 2)
    step, _ = make_step(t5())
    with pytest.raises(KeyboardInterrupt):
        step(batch, 0, RATE)
    assert step(batch, 0, RATE) == uninterrupted(batch, 0, RATE)


def test_what_is_no_batch_of_this_model_is_refused_and_changes_nothing():
    step, store = make_step(t5())
    batch = make_batches(1)[0]
    before = dict(store.masters())
    for wrong, reason in (
        (Batch(batch.input_ids, batch.labels), "its batches need a source_mask"),
        (Batch(batch.input_ids, batch.labels[:, :5], source_mask=batch.source_mask), "32 in a row, and labels 5"),
        (Batch(batch.input_ids, batch.labels, source_mask=batch.source_mask[:, :9]), "behind sources of 9; each"),
    ):
        with pytest.raises(InputError, match=reason):
            step(wrong, 0, RATE)
        with pytest.raises(InputError, match=reason):
            step.evaluate(wrong)
    step.flush()
    assert all(torch.equal(before[name], after) for name, after in store.masters())
    with pytest.raises(InputError, match="no source_mask"):
        batch.check(has_sources=False)
    with pytest.raises(InputError, match="4 in a row, and labels 3; each"):
        Batch(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)).check(has_sources=False)
