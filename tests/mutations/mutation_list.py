"""Mistakes that a training step could have and still train: each one changed text of lowmem/ or of an experiment, which
occurs there once. No loss curve shows them; the tests have to find them (README.md)."""

from dataclasses import dataclass

from tests.stream_order import mutation_list


@dataclass(frozen=True)
class Mutation(mutation_list.Mutation):
    """A mutation. `tests`: files of tests/ that have to find it, the fastest first, or single tests if a file takes
    minutes. `package`: the folder that `file` is in."""

    # A file is not named together with one of its tests, which pytest would run in the file's order.
    tests: tuple[str, ...] = ()
    package: str = "lowmem"


ADAM, SCHEDULE, PRECISION = "core/test_optimizers.py", "run/test_learning_rate.py", "core/test_precision.py"
LOSS, DATA, STORE, STEP = "core/test_loss.py", "data/test_dataset.py", "core/test_parameters.py", "core/test_step.py"
ACTIVATIONS, NORMS, RECORDINGS = "core/test_activations.py", "core/test_norms.py", "core/test_recordings.py"
SUMS = "core/test_residual_sums.py"
DROPPED = f"{SUMS}::test_a_sum_without_a_norm_is_that_of_fp64_within_a_rounding_for_the_same_mask"
ROTARY = "core/test_rotary.py"
RECOMPUTE, PRODUCTS, STREAMING = "core/test_recompute.py", "core/test_products.py", "core/test_window.py"
UNCUT_MLP = """\
        "transformer.h.*.mlp": s.enters,
        "transformer.h.*.mlp.c_fc": s.column(inner),
        "transformer.h.*.mlp.c_proj": s.row(inner),
"""
LIKE_TRANSFORMERS = f"{STEP}::test_fp32_follows_plain_transformers_and_torch_adamw"
PLACEMENT = f"{STEP}::test_placement_and_order_change_no_bit"
EVALUATION = f"{STEP}::test_evaluation_sees_the_last_update_and_leaves_training_alone"
OVERFLOW = f"{STEP}::test_an_overflow_skips_the_update_whole_and_halves_the_scale"
MASKS = f"{STEP}::test_every_run_step_and_micro_batch_has_dropout_masks_of_its_own"
SUMMED = f"{STEP}::test_gradients_of_micro_batches_are_summed_in_fp32"
NORM = f"{STEP}::test_the_norm_is_that_of_the_fp32_gradients_without_their_scale"
CLIPPED = f"{STEP}::test_gradients_are_clipped_by_their_norm_and_1e_minus_6_as_torch_clips_them"
UNSCALED = f"{STEP}::test_an_update_in_fp16_is_that_of_fp32_but_for_rounding"
EMBEDDINGS = f"{STEP}::test_gradients_of_embeddings_that_were_dropped_out_are_those_of_plain_autograd"
DOCUMENTS = f"{STEP}::test_packed_documents_train_as_in_rows_of_their_own"
RAGGED, PACKING = "core/test_ragged.py", "data/test_packing.py"
MEAN = f"{STEP}::test_the_loss_of_an_evaluation_is_a_mean_over_tokens_and_not_over_batches"

RANKS = "distributed/test_bits.py::test_ranks_train_as_one_process_that_sums_in_as_many_parts"
MACHINES, AGREEMENT = f"{RANKS}[4-2-bf16]", "distributed/test_agreement.py"

RUN_AGAIN = "            output = _run(decoder, segment.blocks, boundary, extras, dropout)"
SEGMENT_FORWARD = "segment, hidden[index], extras[index], work.dropouts[index]"
EMBED_BACKWARD = """\
        hidden, _ = self.decoder.embed(*micro_batch.inputs)
        hidden.backward(gradient)
"""
CORRECTIONS = "math.sqrt(correction2), hyper.epsilon, step_size"
DENOMINATOR = "denominator = torch.sqrt(v, out=scratch).div_(root).add_(epsilon)"
EVALUATE = """\
        self.flush()
        self._decoder.model.eval()
"""
DROPOUTS = "dropouts = [Dropout(self._seed, step, index) for index in own]"
SUMMED_LOSS = "return math.fsum(loss for loss, _ in sums), sum(tokens for _, tokens in sums)"
NEXT_UPDATE = "self.hyper, learning_rate=learning_rate, update=self.hyper.update + 1, gradient_scale=gradient_scale"
STOPPED_AT = 'self.step.updates = state["updates"]'
CAST_NORM = "return type(module).forward(module, x.float(), *gate, **keywords).to(x.dtype)"


def _change(file: str, name: str, old: str, new: str, *tests: str, package: str = "lowmem") -> Mutation:
    return Mutation(file, name, old, new, tests=tests, package=package)


# fmt: off
MUTATIONS = (
    # the update
    _change("core/optimizers.py", "Adam's first moment is not corrected",
        "step_size = 1 - hyper.learning_rate * weight_decay, hyper.learning_rate / correction1",
        "step_size = 1 - hyper.learning_rate * weight_decay, hyper.learning_rate", ADAM),
    _change("core/optimizers.py", "Adam's second moment is not corrected", CORRECTIONS, "1.0, hyper.epsilon, step_size",
        ADAM),
    _change("core/optimizers.py", "beta2 takes beta1's place in m", "return decay_factor, 1 - hyper.beta1,",
        "return decay_factor, 1 - hyper.beta2,", ADAM),
    _change("core/optimizers.py", "epsilon stands inside the square root", DENOMINATOR,
        "denominator = torch.add(v, epsilon, out=scratch).sqrt_().div_(root)", ADAM),
    _change("core/optimizers.py", "epsilon is corrected with the second moment", DENOMINATOR,
        "denominator = torch.sqrt(v, out=scratch).add_(epsilon).div_(root)", ADAM),
    _change("core/optimizers.py", "weight decay goes through the moments, as in Adam with L2",
        "    master.mul_(decay_factor)\n", "    gradient.add_(master, alpha=weight_decay)\n", ADAM),
    _change("core/optimizers.py", "SGD does not scale its gradient",
        "    gradient.mul_(hyper.gradient_scale)\n    master.mul_(1 - hyper", "    master.mul_(1 - hyper", ADAM),
    _change("core/optimizers.py", "the low half of a master weight is not written",
        'split_into(master, part, of_state["low"], scratch)', "part.copy_(master)", ADAM),
    _change("core/parameters.py", "the low half of a loaded weight is not written", "            if low is not None:\n",
        "            if False:\n", STORE),
    _change("core/parameters.py", "biases and norms decay",
        "self.streamed, self.decay = self.part.streamed, self.part.is_matrices",
        "self.streamed, self.decay = self.part.streamed, True", STORE, LIKE_TRANSFORMERS),
    _change("core/window.py", "m and v are swapped where they are written back",
        "_different((place, slot.inside[name]) for",
        '_different((place, slot.inside[{"m": "v", "v": "m"}.get(name, name)]) for', STREAMING, PLACEMENT),
    _change("core/deferred_updates.py", "an update has the learning rate of the one before", NEXT_UPDATE,
        NEXT_UPDATE.replace("=learning_rate", "=self.hyper.learning_rate or learning_rate"), LIKE_TRANSFORMERS),
    _change("core/deferred_updates.py", "an update clips as the one before", NEXT_UPDATE,
        NEXT_UPDATE.replace("=gradient_scale", "=self.hyper.gradient_scale if self.hyper.update else gradient_scale"),
        LIKE_TRANSFORMERS),
    _change("run/learning_rate.py", "the learning rate of the warm-up is one update late",
        "self.peak * (update + 1) / self.warmup_updates", "self.peak * update / self.warmup_updates", SCHEDULE),
    _change("run/train.py", "the learning rate is that of the next update", "session.course.rate(step.updates)",
        "session.course.rate(step.updates + 1)", "run/test_scripts.py"),
    # the gradient
    _change("core/step.py", "gradients are not divided by the trained tokens", "step, self.loss_scale.scale / tokens)",
        "step, self.loss_scale.scale)", LIKE_TRANSFORMERS),
    _change("core/step.py", "each micro-batch counts the same, whatever its tokens", "work.dropouts[index], work.scale",
        "work.dropouts[index], self.loss_scale.scale / len(work.micro_batches) / "
        "max(work.micro_batches[index].trained_tokens, 1)", LIKE_TRANSFORMERS),
    _change("core/batch.py", "a micro-batch is as wide as its shortest row",
        "shapes.append((rows_at[first], widths[first]))",
        "shapes.append((rows_at[first], widths[first + rows_at[first] - 1]))", RAGGED),
    _change("data/batches.py", "examples in one row see each other", "starts[row, first] = first > 0",
        "starts[row, first] = False", PACKING),
    _change("core/batch.py", "ignored labels count as trained tokens", "int((self.labels != IGNORED_LABEL).sum())",
        "self.labels.numel()", DATA),
    _change("core/accumulation.py", "a micro-batch's gradient takes the place of those before",
        "part.gradient_of(name).add_(gradient)", "part.gradient_of(name).copy_(gradient)", LIKE_TRANSFORMERS),
    _change("core/lookups.py", "the embedding of the padding id is trained", "if ctx.padding_idx is not None:",
        "if False:", "core/test_lookups.py"),
    _change("core/lookups.py", "each position of a token adds the sum of all of them",
        "first.gather(0, ids), len(ids), -1, False)",
        "first.gather(0, ids), len(ids), -1, False)[first.gather(0, ids)]", "core/test_lookups.py"),
    _change("core/accumulation.py", "gradients are summed in 16 bit", "part.gradient_of(name).add_(gradient)",
        "part.gradient_of(name).copy_((part.gradient_of(name).to(part.working.dtype) + "
        "gradient.to(part.working.dtype)))", SUMMED),
    _change("core/kernels/operators.py", "fused products are added to their accumulators in 16 bit",
        "accumulator.addmm_(left.float(), right.float())",
        "accumulator.copy_(accumulator.to(left.dtype) + left @ right)", "core/test_fused.py"),
    _change("core/loss.py", "the head's gradients are summed in 16 bit",
        "band += gradient[:, word : word + _BAND_WORDS].T @ chunk",
        "band.copy_(band.to(weight.dtype) + gradient[:, word : word + _BAND_WORDS].T @ chunk)", LOSS),
    _change("core/operations.py", "the embedding's lookup gives a tied weight no gradient", EMBED_BACKWARD,
        EMBED_BACKWARD.replace("hidden.backward(gradient)", "hidden.backward(gradient * 0)"), LIKE_TRANSFORMERS),
    _change("core/operations.py", "the embedding's backward takes positions from 0 on", EMBED_BACKWARD,
        EMBED_BACKWARD.replace("*micro_batch.inputs", "micro_batch.input_ids, None, micro_batch.document_ids"),
        DOCUMENTS),
    _change("core/loss.py", "a soft cap's slope is left out", "gradient if slope is None else gradient.mul_(slope)",
        "gradient", LOSS),
    # the loss and what it is of
    _change("data/batches.py", "labels are not shifted", "np.where(trained, tokens, IGNORED_LABEL)[1:]",
        "np.where(trained, tokens, IGNORED_LABEL)[:-1]", DATA),
    _change("data/batches.py", "the first token of an answer is not trained",
        "np.where(trained, tokens, IGNORED_LABEL)[1:]", "np.where(trained[:-1], tokens[1:], IGNORED_LABEL)", DATA),
    _change("core/loss.py", "ignored labels count in the loss", "counted = targets != IGNORED",
        "counted = targets == targets", LOSS),
    _change("core/step.py", "the second micro-batch's masks and positions are those of the first, in forward",
        SEGMENT_FORWARD, SEGMENT_FORWARD.replace("extras[index]", "extras[0]"), DOCUMENTS),
    _change("core/step.py", "the second micro-batch's masks and positions are those of the first, in backward",
        "saved[index].pop(), extras[index],", "saved[index].pop(), extras[0],", DOCUMENTS),
    _change("core/recompute.py", "a recomputed block knows no document mask", RUN_AGAIN,
        RUN_AGAIN.replace("extras", "[(rest, keys | dict.fromkeys(keys.keys() & {\"attention_mask\"})) for rest, keys "
        "in extras]"), DOCUMENTS),
    _change("run/evaluation.py", "the evaluation is a mean of batches' means", SUMMED_LOSS,
        SUMMED_LOSS.replace("loss for loss, _ in sums)", "loss / tokens for loss, tokens in sums) * sums[0][1]"), MEAN),
    _change("run/evaluation.py", "the loss of several held-out texts is the mean of theirs",
        "math.fsum(losses) / sum(tokens)",
        "math.fsum(map(float.__truediv__, losses, map(float, tokens))) / len(losses)", "run/test_scripts.py"),
    _change("data/batches.py", "a share of a text is the same share in every epoch",
        "place, end = epoch * self.in_epoch, (epoch + 1) * self.in_epoch", "place, end = 0, self.in_epoch",
        "data/test_mixtures.py"),
    _change("core/step.py", "an evaluation does not see the last update", EVALUATE,
        EVALUATE.replace("        self.flush()\n", ""), EVALUATION),
    _change("core/step.py", "an evaluation drops out", EVALUATE,
        EVALUATE.replace("self._decoder.model.eval()", "self._decoder.model.train()"), EVALUATION,
        "run/test_scripts.py"),
    _change("core/step.py", "after an evaluation nothing is dropped out any more",
        "        self._decoder.model.train()\n", "", EVALUATION),
    # the norm, clipping, and steps that are skipped
    _change("core/step.py", "the factor that clips lacks its 1e-6", "self._clip_norm / (norm + 1e-6)",
        "self._clip_norm / norm", CLIPPED),
    _change("core/step.py", "gradients below the largest norm are scaled up to it",
        "min(1.0, self._clip_norm / (norm + 1e-6))", "self._clip_norm / (norm + 1e-6)", STEP),
    _change("core/operations.py", "the norm is of gradients rounded to the weights' dtype",
        "torch.linalg.vector_norm(part.gradient[piece.start : piece.stop])",
        "torch.linalg.vector_norm(part.gradient[piece.start : piece.stop].to(part.working.dtype)).float()", NORM),
    _change("core/final_gradients.py", "the norm leaves out the unit that was final last",
        "for part in self._store.parts if id(part) in self._norms]",
        "for part in self._store.parts[1:] if id(part) in self._norms]", LIKE_TRANSFORMERS),
    _change("core/step.py", "the gradients' scale is not undone in fp16", "factor = clip / self.loss_scale.scale",
        "factor = clip", UNSCALED),
    _change("core/step.py", "the norm is that of scaled gradients in fp16", "norm / self.loss_scale.scale\n", "norm\n",
        NORM),
    _change("core/step.py", "a step that was skipped counts as an update", "        self.loss_scale.update(updated)\n",
        "        self.loss_scale.update(updated)\n        self.updates += not updated\n", OVERFLOW),
    _change("core/step.py", "a step that is not finite is taken", "updated = math.isfinite(norm)", "updated = True",
        OVERFLOW),
    _change("core/precision.py", "the scale of fp16 gradients is not halved", "self.scale = max(self.scale / 2, 1.0)",
        "pass", PRECISION),
    # dropout and recomputing
    _change("core/step.py", "every step has the same dropout masks", DROPOUTS, DROPOUTS.replace("step, ", "0, "),
        MASKS),
    _change("core/step.py", "every micro-batch has the same dropout masks", DROPOUTS,
        DROPOUTS.replace("index) for", "0) for"), MASKS),
    _change("core/step.py", "every run has the same dropout masks", DROPOUTS, DROPOUTS.replace("self._seed", "0"),
        MASKS),
    _change("core/recompute.py", "a recomputed block has other dropout masks", RUN_AGAIN,
        RUN_AGAIN.replace("dropout", "Dropout(dropout.seed, dropout.step, dropout.micro_batch + 1)"), RECOMPUTE),
    _change("core/operations.py", "the embeddings' backward has other dropout masks than their forward",
        "        dropout.begin(-1, self.store.device)\n        with SparseLookups",
        "        dropout.begin(-2, self.store.device)\n        with SparseLookups", EMBEDDINGS),
    _change("core/products.py", "a block leaves out a last product that backward needs",
        "PRODUCTS or needed or", "PRODUCTS or", PRODUCTS),
    _change("core/products.py", "a layer skips all its products instead of the last",
        "for number in products) == 1", "for number in products) >= 1", PRODUCTS),
    _change("core/products.py", "a product counts as not needed though what is computed from it is saved",
        "computed_from.update(map(", "set().update(map(", PRODUCTS),
    _change("core/products.py", "a skipped layer's products are kept and handed out to others",
        "if is_saved(func, args) and not self._paused", "if is_saved(func, args)", PRODUCTS),
    _change("core/operations.py", "a layer skips its product though a user has changed the model since",
        "if not equal(structure_of(decoder.model), decoder.structure)", "if False", RECORDINGS),
    _change("core/recompute.py", "a repeated block has the dropout masks of the recorded one",
        "called_again(Dropout.begin, dropout, index, hidden.device)", "dropout.begin(index, hidden.device)",
        RECORDINGS),
    _change("core/recordings.py", "a block is repeated for arguments with other values",
        "shape.append((type(value), value))", "shape.append(type(value))", RECORDINGS),
    _change("core/operation_recorder.py", "a sum takes the place of a gradient that something else holds",
        "if self.holders == self._alone and _is_dense", "if _is_dense", RECORDINGS),
    _change("core/step.py", "a changed model is trained as it was before", "        self.operations.begin()\n", "",
        RECORDINGS),
    _change("core/operation_recorder.py",
        "numbers that Python may have read in the CPU's memory are taken for constants",
        "tensor.dtype in _COUNTS", "False", RECORDINGS),
    _change("core/norms.py", "a norm rounds its output to 16 bit though a sum reads it",
        "modules in readers.items() if norm not in others", "modules in readers.items()", NORMS),
    _change("core/norms.py", "a norm rounds its output to 16 bit though a layer outside its block reads it",
        "all(block_of.get(reader) is block_of.get(module) for reader in found)", "found", NORMS),
    _change("core/norms.py", "the gradient that comes past a norm is left out",
        "None if of_total is None else of_total.contiguous()", "None", SUMS),
    _change("core/kernels/layer_kernels.py", "the gradient of a branch has another dropout mask than the sum",
        "p, ROWS, COLUMNS), result", "p + 0.1, ROWS, COLUMNS), result", SUMS),
    _change("core/residual_sums.py", "a dropout is left to a sum though something else reads its output",
        "len(dropouts) == reads == 1", "len(dropouts) == 1", SUMS),
    _change("core/operations.py", "a block's sums are replaced though a user has changed the model since",
        "forward.own_sums = True", "forward.own_sums = False", SUMS),
    _change("core/kernels/layer_kernels.py", "the gradient of a norm's input lacks the mean's part",
        "        if CENTERED:\n            result -=", "        if not CENTERED:\n            result -=", NORMS),
    _change("core/kernels/layer_kernels.py", "the gradient for an activation lacks the slope of GELU's cubic term",
        "(linear + 3.0 * cubic * gate * gate)", "(linear + cubic * gate * gate)", ACTIVATIONS),
    _change("core/kernels/layer_kernels.py", "a norm's epsilon stands outside the square root",
        "tl.sqrt_rn(tl.sum(x * x, axis=1) / columns + epsilon)",
        "(tl.sqrt_rn(tl.sum(x * x, axis=1) / columns) + epsilon)", NORMS),
    _change("core/kernels/layer_kernels.py", "a gated activation is rounded before its product, too",
        "y = gate * _share(gate, linear, cubic, ERF)",
        "y = (gate * _share(gate, linear, cubic, ERF)).to(y_at.dtype.element_ty).to(tl.float32)", ACTIVATIONS),
    _change("core/kernels/layer_kernels.py", "the slope of GELU has a bell curve of another width",
        "tl.exp(-0.5 * gate * gate)", "tl.exp(-gate * gate)", ACTIVATIONS),
    _change("core/kernels/layer_kernels.py", "a program's sum for a bias has a row of the next program, too",
        "there = ((own < rows_each) & (row < rows))[:, None]", "there = (row < rows)[:, None]", ACTIVATIONS),
    _change("core/kernels/layer_kernels.py", "dropout does not divide what it keeps by 1 - p",
        "y = tl.where(kept, x * factor_of_kept, 0.0)", "y = tl.where(kept, x, 0.0)", DROPPED),
    _change("core/kernels/triton_kernels.py", "a kernel corrects epsilon with the second moment",
        "tl.div_rn(tl.sqrt_rn(v), root_of_correction2) + epsilon",
        "tl.div_rn(tl.sqrt_rn(v) + epsilon, root_of_correction2)", "core/test_fused.py"),
    _change("core/dry_run.py", "an MLP that computes anything else is taken to be a gated one",
        "<= _MOST_ERROR * formula", "<= formula", ACTIVATIONS),
    _change("core/activations.py", "a bias's gradient is that of one reader, though the tensor has two",
        "noted if version == gradient._version else", "noted if version is not None else", ACTIVATIONS),
    _change("core/activations.py", "an activation is left to a product though a user has changed the model since",
        "return all(is_ours(hook)", "return True or all(is_ours(hook)", ACTIVATIONS),
    _change("core/activations.py", "a user's hook on an activation does not run",
        "for module in (layer, *self._replaced):", "for module in (layer,):", ACTIVATIONS),
    _change("core/products.py", "a recomputation takes an activation's input for its output",
        "and self._products and self._products[0] is not None", "and self._products", ACTIVATIONS),
    _change("core/kernels/layer_kernels.py", "gradients of queries and keys are rotated forwards",
        "sin, other_sin = -other_sin, -sin", "sin, other_sin = sin, other_sin", ROTARY),
    _change("core/rotary.py", "a model that rotates other pairs is taken to rotate halves",
        "or not all(map(agrees, found, truth))", "", ROTARY),
    _change("planning/columns.py", "a plan leaves states of one unit more in RAM than fit there",
        "place = bisect_left(counts, True, key=enough)", "place = max(0, bisect_left(counts, True, key=enough) - 1)",
        "planning/test_plan.py", "planning/test_search.py"),
    _change("core/loss.py", "the gradient of the words that 8 does not divide is left out", "beta=len(others))",
        "beta=0)", "core/test_fused.py"),
    _change("core/products.py", "products that are kept are handed out one place too early",
        "self._products = deque(products)", "self._products = deque([*products[-4:], *products])", PRODUCTS, RECOMPUTE),
    _change("core/norms.py", "norms compute in 16 bit", CAST_NORM,
        CAST_NORM.replace("x.float(), *gate, **keywords).to(x.dtype)", "x, *gate, **keywords)"), PRECISION),
    # going on
    _change("run/loaded_model.py", "a resumed run counts its updates from 0", STOPPED_AT,
        STOPPED_AT.replace('state["updates"]', "0"), "run/test_scripts.py", "faults/test_stops.py"),
    _change("run/loaded_model.py", "a resumed run begins with a fresh scale of gradients",
        '        self.step.loss_scale.load(state["loss_scale"])\n', "", "run/test_scripts.py",
        "faults/test_stops.py"),
    # several machines
    _change("core/shares.py", "a machine's sum of gradients is not added to those of others",
        "        if machines == 1:\n", "        if machines >= 1:\n", MACHINES),
    _change("core/shares.py", "every machine's copy of a gradient counts in the norm",
        "of_first = self.rank < self.sharing", "of_first = True", MACHINES),
    # several processes
    _change("core/step.py", "sums over ranks of a step that was given up are kept",
        "        self.store.ranks.discard()\n", "", AGREEMENT),
    _change("distributed/collectives.py", "an error of one rank is not raised by the others",
        "for first in filter(None, errors):", "for first in filter(None, [error]):", AGREEMENT),
    # plans
    _change("cudasim/allocator.py", "the allocator takes the best fit though it could grow",
        "            place += 1\n", "            break\n", "cudasim/test_allocator.py"),
    _change("cudasim/allocator.py", "a request counts as wanted with the part that is there",
        "max(self.wanted_peak_bytes, self.reserved_bytes + segment_bytes)", "self.peak_reserved_bytes",
        "cudasim/test_allocator.py"),
    _change("planning/simulations.py", "a layout fits only if it completes under this very cap",
        "or self.smallest_cap_bytes(layout) <= limit_bytes", "", "planning/test_search.py"),
    # experiments
    _change("tensor_parallel/rules.py", "GPT-2's MLP is left whole on every rank", UNCUT_MLP, "",
        "experiments/test_tensor_parallel.py::test_a_rank_holds_what_theory_says", package="experiments"),
)
# fmt: on
